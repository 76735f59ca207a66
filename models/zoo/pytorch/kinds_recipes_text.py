"""Recipes of text: classification, translation, tagging, word vectors."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.zoo.pytorch.recipes import (
    BARE,
    EXPORTER,
    SCRAMBLED,
    adam_state,
    adamw,
    call,
    clip_norm,
    grads_of,
    heavy_ball,
    keras_adam,
    norm_of,
    parameters,
    select,
    zeros_of,
)
from models.zoo.steps import Arrays, Inputs, Outputs, Step, Style, kind


class TextConvolutions(nn.Module):
    """Kim's network: three widths of windows, the maximum over time."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, 12)
        self.windows = nn.ModuleList([nn.Conv1d(12, 7, width) for width in (2, 3, 4)])
        self.out = nn.Linear(21, 4)

    def forward(self, tokens: Tensor, keep: Tensor) -> Tensor:
        x = self.embedding(tokens).transpose(1, 2)
        x = torch.cat([F.relu(window(x)).amax(2) for window in self.windows], 1)
        return self.out(x * keep / 0.5)


@kind("text-cnn")
def text_cnn() -> Iterator[Step]:
    """A text classifier whose last rows have a bounded norm; Adadelta, or Adam on frozen word vectors."""
    net = TextConvolutions()
    params = parameters(net)
    batch = {"tokens": torch.randint(1, 40, (6, 9)), "label": torch.randint(4, (6,))}
    batch["dropout_keep"] = (torch.rand(6, 21) < 0.5).float()

    def objective(weights: Arrays, values: Arrays) -> tuple[Tensor, Arrays]:
        logits = call(net, weights, values["tokens"], values["dropout_keep"])
        loss = F.cross_entropy(logits, values["label"], weight=values.get("class_weight"))
        return loss, {"accuracy": (logits.argmax(1) == values["label"]).float().mean()}

    def bounded(weight: Tensor) -> Tensor:
        return weight * (3.0 / (weight.norm(dim=1, keepdim=True) + 1e-5)).clamp(max=1.0)

    def with_adadelta(values: Arrays) -> Outputs:
        weights = select(values, params)
        loss, metrics, grads = grads_of(lambda w: objective(w, values), weights)
        states: Arrays = {}
        for name, w in weights.items():
            g = grads[name]
            square = 0.95 * values[f"square_avg.{name}"] + 0.05 * g * g
            delta = (values[f"acc_delta.{name}"] + 1e-5).sqrt() / (square + 1e-5).sqrt() * g
            states |= {name: w - delta, f"square_avg.{name}": square}
            states[f"acc_delta.{name}"] = 0.95 * values[f"acc_delta.{name}"] + 0.05 * delta * delta
        states["out.weight"] = bounded(states["out.weight"])
        return Outputs({"loss": loss}, metrics, states=states)

    learnt = {name: value for name, value in params.items() if not name.startswith("embedding")}

    def with_adam(values: Arrays) -> Outputs:
        weights, table = select(values, learnt), {"embedding.weight": values["embedding.weight"]}
        loss, metrics, grads = grads_of(lambda w: objective(table | w, values), weights)
        states = keras_adam(weights, grads, values, values["learning_rate"])
        states["out.weight"] = bounded(states["out.weight"])
        return Outputs({"loss": loss}, metrics | {"grad_norm": norm_of(grads)}, states=states)

    yield Step("adadelta", Inputs(batch, params | zeros_of(params, "square_avg", "acc_delta")), with_adadelta)
    constants = {"embedding.weight": params["embedding.weight"], "class_weight": torch.tensor([1.0, 2.0, 0.5, 1.3])}
    states = learnt | zeros_of(learnt, "m", "v") | {"iterations": torch.tensor(0)}
    rates = {"learning_rate": torch.tensor(1e-3)}
    yield Step("adam-frozen-vectors", Inputs(batch, states, rates, constants), with_adam, EXPORTER)


class Translator(nn.Module):
    """An encoder by a GRU, additive attention, and a decoder by a cell."""

    def __init__(self) -> None:
        super().__init__()
        self.source = nn.Embedding(17, 8)
        self.target = nn.Embedding(19, 7)
        self.encoder = nn.GRU(8, 10, batch_first=True)
        self.query = nn.Linear(12, 9, bias=False)
        self.key = nn.Linear(10, 9, bias=False)
        self.score = nn.Linear(9, 1, bias=False)
        self.bridge = nn.Linear(10, 12)
        self.cell = nn.GRUCell(7 + 10, 12)
        self.out = nn.Linear(12 + 10, 19)

    def forward(self, source: Tensor, before: Tensor, teach: Tensor | None) -> Tensor:
        memory, last = self.encoder(self.source(source))
        padded = (source == 0).float()
        keys, h = self.key(memory), torch.tanh(self.bridge(last[0]))
        logits, fed = [], before[:, 0]
        for place in range(before.shape[1]):
            scores = self.score(torch.tanh(keys + self.query(h)[:, None]))[..., 0] - 1e4 * padded
            context = (torch.softmax(scores, -1)[..., None] * memory).sum(1)
            h = self.cell(torch.cat([self.target(fed), context], -1), h)
            logits.append(self.out(torch.cat([h, context], -1)))
            if place + 1 < before.shape[1]:
                fed = before[:, place + 1]
                fed = fed if teach is None else torch.where(teach[:, place] > 0, fed, logits[-1].argmax(-1))
        return torch.stack(logits, 1)


@kind("attentive-translation")
def attentive_translation() -> Iterator[Step]:
    """Label smoothing without padding; Noam's rate by the step, and scheduled sampling by a counter."""
    net = Translator()
    params = parameters(net)
    text = torch.randint(3, 19, (4, 6))
    text[1, 4:], text[3, 5:] = 0, 0
    source = torch.randint(1, 17, (4, 7))
    source[0, 5:] = 0
    batch = {"source": source, "target_in": text[:, :-1].contiguous(), "target_out": text[:, 1:].contiguous()}

    def objective(weights: Arrays, values: Arrays, teach: Tensor | None = None) -> tuple[Tensor, Arrays]:
        logits = call(net, weights, values["source"], values["target_in"], teach).flatten(0, 1)
        labels = values["target_out"].flatten()
        loss = F.cross_entropy(logits, labels, ignore_index=0, label_smoothing=0.1)
        plain = F.cross_entropy(logits, labels, ignore_index=0)
        real = (labels != 0).float()
        hits = ((logits.argmax(-1) == labels).float() * real).sum() / real.sum()
        return loss, {"ppl": plain.exp(), "token_accuracy": hits, "n_tokens": (labels != 0).sum()}

    def with_noam(values: Arrays) -> Outputs:
        weights = select(values, params)
        loss, metrics, grads = grads_of(lambda w: objective(w, values), weights)
        grads, norm = clip_norm(grads, 1.0)
        t = (values["step"] + 1).float()
        lr = 12**-0.5 * torch.minimum(t**-0.5, t * 400**-1.5)
        states = adamw(weights, grads, values, lr, betas=(0.9, 0.98))
        return Outputs({"loss": loss}, metrics | {"lr": lr, "grad_norm": norm}, states=states)

    def with_sampling(values: Arrays) -> Outputs:
        weights, t = select(values, params), values["updates"].float()
        chance = 50 / (50 + torch.exp(t / 50))
        teach = (values["uniform"] < chance).float()
        loss, metrics, grads = grads_of(lambda w: objective(w, values, teach), weights)
        grads, norm = clip_norm(grads, 5.0)
        states = heavy_ball(weights, grads, values, values["lr"], nesterov=True)
        others = {"ppl": metrics["ppl"], "grad_norm": norm, "teacher_chance": chance}
        return Outputs({"loss": loss}, others, states=states | {"updates": values["updates"] + 1})

    yield Step("adam-noam", Inputs(batch, params | adam_state(params)), with_noam)
    states = params | zeros_of(params, "momentum") | {"updates": torch.tensor(120)}
    given = Inputs(batch | {"uniform": torch.rand(4, 4)}, states, {"lr": torch.tensor(0.02)})
    yield Step("scheduled-sampling", given, with_sampling, SCRAMBLED)


class Tagger(nn.Module):
    """Emissions of tags by a bidirectional GRU over words and shapes of words."""

    def __init__(self) -> None:
        super().__init__()
        self.word = nn.Embedding(31, 9)
        self.shape = nn.Embedding(6, 3)
        self.rnn = nn.GRU(12, 8, batch_first=True, bidirectional=True)
        self.emit = nn.Linear(16, 5)

    def forward(self, words: Tensor, shapes: Tensor) -> Tensor:
        x = torch.cat([self.word(words), self.shape(shapes)], -1)
        return self.emit(self.rnn(x)[0])


@kind("crf-tagger")
def crf_tagger() -> Iterator[Step]:
    """A conditional random field over a tagger: the forward algorithm with a mask; two groups of rates."""
    net = Tagger()
    params = parameters(net) | {"crf.start": 0.1 * torch.randn(5), "crf.stop": 0.1 * torch.randn(5)}
    params |= {"crf.transitions": 0.1 * torch.randn(5, 5)}
    lengths = torch.tensor([6, 4, 5, 6])
    mask = (torch.arange(6) < lengths[:, None]).float()
    batch = {"words": torch.randint(31, (4, 6)), "shapes": torch.randint(6, (4, 6)), "tags": torch.randint(5, (4, 6))}
    batch["mask"] = mask

    def objective(weights: Arrays, values: Arrays) -> tuple[Tensor, Arrays]:
        own = {name: value for name, value in weights.items() if not name.startswith("crf")}
        emissions = call(net, own, values["words"], values["shapes"])
        start, stop, moves = weights["crf.start"], weights["crf.stop"], weights["crf.transitions"]
        tags, mask = values["tags"], values["mask"]
        alpha = start + emissions[:, 0]
        path = start[tags[:, 0]] + emissions[:, 0].gather(1, tags[:, :1])[:, 0]
        for place in range(1, tags.shape[1]):
            on = mask[:, place, None]
            following = torch.logsumexp(alpha[:, :, None] + moves, 1) + emissions[:, place]
            alpha = on * following + (1 - on) * alpha
            now, before = tags[:, place], tags[:, place - 1]
            gained = moves[before, now] + emissions[:, place].gather(1, now[:, None])[:, 0]
            path = path + gained * mask[:, place]
        last = tags.gather(1, (mask.sum(1).long() - 1)[:, None])[:, 0]
        nll = torch.logsumexp(alpha + stop, 1) - path - stop[last]
        hits = ((emissions.argmax(-1) == tags).float() * mask).sum() / mask.sum()
        return nll.mean(), {"nll_per_token": nll.sum() / mask.sum(), "emission_accuracy": hits}

    def with_groups(values: Arrays) -> Outputs:
        weights = select(values, params)
        loss, metrics, grads = grads_of(lambda w: objective(w, values), weights)
        field = {name: w for name, w in weights.items() if name.startswith("crf")}
        body = {name: w for name, w in weights.items() if name not in field}
        states = adamw(body, grads, values, values["lr"], decay=0.01)
        states |= adamw(field, grads, values, 10 * values["lr"])
        return Outputs({"nll": loss}, metrics, states=states)

    def with_sgd(values: Arrays) -> Outputs:
        weights = select(values, params)
        loss, _, grads = grads_of(lambda w: objective(w, values), weights)
        grads, norm = clip_norm(grads, 5.0)
        rate = 0.015 / (1 + 0.05 * values["epoch"])
        states = {name: w - rate * grads[name] for name, w in weights.items()}
        return Outputs({"nll": loss}, {"grad_norm": norm}, {"d_transitions": grads["crf.transitions"]}, states)

    def gradients(values: Arrays) -> Outputs:
        loss, metrics, grads = grads_of(lambda w: objective(w, values), select(values, params))
        return Outputs({"nll": loss}, metrics, {f"grad.{name}": grad for name, grad in grads.items()})

    yield Step(
        "adamw-groups", Inputs(batch, params | adam_state(params), {"lr": torch.tensor(1e-3)}), with_groups, BARE
    )
    yield Step("sgd-epochs", Inputs(batch, params, {"epoch": torch.tensor(3.0)}), with_sgd)
    yield Step("gradients", Inputs(batch, constants=params), gradients, Style(names="exporter", order="shuffled"))


@kind("skip-gram-tables")
def skip_gram_tables() -> Iterator[Step]:
    """Negative sampling: only rows of two tables move, by Adagrad of rows; the words seen set the rate."""
    words, width = 50, 9
    tables = {"input": 0.2 * torch.randn(words, width), "output": 0.05 * torch.randn(words, width)}
    batch = {"centre": torch.randint(words, (8,)), "context": torch.randint(words, (8,))}
    batch["negative"] = torch.randint(words, (8, 4))

    def run(values: Arrays, subsampled: bool) -> Outputs:
        centre, ids = values["centre"], torch.cat([values["context"][:, None], values["negative"]], 1)
        rows = {"u": values["input"][centre], "v": values["output"][ids]}
        sign = torch.tensor([1.0, -1, -1, -1, -1])
        states: Arrays = {"words_seen": values["words_seen"] + centre.shape[0]}
        kept = torch.ones(8)
        if subsampled:
            states["counts"] = values["counts"].index_add(0, centre, torch.ones_like(centre))
            share = states["counts"][centre].float() / states["counts"].sum().float()
            kept = (values["uniform"] < torch.sqrt(0.02 / share)).float()

        def objective(own: Arrays) -> tuple[Tensor, Arrays]:
            scores = (own["u"][:, None] * own["v"]).sum(-1) * sign
            each = F.softplus(-scores).sum(1) * kept
            hits = (scores[:, 0] > 0).float().mean()
            return each.sum() / kept.sum().clamp(min=1.0), {"positive_accuracy": hits}

        loss, metrics, grads = grads_of(objective, rows)
        lr = (0.1 * (1 - values["words_seen"].float() / 1e4)).clamp(min=1e-4)
        for name, index, grad in (("input", centre, grads["u"]), ("output", ids.flatten(), grads["v"].flatten(0, 1))):
            total = values[f"{name}_sum"].index_add(0, index, grad.square().mean(1))
            scaled = -lr * grad / (total[index].sqrt() + 1e-4)[:, None]
            states |= {name: values[name].index_add(0, index, scaled), f"{name}_sum": total}
        return Outputs({"loss": loss}, metrics | {"lr": lr, "kept": kept.mean()}, states=states)

    states = tables | {f"{name}_sum": torch.full((words,), 0.01) for name in tables}
    states["words_seen"] = torch.tensor(2048)
    yield Step("row-adagrad", Inputs(batch, states), lambda values: run(values, False))
    counts = {"counts": torch.randint(1, 40, (words,))}
    given = Inputs(batch | {"uniform": torch.rand(8)}, states | counts)
    yield Step("subsampled", given, lambda values: run(values, True), EXPORTER)
