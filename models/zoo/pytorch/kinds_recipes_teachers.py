"""Recipes with teachers, prototypes, codebooks and peers."""

import math
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
    copies_of,
    grads_of,
    heavy_ball,
    moving,
    optax_adam,
    parameters,
    select,
    zeros_of,
)
from models.zoo.steps import Arrays, Inputs, Outputs, Step, Style, kind


@kind("mean-teacher-ramp")
def mean_teacher_ramp() -> Iterator[Step]:
    """Labels are missing for some examples; a teacher of averaged weights, a weight that ramps up by the step."""
    net = nn.Sequential(nn.Linear(9, 16), nn.SiLU(), nn.LayerNorm(16), nn.Linear(16, 12), nn.SiLU(), nn.Linear(12, 5))
    params = parameters(net)
    batch = {"x": torch.randn(8, 9), "noise_a": 0.1 * torch.randn(8, 9), "noise_b": 0.1 * torch.randn(8, 9)}
    batch["label"] = torch.tensor([2, 0, -1, 4, -1, -1, 1, -1])

    def consistent(values: Arrays) -> Outputs:
        weights, t = select(values, params), values["global_step"].float()
        wanted = torch.softmax(call(net, select(values, params, "teacher."), values["x"] + values["noise_b"]), -1)
        ramp = 4.0 * torch.exp(-5 * (1 - (t / 200).clamp(max=1.0)) ** 2)

        def objective(w: Arrays) -> tuple[Tensor, Arrays]:
            logits = call(net, w, values["x"] + values["noise_a"])
            known = F.cross_entropy(logits, values["label"], ignore_index=-1)
            gap = (torch.softmax(logits, -1) - wanted).square().sum(-1).mean()
            return known + ramp * gap, {"class_loss": known, "consistency": gap}

        loss, metrics, grads = grads_of(objective, weights)
        states = heavy_ball(weights, grads, values, values["lr"], decay=1e-4, nesterov=True)
        decay = torch.minimum(1 - 1 / (t + 2), torch.tensor(0.99))
        states |= moving(values, select(states, params), "teacher", decay)
        states["global_step"] = values["global_step"] + 1
        return Outputs({"loss": loss}, metrics | {"consistency_weight": ramp}, states=states)

    def aligned(values: Arrays) -> Outputs:
        weights = select(values, params)
        made = torch.softmax(call(net, select(values, params, "teacher."), values["x"] + values["noise_b"]), -1)
        usual = 0.99 * values["p_model"] + 0.01 * made.mean(0)
        made = made * (values["p_target"] / (usual + 1e-3))
        made = made / made.sum(-1, keepdim=True)
        level = 0.9 * values["threshold"] + 0.1 * made.amax(-1).mean()
        sure = (made.amax(-1) > level).float()

        def objective(w: Arrays) -> tuple[Tensor, Arrays]:
            logits = call(net, w, values["x"] + values["noise_a"])
            known = F.cross_entropy(logits, values["label"], ignore_index=-1)
            guessed = (F.cross_entropy(logits, made.argmax(-1), reduction="none") * sure).mean()
            return known + guessed, {"supervised": known, "pseudo": guessed, "mask_rate": sure.mean()}

        loss, metrics, grads = grads_of(objective, weights)
        states = adamw(weights, grads, values, 2e-3, decay=0.02)
        states |= moving(values, select(states, params), "teacher", 0.99) | {"p_model": usual, "threshold": level}
        return Outputs({"loss": loss}, metrics, states=states)

    teacher = copies_of(params, "teacher")
    states = params | teacher | zeros_of(params, "momentum") | {"global_step": torch.tensor(80)}
    yield Step("consistency", Inputs(batch, states, {"lr": torch.tensor(0.03)}), consistent, EXPORTER)
    states = params | teacher | adam_state(params) | {"p_model": torch.full((5,), 0.2), "threshold": torch.tensor(0.3)}
    target = {"p_target": torch.tensor([0.3, 0.2, 0.2, 0.2, 0.1])}
    yield Step("alignment", Inputs(batch, states, constants=target), aligned, Style(names="scrambled"))


def balanced(scores: Tensor) -> Tensor:
    """Return assignments with equal shares of the prototypes, by Sinkhorn's iterations."""
    q = torch.exp((scores - scores.max()) / 0.1)
    for _ in range(3):
        q = q / q.sum(0, keepdim=True) / q.shape[1]
        q = q / q.sum(1, keepdim=True) / q.shape[0]
    return q * q.shape[0]


@kind("swav-prototypes")
def swav_prototypes() -> Iterator[Step]:
    """Swapped assignments to prototypes of unit norm, frozen at first; a queue of features, LARS without it Adam."""
    net = nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 14), nn.ReLU(), nn.Linear(14, 6))
    params = parameters(net, "encoder.") | {"prototypes": F.normalize(torch.randn(9, 6), dim=1)}
    batch = {"view_a": torch.randn(7, 10), "view_b": torch.randn(7, 10)}

    def run(values: Arrays, queued: bool) -> Outputs:
        weights = select(values, params)

        def objective(w: Arrays) -> tuple[Tensor, Tensor]:
            codes = [F.normalize(call(net, w, values[v], prefix="encoder."), dim=1) for v in ("view_a", "view_b")]
            scores = [code @ w["prototypes"].T for code in codes]
            old = [values["queue"] @ w["prototypes"].T] if queued else []
            targets = [balanced(torch.cat([score, *old]).detach())[:7] for score in scores]
            each = [
                -(q * torch.log_softmax(s / 0.2, 1)).sum(1).mean() for q, s in zip(targets[::-1], scores, strict=True)
            ]
            return (each[0] + each[1]) / 2, codes[0].detach()

        loss, code, grads = grads_of(objective, weights)
        frozen = values["iteration"] < (2 if queued else 50)
        grads["prototypes"] = torch.where(frozen, torch.zeros_like(grads["prototypes"]), grads["prototypes"])
        states: Arrays = {"iteration": values["iteration"] + 1}
        if queued:
            states["queue"] = torch.cat([code, values["queue"][:-7]])
            for name, w in weights.items():
                g = grads[name] + 1e-4 * w
                trust = w.norm() / (g.norm() + 1e-3) * 0.02 if w.dim() > 1 else torch.tensor(1.0)
                buffer = 0.9 * values[f"momentum.{name}"] + trust * g
                states |= {name: w - values["lr"] * buffer, f"momentum.{name}": buffer}
        else:
            states |= optax_adam(weights, grads, values, values["lr"])
        states["prototypes"] = F.normalize(states["prototypes"], dim=1)
        return Outputs({"loss": loss}, {"feature_std": code.std(0).mean()}, states=states)

    count = {"iteration": torch.tensor(1)}
    states = params | zeros_of(params, "momentum") | {"queue": F.normalize(torch.randn(14, 6), dim=1)} | count
    yield Step("lars-queue", Inputs(batch, states, {"lr": torch.tensor(0.3)}), lambda values: run(values, True))
    states = params | zeros_of(params, "mu", "nu") | count | {"count": torch.tensor(1)}
    given = Inputs(batch, states, {"lr": torch.tensor(1e-3)})
    yield Step("adam", given, lambda values: run(values, False), Style(opset=18, order="shuffled"))


@kind("codebook-revival")
def codebook_revival() -> Iterator[Step]:
    """VQ-VAE: codes are moving averages, unused ones start again at vectors of the batch; one or two books."""
    width, size = 4, 10
    net = nn.ModuleDict({"encoder": nn.Sequential(nn.Linear(11, 15), nn.SiLU(), nn.Linear(15, width))})
    net["decoder"] = nn.Sequential(nn.Linear(width, 13), nn.SiLU(), nn.Linear(13, 11))
    params = parameters(net)
    batch = {"x": torch.randn(12, 11), "restart": torch.randint(12, (size,))}

    def part(w: Arrays, name: str, x: Tensor) -> Tensor:
        return call(net[name], w, x, prefix=f"{name}.")

    def quantise(z: Tensor, values: Arrays, index: int) -> tuple[Tensor, Arrays, Tensor]:
        book = values[f"embed{index}"]
        chosen = ((z[:, None] - book) ** 2).sum(-1).argmin(-1)
        hits = (chosen[:, None] == torch.arange(size)).float()
        used = hits.sum(0)
        sizes = values[f"cluster_size{index}"] * 0.9 + used * 0.1
        sums = values[f"embed_avg{index}"] * 0.9 + hits.T @ z * 0.1
        idle = torch.where(used > 0, torch.zeros_like(values[f"idle{index}"]), values[f"idle{index}"] + 1)
        dead = idle >= 4
        smoothed = (sizes + 1e-3) / (sizes.sum() + size * 1e-3) * sizes.sum()
        fresh = z[values["restart"]]
        states = {f"embed{index}": torch.where(dead[:, None], fresh, sums / smoothed[:, None])}
        states[f"embed_avg{index}"] = torch.where(dead[:, None], fresh, sums)
        states[f"cluster_size{index}"] = torch.where(dead, torch.ones_like(sizes), sizes)
        states[f"idle{index}"] = torch.where(dead, torch.zeros_like(idle), idle)
        p = used / used.sum()
        return book[chosen], states, torch.exp(-(p * torch.log(p + 1e-5)).sum())

    def run(values: Arrays, books: int) -> Outputs:
        weights = select(values, params)

        def objective(w: Arrays) -> tuple[Tensor, tuple[Arrays, Arrays]]:
            z = part(w, "encoder", values["x"])
            rest, states, found, metrics = z.detach(), {}, torch.zeros_like(z), {}
            for index in range(books):
                code, own, perplexity = quantise(rest, values, index)
                states |= own
                metrics[f"perplexity{index}"] = perplexity
                rest, found = rest - code, found + code
            made = part(w, "decoder", z + (found - z).detach())
            fit, commitment = F.mse_loss(made, values["x"]), F.mse_loss(z, found)
            return fit + 0.25 * commitment, (metrics | {"recon_loss": fit, "commitment": commitment}, states)

        loss, (metrics, states), grads = grads_of(objective, weights)
        states |= adamw(weights, grads, values, values.get("lr", 3e-3))
        return Outputs({"loss": loss}, metrics, states=states)

    def books(count: int) -> Arrays:
        made: Arrays = {}
        for index in range(count):
            embed = torch.randn(size, width)
            made |= {
                f"embed{index}": embed,
                f"embed_avg{index}": embed.clone(),
                f"cluster_size{index}": torch.ones(size),
            }
            made[f"idle{index}"] = torch.randint(4, (size,))
        return made

    one = Inputs(batch, params | adam_state(params) | books(1), {"lr": torch.tensor(1e-3)})
    yield Step("one-book", one, lambda values: run(values, 1))
    yield Step("residual", Inputs(batch, params | adam_state(params) | books(2)), lambda values: run(values, 2), BARE)


@kind("co-teaching")
def co_teaching() -> Iterator[Step]:
    """Two networks choose the examples of small loss for each other, fewer and fewer; or by remembered losses."""
    nets = {"a": nn.Sequential(nn.Linear(8, 14), nn.ReLU(), nn.Linear(14, 5))}
    nets["b"] = nn.Sequential(nn.Linear(8, 11), nn.Tanh(), nn.Linear(11, 9), nn.Tanh(), nn.Linear(9, 5))
    params = {name: parameters(net, f"{name}.") for name, net in nets.items()}
    batch = {"x": torch.randn(10, 8), "label": torch.randint(5, (10,))}

    def each(name: str, w: Arrays, values: Arrays) -> Tensor:
        logits = call(nets[name], w, values["x"], prefix=f"{name}.")
        return F.cross_entropy(logits, values["label"], reduction="none")

    def run(values: Arrays, remembered: bool) -> Outputs:
        share = 0.3 * (values["epoch_step"].float() / 50).clamp(max=1.0)
        kept = torch.ceil((1 - share) * 10)
        losses, metrics, states = {}, {"forget_rate": share}, {"epoch_step": values["epoch_step"] + 1}
        chosen = {}
        for name, own in params.items():
            seen = each(name, select(values, own), values)
            if remembered:
                rows = values["index"]
                seen = 0.7 * values[f"history_{name}"][rows] + 0.3 * seen
                states[f"history_{name}"] = values[f"history_{name}"].index_copy(0, rows, seen)
            rank = (seen[None] < seen[:, None]).float().sum(1)
            chosen[name] = (rank < kept).float()
        for name, peer in (("a", "b"), ("b", "a")):
            weights = select(values, params[name])

            def objective(w: Arrays, name: str = name, peer: str = peer) -> tuple[Tensor, Tensor]:
                lost = each(name, w, values)
                return (lost * chosen[peer]).sum() / chosen[peer].sum(), lost.mean()

            losses[f"loss_{name}"], metrics[f"all_{name}"], grads = grads_of(objective, weights)
            if remembered:
                states |= heavy_ball(weights, grads, values, 0.02, beta=0.5 + 0.4 * math.exp(-1))
            else:
                states |= adamw(weights, grads, values, 1e-3, step=f"step_{name}")
        metrics["agreement"] = (chosen["a"] * chosen["b"]).sum() / kept
        return Outputs(losses, metrics, states=states)

    both, count = params["a"] | params["b"], {"epoch_step": torch.tensor(30)}
    states = both | adam_state(both, "step_a") | count | {"step_b": torch.tensor(0)}
    yield Step("adam", Inputs(batch, states), lambda values: run(values, False), SCRAMBLED)
    history = {f"history_{name}": 1 + torch.rand(40) for name in "ab"}
    states = both | zeros_of(both, "momentum") | count | history
    yield Step(
        "loss-memory",
        Inputs(batch | {"index": torch.randperm(40)[:10]}, states),
        lambda values: run(values, True),
        EXPORTER,
    )
