"""Kinds from laboratories, sequences and words: piano, sessions of shops, intents in half precision, titles, essays."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.zoo.steps import PLAIN, Arrays, Inputs, Outputs, Step, Style, kind


class Piano(nn.Module):
    """Onsets of notes from a spectrogram, and the notes that sound, which see the onsets."""

    def __init__(self) -> None:
        super().__init__()
        self.front = nn.Conv1d(16, 13, 3, padding=1)
        self.onset_rnn = nn.GRU(13, 9, batch_first=True)
        self.onset_out = nn.Linear(9, 11)
        self.frame_rnn = nn.GRU(13 + 11, 10, batch_first=True)
        self.frame_out = nn.Linear(10, 11)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = F.relu(self.front(x.transpose(1, 2))).transpose(1, 2)
        onset = self.onset_out(self.onset_rnn(x)[0])
        frame = self.frame_out(self.frame_rnn(torch.cat([x, torch.sigmoid(onset).detach()], 2))[0])
        return onset, frame


@kind("lab-piano-transcription")
def piano_transcription() -> Iterator[Step]:
    """Notes of a piano from spectra: two heads with losses of their own beside the sum; Adam, Adamax."""

    def step(variant: str, style: Style, largest: bool) -> Step:
        net = Piano()
        weights = {name: weight.detach().clone() for name, weight in net.named_parameters()}
        batch = {"mel": torch.randn(2, 6, 16), "onsets": (torch.rand(2, 6, 11) > 0.9).float()}
        batch["frames"] = torch.maximum(batch["onsets"], (torch.rand(2, 6, 11) > 0.8).float())
        second = "exp_inf" if largest else "exp_avg_sq"
        slots = {f"{name}_{slot}": torch.zeros_like(x) for name, x in weights.items() for slot in ("exp_avg", second)}

        def run(values: Arrays) -> Outputs:
            w = {name: values[name].detach().clone().requires_grad_() for name in weights}
            onset, frame = torch.func.functional_call(net, w, (values["mel"],))
            more = torch.tensor(3.0)
            onset_loss = F.binary_cross_entropy_with_logits(onset, values["onsets"], pos_weight=more)
            frame_loss = F.binary_cross_entropy_with_logits(frame, values["frames"])
            loss = onset_loss + frame_loss
            grads = torch.autograd.grad(loss, list(w.values()))
            said, true = (frame > 0).float(), values["frames"]
            f1 = 2 * (said * true).sum() / (said.sum() + true.sum()).clamp(min=1.0)
            metrics = {"onset_loss": onset_loss.detach(), "frame_loss": frame_loss.detach(), "frame_f1": f1}
            step = values["step"] + 1
            t, following = step.float(), {"step": step}
            rate = values["lr"] if largest else 6e-4 * 0.98 ** torch.floor(t / 10000.0)
            for (name, weight), grad in zip(w.items(), grads, strict=True):
                grad = grad.clamp(-3.0, 3.0)
                m = following[f"{name}_exp_avg"] = values[f"{name}_exp_avg"] * 0.9 + grad * 0.1
                v = values[f"{name}_{second}"]
                if largest:
                    v = torch.maximum(v * 0.999, grad.abs() + 1e-6)
                    move = m / (v * (1 - 0.9**t))
                else:
                    v = v * 0.999 + grad.square() * 0.001
                    move = (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-6)
                following[f"{name}_{second}"] = v
                following[name] = weight.detach() - rate * move
            return Outputs({"loss": loss.detach()}, metrics, states=following)

        states = weights | slots | {"step": torch.tensor(0)}
        fed = {"lr": torch.tensor(1e-3)} if largest else {}
        return Step(variant, Inputs(batch, states, fed), run, style)

    yield step("adam", Style(names="exporter"), False)
    yield step("adamax", Style(order="shuffled"), True)


@kind("lab-shop-sessions")
def shop_sessions() -> Iterator[Step]:
    """The next item of sessions that run in parallel, each with a hidden state that ends with its session; Adagrad."""

    def step(variant: str, style: Style, top: bool) -> Step:
        weights = {"item_in": 0.2 * torch.randn(17, 7), "gates_x": torch.randn(7, 24) / 3}
        weights |= {"gates_h": torch.randn(8, 16) / 3, "candidate_h": torch.randn(8, 8) / 3, "gates_b": torch.zeros(24)}
        weights |= {"item_out": 0.2 * torch.randn(17, 8), "item_bias": torch.zeros(17)}
        batch = {"item": torch.randint(17, (5,)), "next_item": torch.randperm(17)[:5], "ended": torch.zeros(5)}
        batch["ended"][1] = 1.0
        batch["keep_mask"] = (torch.rand(5, 8) > 0.2).float() / 0.8
        carried = {"hidden": torch.zeros(5, 8)}
        sums = {f"{name}_acc": torch.full_like(weight, 0.1) for name, weight in weights.items()}
        speed = {f"{name}_mom": torch.zeros_like(weight) for name, weight in weights.items()} if top else {}

        def objective(w: Arrays, values: Arrays) -> tuple[Tensor, tuple[Arrays, Tensor]]:
            h = values["hidden"] * (1 - values["ended"])[:, None]
            x = w["item_in"][values["item"]] @ w["gates_x"] + w["gates_b"]
            reset, update = torch.sigmoid(x[:, :16] + h @ w["gates_h"]).chunk(2, 1)
            h = torch.lerp(torch.tanh(x[:, 16:] + (reset * h) @ w["candidate_h"]), h, update)
            target = values["next_item"]
            scores = (h * values["keep_mask"]) @ w["item_out"][target].T + w["item_bias"][target]
            good, others = (scores * torch.eye(5)).sum(1, keepdim=True), 1 - torch.eye(5)
            rank = 1 + ((scores > good).float() * others).sum(1)
            if top:
                share = torch.softmax(scores - 1e4 * torch.eye(5), 1)
                loss = (share * (torch.sigmoid(scores - good) + torch.sigmoid(scores * scores))).sum(1).mean()
            else:
                loss = -(torch.log_softmax(scores, 1) * torch.eye(5)).sum(1).mean()
            return loss, ({"mrr": (1 / rank).mean(), "recall_at_2": (rank <= 2).float().mean()}, h)

        def run(values: Arrays) -> Outputs:
            present = {name: values[name] for name in weights}
            grads, (loss, (metrics, hidden)) = torch.func.grad_and_value(objective, has_aux=True)(present, values)
            following = {"hidden": hidden}
            for name, grad in grads.items():
                total = following[f"{name}_acc"] = values[f"{name}_acc"] + grad * grad
                move = 0.05 * grad / (total + 1e-6).sqrt()
                if top:
                    move = following[f"{name}_mom"] = values[f"{name}_mom"] * 0.3 + move
                following[name] = present[name] - move
            return Outputs({"cost": loss}, metrics, states=following)

        return Step(variant, Inputs(batch, weights | carried | sums | speed), run, style)

    yield step("cross-entropy", PLAIN, False)
    yield step("top-one-max", Style(names="scrambled", states="initializers", order="shuffled"), True)


class Intents(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(33, 10)
        self.conv3, self.conv5 = nn.Conv1d(10, 8, 3, padding=1), nn.Conv1d(10, 8, 5, padding=2)
        self.hidden, self.out = nn.Linear(16, 14), nn.Linear(14, 6)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens).transpose(1, 2)
        x = torch.cat([torch.relu(self.conv3(x)), torch.relu(self.conv5(x))], 1).mean(2)
        return self.out(torch.tanh(self.hidden(x)))


@kind("lab-half-intents")
def half_intents() -> Iterator[Step]:
    """Intents of utterances in half precision: masters, and a scale of the loss that halves and doubles by itself."""

    def step(variant: str, style: Style, stored: bool) -> Step:
        net = Intents()
        masters = {f"master.{name}": weight.detach().clone() for name, weight in net.named_parameters()}
        names = [name.removeprefix("master.") for name in masters]
        halves = {name: masters[f"master.{name}"].half() for name in names} if stored else {}
        slots = {f"{slot}.{n}": torch.zeros_like(masters[f"master.{n}"]) for slot in ("m", "v") for n in names}
        scaler = {"scale": torch.tensor(256.0), "growth_tracker": torch.tensor(0, dtype=torch.int32)}
        batch = {"tokens": torch.randint(33, (6, 9)), "intent": torch.randint(6, (6,))}

        def run(values: Arrays) -> Outputs:
            w = {n: (values[n] if stored else values[f"master.{n}"].half()).detach().clone() for n in names}
            w = {name: weight.requires_grad_() for name, weight in w.items()}
            logits = torch.func.functional_call(net, w, (values["tokens"],)).float()
            loss = F.cross_entropy(logits, values["intent"])
            grads = torch.autograd.grad(loss * values["scale"], list(w.values()))
            grads = {n: grad.float() / values["scale"] for n, grad in zip(names, grads, strict=True)}
            bad = torch.stack([(~torch.isfinite(grad)).any() for grad in grads.values()]).any()
            grads = {name: torch.where(torch.isfinite(grad), grad, 0.0) for name, grad in grads.items()}
            step = values["step"] + 1
            t, moved = step.float(), {"step": step}
            for n, grad in grads.items():
                m = moved[f"m.{n}"] = 0.9 * values[f"m.{n}"] + 0.1 * grad
                v = moved[f"v.{n}"] = 0.98 * values[f"v.{n}"] + 0.02 * grad * grad
                master = values[f"master.{n}"] * (1 - values["lr"] * 0.01)
                root = (v / (1 - 0.98**t)).sqrt() + 1e-6
                moved[f"master.{n}"] = master - values["lr"] * (m / (1 - 0.9**t)) / root
            moved = {name: torch.where(bad, values[name], value) for name, value in moved.items()}
            if stored:
                moved |= {n: moved[f"master.{n}"].half() for n in names}
            tracker = values["growth_tracker"] + 1
            grown = tracker == 4
            kept = {"scale": values["scale"] * torch.where(bad, 0.5, torch.where(grown, 2.0, 1.0))}
            kept["growth_tracker"] = torch.where(bad | grown, torch.zeros_like(tracker), tracker)
            metrics = {"accuracy": (logits.argmax(1) == values["intent"]).float().mean(), "found_inf": bad}
            return Outputs({"loss": loss.detach()}, metrics, states=moved, kept=kept)

        states = halves | masters | slots | {"step": torch.tensor(0)} | scaler
        return Step(variant, Inputs(batch, states, {"lr": torch.tensor(2e-3)}), run, style)

    yield step("stored-halves", PLAIN, True)
    yield step("cast-inside", Style(names="exporter", optimize=False), False)


@kind("lab-product-titles")
def product_titles() -> Iterator[Step]:
    """Categories of product titles by means of word vectors, updates of the rows in the batch: lazy Adam, SGD."""

    def words(table: Tensor, values: Arrays) -> Tensor:
        mask = values["word_mask"][..., None]
        return (table * mask).sum(1) / mask.sum(1).clamp(min=1.0)

    mask = (torch.arange(6) < torch.tensor([[6], [4], [5], [3], [6]])).float()
    batch = {"words": torch.randint(40, (5, 6)), "word_mask": mask, "category": torch.randint(7, (5,))}

    def lazy(values: Arrays) -> Outputs:
        def objective(w: Arrays) -> tuple[Tensor, Tensor]:
            logits = words(w["word_vectors"][values["words"]], values) @ w["output.weight"].T + w["output.bias"]
            return F.cross_entropy(logits, values["category"]), (logits.argmax(1) == values["category"]).float().mean()

        present = {name: values[name] for name in ("word_vectors", "output.weight", "output.bias")}
        grads, (loss, accuracy) = torch.func.grad_and_value(objective, has_aux=True)(present)
        step = values["step"] + 1
        t, following = step.float(), {"step": step}
        seen = torch.zeros(40).index_put((values["words"].flatten(),), values["word_mask"].flatten(), accumulate=True)
        for name, grad in grads.items():
            m = 0.9 * values[f"{name}.m"] + 0.1 * grad
            v = 0.999 * values[f"{name}.v"] + 0.001 * grad * grad
            new = present[name] - 5e-3 * (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-6)
            if name == "word_vectors":
                touched = (seen > 0)[:, None]
                new = torch.where(touched, new, present[name])
                m, v = torch.where(touched, m, values[f"{name}.m"]), torch.where(touched, v, values[f"{name}.v"])
            following |= {name: new, f"{name}.m": m, f"{name}.v": v}
        return Outputs({"loss": loss}, {"accuracy": accuracy}, states=following)

    weights = {"word_vectors": 0.3 * torch.randn(40, 9), "output.weight": torch.randn(7, 9) / 3}
    weights |= {"output.bias": torch.zeros(7)}
    slots = {f"{name}.{slot}": torch.zeros_like(weight) for name, weight in weights.items() for slot in "mv"}
    states = weights | slots | {"step": torch.tensor(0)}
    yield Step("lazy-adam", Inputs(batch, states), lazy, Style(shapes="interface"))

    def scattered(values: Arrays) -> Outputs:
        rows = values["word_vectors"][values["words"]]

        def objective(rows: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
            logits = words(rows, values) @ weight.T + bias
            other = (values["category"][:, None] == torch.arange(7)).float()
            each = F.binary_cross_entropy_with_logits(logits, other, reduction="none").sum(1)
            return each.mean(), each

        given = rows, values["output.weight"], values["output.bias"]
        grads, (loss, each) = torch.func.grad_and_value(objective, (0, 1, 2), has_aux=True)(*given)
        rate = 0.2 * (1 - values["progress"]).clamp(min=0.01)
        table = values["word_vectors"].index_add(0, values["words"].flatten(), -rate * grads[0].flatten(0, 1))
        following = {"word_vectors": table, "output.weight": given[1] - rate * grads[1]}
        following["output.bias"] = given[2] - rate * grads[2]
        following["words_seen"] = values["words_seen"] + values["word_mask"].sum().long()
        return Outputs({"loss": loss}, {"loss_of_title": each}, states=following)

    states = weights | {"words_seen": torch.tensor(0)}
    fed = {"progress": torch.tensor(0.15)}
    yield Step("scattered-rows", Inputs(batch, states, fed), scattered, Style(names="exporter"))


class Essays(nn.Module):
    """Sentences by attention over words, an essay by attention over sentences, a score with ordered thresholds."""

    def __init__(self) -> None:
        super().__init__()
        self.word_emb = nn.Embedding(30, 8)
        self.word_key, self.word_query = nn.Linear(8, 9), nn.Linear(9, 1, bias=False)
        self.sentence = nn.Linear(8, 12)
        self.sent_key, self.sent_query = nn.Linear(12, 7), nn.Linear(7, 1, bias=False)
        self.score = nn.Linear(12, 1, bias=False)
        self.thresholds = nn.Parameter(torch.linspace(1.0, -1.0, 4))

    def forward(self, words: Tensor) -> Tensor:
        x = self.word_emb(words)
        x = (torch.softmax(self.word_query(torch.tanh(self.word_key(x))), 2) * x).sum(2)
        x = F.elu(self.sentence(x))
        x = (torch.softmax(self.sent_query(torch.tanh(self.sent_key(x))), 1) * x).sum(1)
        return self.score(x) + self.thresholds


@kind("lab-essay-scores")
def essay_scores() -> Iterator[Step]:
    """Scores of essays as ordered grades: factored second moments, and gradients for an optimizer elsewhere."""
    batch = {"words": torch.randint(30, (4, 3, 6)), "grade": torch.randint(5, (4,))}
    net = Essays()
    weights = {name: weight.detach().clone() for name, weight in net.named_parameters()}

    def objective(w: Arrays, values: Arrays) -> tuple[Tensor, Arrays]:
        logits = torch.func.functional_call(net, w, (values["words"],))
        above = (values["grade"][:, None] > torch.arange(4)).float()
        loss = F.binary_cross_entropy_with_logits(logits, above, reduction="none").sum(1).mean()
        guess = (logits > 0).sum(1)
        off = (guess - values["grade"]).abs().float()
        return loss, {"mean_absolute_grade_error": off.mean(), "exact": (off < 0.5).float().mean(), "predicted": guess}

    def factored(values: Arrays) -> Outputs:
        present = {name: values[name] for name in weights}
        grads, (loss, metrics) = torch.func.grad_and_value(objective, has_aux=True)(present, values)
        step = values["step"] + 1
        beta, following = 1 - step.float() ** -0.8, {"step": step}
        for name, grad in grads.items():
            square = grad.square() + 1e-6
            if grad.dim() == 2 and min(grad.shape) > 1:
                rows = torch.lerp(square.mean(1), values[f"{name}.row"], beta)
                columns = torch.lerp(square.mean(0), values[f"{name}.col"], beta)
                following |= {f"{name}.row": rows, f"{name}.col": columns}
                update = grad * torch.rsqrt(rows / rows.mean())[:, None] * torch.rsqrt(columns)
            else:
                full = following[f"{name}.full"] = torch.lerp(square, values[f"{name}.full"], beta)
                update = grad * torch.rsqrt(full)
            update = update / (update.square().mean().sqrt() / 1.0).clamp(min=1.0)
            size = present[name].square().mean().sqrt().clamp(min=1e-3)
            following[name] = present[name] - torch.clamp(1 / step.float().sqrt(), max=1e-2) * size * update
        return Outputs({"loss": loss}, metrics, states=following)

    slots = {}
    for name, weight in weights.items():
        if weight.dim() == 2 and min(weight.shape) > 1:
            slots |= {f"{name}.row": torch.zeros(weight.shape[0]), f"{name}.col": torch.zeros(weight.shape[1])}
        else:
            slots[f"{name}.full"] = torch.zeros_like(weight)
    states = weights | slots | {"step": torch.tensor(0)}
    yield Step("factored", Inputs(batch, states), factored, Style(shapes="interface"))

    def gradients(values: Arrays) -> Outputs:
        present = {name: values[name] for name in weights}
        grads, (loss, metrics) = torch.func.grad_and_value(objective, has_aux=True)(present, values)
        return Outputs({"loss": loss}, metrics, {f"{name}.grad": grad for name, grad in grads.items()})

    yield Step("gradients", Inputs(batch, constants=weights), gradients, Style(names="exporter"))
