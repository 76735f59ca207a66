"""Kinds from laboratories, ordinary trainers: birds, clauses of contracts, palms, the sun."""

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.zoo.steps import PLAIN, Arrays, Inputs, Outputs, Step, Style, kind


def parameters(net: nn.Module) -> Arrays:
    return {name: weight.detach().clone() for name, weight in net.named_parameters()}


def leaves(values: Arrays, names: Arrays) -> Arrays:
    return {name: values[name].detach().clone().requires_grad_() for name in names}


class Birds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv1d(14, 12, 3, padding=1), nn.Conv1d(12, 16, 3, stride=2, padding=1)
        self.norm = nn.GroupNorm(4, 16)
        self.attend, self.classify = nn.Conv1d(16, 9, 1), nn.Conv1d(16, 9, 1)

    def forward(self, spectrum: Tensor) -> Tensor:
        x = F.relu(self.norm(self.conv2(F.relu(self.conv1(spectrum)))))
        share = torch.softmax(torch.tanh(self.attend(x)), 2)
        return (share * self.classify(x)).sum(2)


@kind("lab-bird-calls")
def bird_calls() -> Iterator[Step]:
    """The birds of a recording, several at once: warm restarts of the rate with momentum, AdamW with a fed rate."""
    net = Birds()
    weights = parameters(net)
    batch = {"spectrum": torch.randn(5, 14, 10), "birds": (torch.rand(5, 9) > 0.75).float()}

    def losses(values: Arrays) -> tuple[Tensor, Arrays, Arrays]:
        w = leaves(values, weights)
        logits = torch.func.functional_call(net, w, (values["spectrum"],))
        each = F.binary_cross_entropy_with_logits(logits, values["birds"], reduction="none")
        loss = each.mean()
        grads = dict(zip(w, torch.autograd.grad(loss, list(w.values())), strict=True))
        best = logits.detach().argmax(1)
        hit = torch.gather(values["birds"], 1, best[:, None]).mean()
        return loss.detach(), grads, {"loss_by_bird": each.detach().mean(0), "top1_hit": hit}

    def restarts(values: Arrays) -> Outputs:
        loss, grads, metrics = losses(values)
        step = values["step"] + 1
        part = (step % 50).float() / 50
        rate = 0.001 + 0.5 * 0.049 * (1 + torch.cos(math.pi * part))
        following = {"step": step}
        for name, grad in grads.items():
            d = grad + 1e-4 * values[name]
            b = following[f"{name}.momentum_buffer"] = values[f"{name}.momentum_buffer"] * 0.9 + d
            following[name] = values[name] - rate * b
        return Outputs({"loss": loss}, metrics | {"lr": rate}, states=following)

    buffers = {f"{name}.momentum_buffer": torch.zeros_like(weight) for name, weight in weights.items()}
    yield Step(
        "restarts", Inputs(batch, weights | buffers | {"step": torch.tensor(0)}), restarts, Style(names="exporter")
    )

    def adamw(values: Arrays) -> Outputs:
        loss, grads, metrics = losses(values)
        following = {"step": values["step"] + 1}
        t = following["step"]
        for name, grad in grads.items():
            m, v = values[f"{name}.exp_avg"], values[f"{name}.exp_avg_sq"]
            m, v = m + (grad - m) * 0.1, v * 0.99 + grad * grad * 0.01
            root = torch.sqrt(v) / torch.sqrt(1 - 0.99**t) + 1e-6
            new = values[name] * (1 - values["lr"] * 0.02) - values["lr"] / (1 - 0.9**t) * m / root
            following |= {name: new, f"{name}.exp_avg": m, f"{name}.exp_avg_sq": v}
        return Outputs({"loss": loss}, metrics, states=following)

    slots = {f"{name}.{s}": torch.zeros_like(x) for name, x in weights.items() for s in ("exp_avg", "exp_avg_sq")}
    states, fed = weights | slots | {"step": torch.tensor(0.0)}, {"lr": torch.tensor(1e-3)}
    yield Step("adamw", Inputs(batch, states, fed), adamw, Style(optimize=False))


class Clauses(nn.Module):
    """Two layers of a transformer before whose parts the input is normalized; the first token stands for all."""

    def __init__(self, width: int = 12, heads: int = 3) -> None:
        super().__init__()
        self.heads = heads
        self.tokens, self.positions = nn.Embedding(31, width), nn.Embedding(8, width)
        self.norms = nn.ModuleList([nn.LayerNorm(width) for _ in range(5)])
        self.qkv = nn.ModuleList([nn.Linear(width, 3 * width) for _ in range(2)])
        self.proj = nn.ModuleList([nn.Linear(width, width) for _ in range(2)])
        self.up = nn.ModuleList([nn.Linear(width, 20) for _ in range(2)])
        self.down = nn.ModuleList([nn.Linear(20, width) for _ in range(2)])
        self.classifier = nn.Linear(width, 7)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        b, t = ids.shape
        x = self.tokens(ids) + self.positions.weight
        for i in range(2):
            q, k, v = self.qkv[i](self.norms[2 * i](x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
            scores = q @ k.transpose(2, 3) * q.shape[-1] ** -0.5
            scores = scores.masked_fill(mask[:, None, None] == 0, -1e4)
            x = x + self.proj[i]((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
            x = x + self.down[i](F.gelu(self.up[i](self.norms[2 * i + 1](x))))
        return self.classifier(self.norms[4](x[:, 0]))


@kind("lab-contract-clauses")
def contract_clauses() -> Iterator[Step]:
    """The kinds of clauses in contracts: warm-up and linear decay, groups of decay, clipped; by AdamW, by Lion."""

    def step(variant: str, style: Style, lion: bool) -> Step:
        net = Clauses()
        weights = parameters(net)
        mask = (torch.arange(8) < torch.tensor([[8], [5], [7], [6]])).long()
        batch = {"input_ids": torch.randint(31, (4, 8)), "attention_mask": mask, "labels": torch.randint(7, (4,))}
        labels = ("momentum",) if lion else ("exp_avg", "exp_avg_sq")
        slots = {f"state.{name}.{slot}": torch.zeros_like(x) for name, x in weights.items() for slot in labels}

        def run(values: Arrays) -> Outputs:
            w = leaves(values, weights)
            logits = torch.func.functional_call(net, w, (values["input_ids"], values["attention_mask"]))
            loss = F.cross_entropy(logits, values["labels"], label_smoothing=0.1)
            grads = torch.autograd.grad(loss, list(w.values()))
            norm = torch.sqrt(sum(grad.pow(2).sum() for grad in grads))
            factor = (1.0 / (norm + 1e-6)).clamp(max=1.0)
            step = values["global_step"] + 1
            t = step.float()
            rate = 1e-3 * torch.minimum(t / 30, ((600 - t) / 570).clamp(min=0.0))
            following = {"global_step": step}
            for (name, weight), grad in zip(w.items(), grads, strict=True):
                weight, grad = weight.detach(), grad * factor
                decayed = weight * (1 - rate * 0.01) if name.endswith("weight") and "norm" not in name else weight
                if lion:
                    m = values[f"state.{name}.momentum"]
                    following[name] = decayed - 0.3 * rate * torch.sign(0.9 * m + 0.1 * grad)
                    following[f"state.{name}.momentum"] = 0.99 * m + 0.01 * grad
                    continue
                m = following[f"state.{name}.exp_avg"] = values[f"state.{name}.exp_avg"].lerp(grad, 0.1)
                v = torch.addcmul(values[f"state.{name}.exp_avg_sq"] * 0.999, grad, grad, value=0.001)
                following[f"state.{name}.exp_avg_sq"] = v
                following[name] = decayed - rate / (1 - 0.9**t) * m / (v.sqrt() / (1 - 0.999**t).sqrt() + 1e-6)
            accuracy = (logits.argmax(1) == values["labels"]).float().mean()
            metrics = {"logits": logits.detach(), "accuracy": accuracy, "grad_norm": norm, "learning_rate": rate}
            return Outputs({"loss": loss.detach()}, metrics, states=following)

        states = weights | slots | {"global_step": torch.tensor(0)}
        return Step(variant, Inputs(batch, states), run, style)

    yield step("adamw", PLAIN, False)
    yield step("lion", Style(names="exporter", order="shuffled", shapes="interface"), True)


class Palms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 6, 3, padding=1), nn.Conv2d(6, 10, 3, stride=2, padding=1)
        self.slope = nn.Parameter(torch.full((10, 1, 1), 0.25))
        self.embed = nn.Linear(10, 8)
        self.people = nn.Parameter(torch.randn(11, 8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv2(F.relu(self.conv1(x)))
        x = torch.where(x > 0, x, x * self.slope)
        x = self.embed(x.mean((2, 3)))
        return F.normalize(x, dim=1) @ F.normalize(self.people, dim=1).T


@kind("lab-palm-prints")
def palm_prints() -> Iterator[Step]:
    """Whose palm it is, with an additive margin between people: momentum by milestones; Adam with weights averaged."""

    def step(variant: str, style: Style, adam: bool) -> Step:
        net = Palms()
        weights = parameters(net)
        batch = {"palm": torch.rand(6, 1, 8, 9), "person": torch.randint(11, (6,))}
        labels = ("m", "v", "ema") if adam else ("velocity",)
        slots = {
            f"{name}_{slot}": x.clone() if slot == "ema" else torch.zeros_like(x)
            for name, x in weights.items()
            for slot in labels
        }

        def objective(w: Arrays, values: Arrays) -> tuple[Tensor, Arrays]:
            cosine = torch.func.functional_call(net, w, (values["palm"],))
            target = (values["person"][:, None] == torch.arange(11)).float()
            logits = 16.0 * (cosine - 0.2 * target)
            own = (cosine * target).sum(1)
            metrics = {"own_cosine": own.mean(), "rank1": (cosine.argmax(1) == values["person"]).float().mean()}
            return -(F.log_softmax(logits, 1) * target).sum(1).mean(), metrics

        def run(values: Arrays) -> Outputs:
            present = {name: values[name] for name in weights}
            grads, (loss, metrics) = torch.func.grad_and_value(objective, has_aux=True)(present, values)
            step = values["iteration"] + 1
            following = {"iteration": step}
            for name, grad in grads.items():
                if adam:
                    t = step.float()
                    m = following[f"{name}_m"] = 0.9 * values[f"{name}_m"] + (1 - 0.9) * grad
                    v = following[f"{name}_v"] = 0.999 * values[f"{name}_v"] + (1 - 0.999) * grad**2
                    size = values["lr"] * torch.sqrt(1 - 0.999**t) / (1 - 0.9**t)
                    new = following[name] = present[name] - size * m / (v.sqrt() + 1e-6)
                    old = values[f"{name}_ema"]
                    decay = torch.clamp((1 + t) / (10 + t), max=0.999)
                    following[f"{name}_ema"] = old - (1 - decay) * (old - new)
                else:
                    rate = 0.1 * torch.where(step < 80, 1.0, torch.where(step < 120, 0.1, 0.01))
                    velocity = 0.9 * values[f"{name}_velocity"] - rate * (grad + 5e-4 * present[name])
                    following |= {f"{name}_velocity": velocity, name: present[name] + velocity}
            return Outputs({"margin_loss": loss}, metrics, states=following)

        states = weights | slots | {"iteration": torch.tensor(0)}
        return Step(variant, Inputs(batch, states, {"lr": torch.tensor(2e-3)} if adam else {}), run, style)

    yield step("milestones", PLAIN, False)
    yield step("adam", Style(names="exporter"), True)


@kind("lab-solar-output")
def solar_output() -> Iterator[Step]:
    """The output of solar panels by an LSTM, at night none: Adam with a rate that decays; RMSprop."""
    weights = {"lstm.w_x": torch.randn(6, 36) / 3, "lstm.w_h": torch.randn(9, 36) / 3, "lstm.b": torch.zeros(36)}
    weights |= {"head.weight": torch.randn(9, 4) / 3, "head.bias": torch.zeros(4)}
    batch = {"weather": torch.randn(5, 7, 6), "output": torch.rand(5, 4), "daylight": (torch.rand(5, 4) > 0.3).float()}

    def objective(w: Arrays, values: Arrays) -> tuple[Tensor, Arrays]:
        h = c = torch.zeros(5, 9)
        for x in values["weather"].unbind(1):
            i, f, g, o = (x @ w["lstm.w_x"] + h @ w["lstm.w_h"] + w["lstm.b"]).chunk(4, 1)
            c = torch.sigmoid(f + 1) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
        guess = F.softplus(h @ w["head.weight"] + w["head.bias"]) * values["daylight"]
        error = guess - values["output"] * values["daylight"]
        mse = error.square().sum() / values["daylight"].sum()
        return mse, {"mae": error.abs().sum() / values["daylight"].sum(), "bias": error.mean(), "forecast": guess}

    def step(variant: str, style: Style, adam: bool) -> Step:
        labels = ("exp_avg", "exp_avg_sq") if adam else ("square_avg",)
        slots = {f"{slot}.{name}": torch.zeros_like(x) for slot in labels for name, x in weights.items()}
        number = {"t": torch.tensor(0)} if adam else {}

        def run(values: Arrays) -> Outputs:
            present = {name: values[name] for name in weights}
            grads, (loss, metrics) = torch.func.grad_and_value(objective, has_aux=True)(present, values)
            following = {"t": values["t"] + 1} if adam else {}
            for name, grad in grads.items():
                if adam:
                    t = following["t"].float()
                    m = following[f"exp_avg.{name}"] = 0.9 * values[f"exp_avg.{name}"] + 0.1 * grad
                    v = following[f"exp_avg_sq.{name}"] = 0.999 * values[f"exp_avg_sq.{name}"] + 0.001 * grad * grad
                    rate = 1e-2 * torch.exp(-t / 300)
                    move = rate * (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-6)
                else:
                    v = following[f"square_avg.{name}"] = 0.9 * values[f"square_avg.{name}"] + 0.1 * grad * grad
                    move = values["lr"] * grad / (v + 1e-5).sqrt()
                following[name] = present[name] - move
            shown = {} if adam else {f"grad.{name}": grad for name, grad in grads.items()}
            return Outputs({"mse": loss}, metrics, shown, following)

        fed = {} if adam else {"lr": torch.tensor(1e-3)}
        return Step(variant, Inputs(batch, weights | slots | number, fed), run, style)

    yield step("adam", Style(names="scrambled", states="initializers"), True)
    yield step("rmsprop", PLAIN, False)
