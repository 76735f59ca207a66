"""Recipes of retrieval, ranking, metric learning and click-through prediction."""

from collections.abc import Iterator
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.zoo.pytorch.recipes import (
    EXPORTER,
    SCRAMBLED,
    adagrad,
    adam_state,
    adamw,
    call,
    clip_norm,
    grads_of,
    norm_of,
    parameters,
    select,
    zeros_of,
)
from models.zoo.steps import Arrays, Inputs, Outputs, Step, Style, kind


def tower(*sizes: int) -> nn.Sequential:
    """Return dense layers with ReLU between them."""
    made: list[nn.Module] = []
    for enter, leave in pairwise(sizes):
        made += [nn.Linear(enter, leave), nn.ReLU()]
    return nn.Sequential(*made[:-1])


@kind("two-tower-retrieval")
def two_tower_retrieval() -> Iterator[Step]:
    """In-batch softmax corrected by how often an item comes, by the steps since it came last; rows by Adagrad."""
    users, items = 20, 30
    nets = {"user": tower(8 + 3, 14, 6), "item": tower(7, 10, 6)}
    params = parameters(nets["user"], "user.") | parameters(nets["item"], "item.")
    tables = {"user_table": 0.3 * torch.randn(users, 8), "item_table": 0.3 * torch.randn(items, 7)}
    batch = {"user_id": torch.randint(users, (6,)), "features": torch.randn(6, 3)}
    batch["item_id"] = torch.randperm(items)[:6]

    def run(values: Arrays, whole: bool) -> Outputs:
        who, what = values["user_id"], values["item_id"]
        now = values["global_step"] + 1
        gap = (now - values["last_seen"][what]).float()
        interval = 0.9 * values["interval"][what] + 0.1 * gap
        states: Arrays = {"global_step": now, "interval": values["interval"].index_copy(0, what, interval)}
        states["last_seen"] = values["last_seen"].index_copy(0, what, now.expand(6))
        rows = {"user_rows": values["user_table"][who], "item_rows": values["item_table"][what]}
        dense = select(values, params)

        def objective(w: Arrays) -> tuple[Tensor, Arrays]:
            left = w["user_table"][who] if whole else w["user_rows"]
            right = w["item_table"][what] if whole else w["item_rows"]
            u = F.normalize(call(nets["user"], w, torch.cat([left, values["features"]], -1), prefix="user."), dim=-1)
            v = F.normalize(call(nets["item"], w, right, prefix="item."), dim=-1)
            scores = u @ v.T / 0.1
            loss = F.cross_entropy(scores + torch.log(interval), torch.arange(6))
            return loss, {"recall_at_1": (scores.argmax(1) == torch.arange(6)).float().mean()}

        learnt = dense | (select(values, tables) if whole else rows)
        loss, metrics, grads = grads_of(objective, learnt)
        if whole:
            return Outputs({"loss": loss}, metrics, states=states | adagrad(learnt, grads, values, values["lr"]))
        states |= adamw(dense, grads, values, values["lr"])
        for table, index, grad in (("user_table", who, "user_rows"), ("item_table", what, "item_rows")):
            total = values[f"{table}_sum"].index_add(0, index, grads[grad].square().mean(-1))
            move = -0.05 * grads[grad] / (total[index].sqrt() + 1e-3)[:, None]
            states |= {table: values[table].index_add(0, index, move), f"{table}_sum": total}
        return Outputs({"loss": loss}, metrics | {"mean_interval": interval.mean()}, states=states)

    seen = {"last_seen": torch.randint(40, (items,)), "interval": 5 + torch.rand(items)}
    seen["global_step"] = torch.tensor(40)
    sums = {f"{name}_sum": torch.full((table.shape[0],), 0.1) for name, table in tables.items()}
    rate = {"lr": torch.tensor(1e-2)}
    states = params | tables | adam_state(params) | sums | seen
    yield Step("row-adagrad", Inputs(batch, states, rate), lambda values: run(values, False))
    states = params | tables | zeros_of(params | tables, "sum") | seen
    yield Step("adagrad", Inputs(batch, states, rate), lambda values: run(values, True), SCRAMBLED)


@kind("listwise-ranking")
def listwise_ranking() -> Iterator[Step]:
    """LambdaRank: pairs weighed by what their exchange changes of the gain; or ListNet, with padded documents."""
    net = tower(9, 16, 11, 1)
    params = parameters(net)
    relevance = torch.randint(4, (5, 7))
    mask = (torch.arange(7) < torch.tensor([7, 5, 6, 7, 4])[:, None]).float()
    batch = {"documents": torch.randn(5, 7, 9), "relevance": relevance, "mask": mask}

    def ndcg(scores: Tensor, gain: Tensor) -> Tensor:
        discount = 1 / torch.log2(torch.arange(7).float() + 2)
        got = gain.gather(1, scores.argsort(1, descending=True))
        best = gain.sort(1, descending=True).values
        return ((got * discount).sum(1) / ((best * discount).sum(1) + 1e-3)).mean()

    def lambda_rank(w: Arrays, values: Arrays) -> tuple[Tensor, Arrays]:
        scores = call(net, w, values["documents"])[..., 0] - 1e3 * (1 - values["mask"])
        gain = (2.0 ** values["relevance"].float() - 1) * values["mask"]
        rank = (scores[:, None, :] > scores[:, :, None]).float().sum(-1)
        discount = 1 / torch.log2(rank + 2)
        change = (gain[:, :, None] - gain[:, None, :]).abs() * (discount[:, :, None] - discount[:, None, :]).abs()
        better = (gain[:, :, None] > gain[:, None, :]).float() * values["mask"][:, None] * values["mask"][:, :, None]
        pairs = F.softplus(scores[:, None, :] - scores[:, :, None]) * change * better
        return pairs.sum() / better.sum().clamp(min=1.0), {"ndcg": ndcg(scores.detach(), gain), "pairs": better.sum()}

    def list_net(w: Arrays, values: Arrays) -> tuple[Tensor, Arrays]:
        hidden = 1e3 * (1 - values["mask"])
        scores = call(net, w, values["documents"])[..., 0] - hidden
        target = torch.softmax(values["relevance"].float() - hidden, -1)
        loss = -(target * torch.log_softmax(scores, -1)).sum(-1).mean()
        gain = (2.0 ** values["relevance"].float() - 1) * values["mask"]
        return loss, {"ndcg": ndcg(scores.detach(), gain)}

    def with_adagrad(values: Arrays) -> Outputs:
        weights = select(values, params)
        loss, metrics, grads = grads_of(lambda w: lambda_rank(w, values), weights)
        return Outputs({"loss": loss}, metrics, states=adagrad(weights, grads, values, values["learning_rate"]))

    def with_sgd(values: Arrays) -> Outputs:
        weights = select(values, params)
        loss, metrics, grads = grads_of(lambda w: list_net(w, values), weights)
        grads, norm = clip_norm(grads, 2.0)
        size = norm_of(weights)
        states = {name: w - 0.05 * (grads[name] + 1e-3 * w) for name, w in weights.items()}
        return Outputs({"loss": loss}, metrics | {"grad_norm": norm, "param_norm": size}, states=states)

    states = params | {f"sum.{name}": torch.full_like(value, 0.1) for name, value in params.items()}
    yield Step("lambda-adagrad", Inputs(batch, states, {"learning_rate": torch.tensor(0.05)}), with_adagrad, EXPORTER)
    yield Step("listnet-sgd", Inputs(batch, params), with_sgd, Style(order="shuffled", shapes="inputs"))


@kind("triplet-embedding")
def triplet_embedding() -> Iterator[Step]:
    """The hardest triplets of a batch with a margin that is fed; or against a carried memory of codes and labels."""
    net = tower(10, 18, 12, 5)
    params = parameters(net)
    batch = {"x": torch.randn(8, 10), "identity": torch.tensor([0, 0, 1, 1, 2, 2, 3, 3])}
    margin = {"margin": torch.tensor(0.3)}

    def distances(a: Tensor, b: Tensor) -> Tensor:
        return torch.sqrt((2 - 2 * a @ b.T).clamp(min=1e-5))

    def hardest(gaps: Tensor, same: Tensor, margin: Tensor) -> tuple[Tensor, Arrays]:
        far = (gaps * same).amax(1)
        near = (gaps + 1e3 * same).amin(1)
        each = F.relu(far - near + margin)
        return each.mean(), {"active": (each > 0).float().mean(), "positive": far.mean(), "negative": near.mean()}

    def in_batch(values: Arrays) -> Outputs:
        weights, label = select(values, params), values["identity"]

        def objective(w: Arrays) -> tuple[Tensor, Arrays]:
            code = F.normalize(call(net, w, values["x"]), dim=-1)
            return hardest(distances(code, code), (label[:, None] == label).float(), values["margin"])

        loss, metrics, grads = grads_of(objective, weights)
        states: Arrays = {}
        for name, w in weights.items():
            v = values[f"square_avg.{name}"].mul(0.99).addcmul(grads[name], grads[name], value=0.01)
            states |= {name: w.addcdiv(grads[name], v.sqrt() + 1e-5, value=-1e-3), f"square_avg.{name}": v}
        return Outputs({"loss": loss}, metrics, states=states)

    def with_memory(values: Arrays) -> Outputs:
        weights, label = select(values, params), values["identity"]

        def objective(w: Arrays) -> tuple[Tensor, tuple[Arrays, Tensor]]:
            code = F.normalize(call(net, w, values["x"]), dim=-1)
            inside, metrics = hardest(distances(code, code), (label[:, None] == label).float(), values["margin"])
            known = (label[:, None] == values["memory_labels"]).float()
            across, _ = hardest(distances(code, values["memory"]), known, values["margin"])
            return inside + across, (metrics | {"memory_loss": across}, code.detach())

        loss, (metrics, code), grads = grads_of(objective, weights)
        places = (values["memory_ptr"] + torch.arange(8)) % 24
        states = {"memory": values["memory"].index_copy(0, places, code)}
        states["memory_labels"] = values["memory_labels"].index_copy(0, places, label)
        states["memory_ptr"] = (values["memory_ptr"] + 8) % 24
        return Outputs({"loss": loss}, metrics, states=states | adamw(weights, grads, values, 1e-3, decay=0.01))

    yield Step("batch-hard", Inputs(batch, params | zeros_of(params, "square_avg"), margin), in_batch)
    memory = {"memory": F.normalize(torch.randn(24, 5), dim=-1), "memory_labels": torch.randint(6, (24,))}
    memory["memory_ptr"] = torch.tensor(8)
    given = Inputs(batch, params | adam_state(params) | memory, margin)
    yield Step("cross-batch-memory", given, with_memory, EXPORTER)


@kind("wide-and-deep")
def wide_and_deep() -> Iterator[Step]:
    """FTRL for the wide part, Adam or Adagrad for the deep, each with its own counter; sums for the calibration."""
    net = tower(4 * 5 + 3, 14, 7, 1)
    deep = parameters(net, "deep.") | {"fields": 0.1 * torch.randn(33, 5)}
    wide = {"wide": torch.zeros(33), "wide_bias": torch.zeros(1)}
    batch = {"ids": torch.randint(33, (9, 4)), "numbers": torch.randn(9, 3), "click": (torch.rand(9) < 0.4).float()}

    def run(values: Arrays, adaptive: bool) -> Outputs:
        def objective(w: Arrays) -> tuple[Tensor, Tensor]:
            crossed = torch.cat([w["fields"][values["ids"]].flatten(1), values["numbers"]], -1)
            made = call(net, w, crossed, prefix="deep.")[:, 0]
            logit = made + w["wide"][values["ids"]].sum(1) + w["wide_bias"]
            return F.binary_cross_entropy_with_logits(logit, values["click"]), torch.sigmoid(logit)

        loss, p, grads = grads_of(objective, select(values, wide | deep))
        states: Arrays = {"wide_steps": values["wide_steps"] + 1}
        for name in wide:
            g, n = grads[name], values[f"{name}_n"]
            total = n + g * g
            z = values[f"{name}_z"] + g - (total.sqrt() - n.sqrt()) / 0.1 * values[name]
            shrunk = torch.sign(z) * 0.001 - z
            w = torch.where(z.abs() > 0.001, shrunk / ((1.0 + total.sqrt()) / 0.1 + 0.01), torch.zeros_like(z))
            states |= {name: w, f"{name}_n": total, f"{name}_z": z}
        own = select(values, deep)
        if adaptive:
            states |= adagrad(own, grads, values, 0.02)
        else:
            states |= adamw(own, grads, values, 1e-3, step="deep_steps")
        states["sum_click"] = 0.99 * values["sum_click"] + values["click"].sum()
        states["sum_p"] = 0.99 * values["sum_p"] + p.sum()
        wins = (p[:, None] > p[None]).float() * values["click"][:, None] * (1 - values["click"])
        pairs = values["click"].sum() * (1 - values["click"]).sum()
        metrics = {"auc": wins.sum() / pairs.clamp(min=1.0), "calibration": states["sum_p"] / states["sum_click"]}
        return Outputs({"loss": loss}, metrics, states=states)

    carried = {f"{name}_{slot}": torch.zeros_like(value) for slot in "nz" for name, value in wide.items()}
    carried |= {"sum_click": torch.tensor(10.0), "sum_p": torch.tensor(12.0), "wide_steps": torch.tensor(7)}
    states = wide | deep | carried | adam_state(deep, "deep_steps")
    yield Step("ftrl-adam", Inputs(batch, states), lambda values: run(values, False))
    states = wide | deep | carried | zeros_of(deep, "sum")
    yield Step(
        "ftrl-adagrad", Inputs(batch, states), lambda values: run(values, True), Style(opset=18, names="exporter")
    )
