"""Recipes that carry more than usual: task weights, norms seen, flat masters, gains, turns of edges."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.zoo.pytorch.recipes import (
    BARE,
    EXPORTER,
    adam_state,
    adamw,
    call,
    grads_of,
    heavy_ball,
    matrices,
    norm_of,
    optax_adam,
    parameters,
    select,
    zeros_of,
)
from models.zoo.steps import Arrays, Inputs, Outputs, Step, Style, kind


@kind("task-weights-by-rate")
def task_weights_by_rate() -> Iterator[Step]:
    """Three tasks on one trunk: weighed by how fast their losses fall (DWA), or divided by running averages of them."""
    net = nn.ModuleDict({"trunk": nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 12), nn.GELU())})
    for name, size in (("depth", 3), ("parts", 4), ("kind", 5)):
        net[name] = nn.Linear(12, size)
    params = parameters(net)
    batch = {"x": torch.randn(7, 8), "depth": torch.randn(7, 3), "parts": (torch.rand(7, 4) < 0.5).float()}
    batch["kind"] = torch.randint(5, (7,))

    def tasks(w: Arrays, values: Arrays) -> Tensor:
        x = call(net["trunk"], w, values["x"], prefix="trunk.")
        made = {name: call(net[name], w, x, prefix=f"{name}.") for name in ("depth", "parts", "kind")}
        first = F.l1_loss(made["depth"], values["depth"])
        second = F.binary_cross_entropy_with_logits(made["parts"], values["parts"])
        return torch.stack([first, second, F.cross_entropy(made["kind"], values["kind"])])

    def named(each: Tensor) -> Arrays:
        return dict(zip(("depth_loss", "parts_loss", "kind_loss"), each.unbind(), strict=True))

    def by_rate(values: Arrays) -> Outputs:
        weights = select(values, params)
        share = 3 * torch.softmax(values["loss_last"] / values["loss_before"] / 2.0, 0)

        def objective(w: Arrays) -> tuple[Tensor, Tensor]:
            each = tasks(w, values)
            return (share * each).sum(), each

        loss, each, grads = grads_of(objective, weights)
        states = adamw(weights, grads, values, values["lr"], decay=0.01, decayed=matrices)
        seen, full = values["epoch_sum"] + each.detach(), (values["epoch_steps"] + 1) >= 10
        states["loss_last"] = torch.where(full, seen / 10, values["loss_last"])
        states["loss_before"] = torch.where(full, values["loss_last"], values["loss_before"])
        states["epoch_sum"] = torch.where(full, torch.zeros_like(seen), seen)
        states["epoch_steps"] = torch.where(full, torch.zeros_like(values["epoch_steps"]), values["epoch_steps"] + 1)
        return Outputs({"loss": loss}, named(each) | {"task_weights": share}, states=states)

    def by_average(values: Arrays) -> Outputs:
        weights = select(values, params)
        usual = values["usual_loss"]

        def objective(w: Arrays) -> tuple[Tensor, Tensor]:
            each = tasks(w, values)
            return (each / usual).mean(), each

        loss, each, grads = grads_of(objective, weights)
        states = heavy_ball(weights, grads, values, 0.02, nesterov=True)
        states["usual_loss"] = 0.95 * usual + 0.05 * each.detach()
        return Outputs({"total": loss}, named(each), states=states)

    carried = {"loss_last": torch.tensor([0.8, 0.7, 1.5]), "loss_before": torch.tensor([0.9, 0.7, 1.6])}
    carried |= {"epoch_sum": torch.tensor([6.0, 5.0, 12.0]), "epoch_steps": torch.tensor(7)}
    given = Inputs(batch, params | adam_state(params) | carried, {"lr": torch.tensor(1e-3)})
    yield Step("dynamic-average", given, by_rate)
    states = params | zeros_of(params, "momentum") | {"usual_loss": torch.tensor([0.8, 0.7, 1.5])}
    yield Step("running-average", Inputs(batch, states), by_average, EXPORTER)


class Counter(nn.Module):
    """A GRU of two layers with a number as its output."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(4, 9, batch_first=True)
        self.rnn2 = nn.GRU(9, 6, batch_first=True)
        self.out = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.rnn2(self.rnn(x)[0])[0][:, -1])


@kind("quantile-clipping")
def quantile_clipping() -> Iterator[Step]:
    """AutoClip: gradients are clipped at a percentile of the norms seen, a ring of them or a running estimate."""
    net = Counter()
    params = parameters(net)
    batch = {"x": torch.randn(5, 6, 4), "y": torch.randn(5, 2)}

    def run(values: Arrays, ring: bool) -> Outputs:
        weights = select(values, params)

        def objective(w: Arrays) -> tuple[Tensor, Tensor]:
            off = call(net, w, values["x"]) - values["y"]
            return off.square().mean(), off.abs().mean()

        loss, off, grads = grads_of(objective, weights)
        norm = norm_of(grads)
        if ring:
            place = (values["norms_seen"] % 16)[None]
            history = values["norm_history"].index_copy(0, place, norm[None])
            count = (values["norms_seen"] + 1).clamp(max=16)
            filled = torch.where(torch.arange(16) < count, history, torch.full((16,), 1e4))
            limit = filled.sort().values.gather(0, ((count - 1).float() * 0.3).long()[None])[0]
            states = {"norm_history": history, "norms_seen": values["norms_seen"] + 1}
        else:
            limit = values["clip_at"]
            states = {"clip_at": limit * torch.exp(0.05 * (values["percentile"] - (norm < limit).float()))}
        factor = (limit / (norm + 1e-6)).clamp(max=1.0)
        grads = {name: grad * factor for name, grad in grads.items()}
        if ring:
            states |= optax_adam(weights, grads, values, 3e-3)
        else:
            states |= {name: w - 0.05 * grads[name] for name, w in weights.items()}
        metrics = {"mae": off, "grad_norm": norm, "clip_threshold": limit, "clipped": (factor < 1).float()}
        return Outputs({"loss": loss}, metrics, states=states)

    carried = {"norm_history": torch.rand(16) + 0.2, "norms_seen": torch.tensor(7), "count": torch.tensor(0)}
    states = params | zeros_of(params, "mu", "nu") | carried
    yield Step("ring", Inputs(batch, states), lambda values: run(values, True), EXPORTER)
    given = Inputs(batch, params | {"clip_at": torch.tensor(0.4)}, {"percentile": torch.tensor(0.3)})
    yield Step("estimate", given, lambda values: run(values, False), Style(shapes="inputs", order="shuffled"))


@kind("flat-half-masters")
def flat_half_masters() -> Iterator[Step]:
    """Float16 weights by module, one flat float32 master, a static loss scale, a moment in float16; or flat weights."""
    net = nn.Sequential(nn.Linear(9, 15), nn.GELU(), nn.Linear(15, 11), nn.GELU(), nn.Linear(11, 4))
    params = {name: value.half() for name, value in parameters(net).items()}
    sizes = [value.numel() for value in params.values()]
    flat = torch.cat([value.float().flatten() for value in params.values()])
    batch = {"x": torch.randn(8, 9), "label": torch.randint(4, (8,))}

    def parts(vector: Tensor) -> Arrays:
        pieces = zip(params.items(), vector.split(sizes), strict=True)
        return {name: piece.reshape(value.shape) for (name, value), piece in pieces}

    def objective(w: Arrays, values: Arrays, scale: float) -> tuple[Tensor, Tensor]:
        logits = call(net, w, values["x"].half()).float()
        loss = F.cross_entropy(logits, values["label"])
        return loss * scale, loss

    def with_masters(values: Arrays) -> Outputs:
        _, loss, grads = grads_of(lambda w: objective(w, values, 512.0), select(values, params))
        g = torch.cat([grad.float().flatten() for grad in grads.values()]) / 512.0
        t = (values["step"] + 1).float()
        m = 0.9 * values["exp_avg"].float() + 0.1 * g
        v = 0.99 * values["exp_avg_sq"] + 0.01 * g * g
        master = values["master"] - values["lr"] * (m / (1 - 0.9**t)) / ((v / (1 - 0.99**t)).sqrt() + 1e-4)
        states = {name: value.half() for name, value in parts(master).items()}
        states |= {"master": master, "exp_avg": m.half(), "exp_avg_sq": v, "step": values["step"] + 1}
        return Outputs({"loss": loss}, {"grad_norm": g.norm()}, states=states)

    def with_flat(values: Arrays) -> Outputs:
        def whole(w: Arrays) -> tuple[Tensor, Tensor]:
            return objective(parts(w["flat"].half()), values, 128.0)

        scaled, loss, grads = grads_of(whole, {"flat": values["flat"]})
        g = grads["flat"] / 128.0 + 1e-4 * values["flat"]
        buffer = 0.9 * values["momentum"].float() + g
        states = {"flat": values["flat"] - 0.05 * buffer, "momentum": buffer.half()}
        return Outputs({"scaled_loss": scaled}, {"loss": loss, "weight_norm": values["flat"].norm()}, states=states)

    states = params | {"master": flat, "exp_avg": torch.zeros_like(flat).half(), "exp_avg_sq": torch.zeros_like(flat)}
    given = Inputs(batch, states | {"step": torch.tensor(0, dtype=torch.int32)}, {"lr": torch.tensor(2e-3)})
    yield Step("adam", given, with_masters)
    given = Inputs(batch, {"flat": flat.clone(), "momentum": torch.zeros_like(flat).half()})
    yield Step("momentum-flat", given, with_flat, BARE)


@kind("neighbour-embedding")
def neighbour_embedding() -> Iterator[Step]:
    """t-SNE with gains and a momentum that changes at an iteration; UMAP with edges whose next turn is carried."""
    count = 20
    p = torch.rand(count, count)
    p = (p + p.T) * (1 - torch.eye(count))
    place = {"embedding": torch.randn(count, 2)}

    def tsne(values: Arrays) -> Outputs:
        early = values["iteration"] < 250
        p = values["p"] * torch.where(early, 12.0, 1.0)

        def objective(w: Arrays) -> tuple[Tensor, Tensor]:
            y = w["embedding"]
            kernel = (1 - torch.eye(count)) / (1 + (y[:, None] - y).square().sum(-1))
            q = kernel / kernel.sum()
            return (p * torch.log((p + 1e-5) / (q + 1e-5))).sum(), q.max()

        loss, top, grads = grads_of(objective, select(values, place))
        g, move = grads["embedding"], values["velocity"]
        gains = torch.where(g * move < 0, values["gains"] + 0.2, values["gains"] * 0.8).clamp(min=0.01)
        move = torch.where(early, 0.5, 0.8) * move - values["learning_rate"] * gains * g
        y = values["embedding"] + move
        states = {"embedding": y - y.mean(0), "velocity": move, "gains": gains, "iteration": values["iteration"] + 1}
        return Outputs({"kl_divergence": loss}, {"largest_q": top, "grad_norm": g.norm()}, states=states)

    def umap(values: Arrays) -> Outputs:
        due = (values["next_sample"] <= values["epoch"].float()).float()
        head, tail, other = values["head"], values["tail"], values["negative"]

        def objective(w: Arrays) -> tuple[Tensor, Arrays]:
            y = w["embedding"]
            near = (y[head] - y[tail]).square().sum(-1)
            far = (y[head][:, None] - y[other]).square().sum(-1)
            pull = torch.log1p(1.5 * near) * due
            push = -torch.log(1 - 1 / (1.001 + 1.5 * far)).sum(-1) * due
            return pull.sum() + push.sum(), {"attraction": pull.sum(), "repulsion": push.sum()}

        loss, metrics, grads = grads_of(objective, select(values, place))
        alpha = 1 - values["epoch"].float() / 200
        y = values["embedding"] - alpha * grads["embedding"].clamp(-4, 4)
        following = values["next_sample"] + due * values["per_sample"]
        states = {"embedding": y, "next_sample": following, "epoch": values["epoch"] + 1}
        return Outputs({"loss": loss}, metrics | {"edges": due.sum()}, states=states)

    states = place | {"velocity": torch.zeros(count, 2), "gains": torch.ones(count, 2), "iteration": torch.tensor(248)}
    given = Inputs({}, states, {"learning_rate": torch.tensor(10.0)}, {"p": p / p.sum()})
    yield Step("tsne", given, tsne, EXPORTER)
    turns = 1 + 4 * torch.rand(30)
    edges = {"head": torch.randint(count, (30,)), "tail": torch.randint(count, (30,)), "per_sample": turns}
    states = {"embedding": torch.randn(count, 2), "next_sample": turns * 3, "epoch": torch.tensor(9)}
    given = Inputs({"negative": torch.randint(count, (30, 3))}, states, constants=edges)
    yield Step("umap", given, umap)
