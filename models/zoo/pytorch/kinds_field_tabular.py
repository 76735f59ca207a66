"""Kinds from the field, tables and logs: fraud, clicks, recommendations."""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.zoo.pytorch.field_parts import (
    ADAM,
    Optimizer,
    adagrad,
    adam,
    clip_norm,
    matrices,
    momentum,
    norm_of,
    one_step,
    zeros,
)
from models.zoo.steps import Arrays, Inputs, Outputs, Step, Style, kind


class FraudNet(nn.Module):
    """Numbers of a transaction, and its merchant and country as embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.merchant_emb = nn.Embedding(23, 6)
        self.country_emb = nn.Embedding(9, 3)
        self.norm = nn.LayerNorm(11)
        self.body = nn.Sequential(nn.Linear(20, 32), nn.GELU(), nn.Linear(32, 16), nn.GELU())
        self.head = nn.Linear(16, 1)

    def forward(self, amounts: Tensor, merchant: Tensor, country: Tensor) -> Tensor:
        x = torch.cat([self.norm(amounts), self.merchant_emb(merchant), self.country_emb(country)], 1)
        return self.head(self.body(x)).squeeze(1)


@kind("field-fraud-detection")
def fraud_detection() -> Iterator[Step]:
    """Fraud among card payments: rare positives weighted by a fed factor, F1 counts, AdamW with groups, AMSGrad."""

    def objective(shown: bool) -> Callable:
        def compute(net: Callable, values: Arrays) -> tuple[Tensor, Arrays, Arrays]:
            logit = net(values["amounts"], values["merchant"], values["country"])
            loss = F.binary_cross_entropy_with_logits(logit, values["is_fraud"], pos_weight=values["pos_weight"])
            flagged, fraud = logit > 0, values["is_fraud"] > 0.5
            counts = {
                "true_positives": (flagged & fraud).sum(),
                "false_positives": (flagged & ~fraud).sum(),
                "false_negatives": (~flagged & fraud).sum(),
            }
            return loss, {"probability": torch.sigmoid(logit)} if shown else counts, {}

        return compute

    batch = {"amounts": torch.randn(16, 11), "merchant": torch.randint(23, (16,)), "country": torch.randint(9, (16,))}
    batch["is_fraud"] = (torch.rand(16) > 0.7).float()
    fed = {"pos_weight": torch.tensor(4.0)}
    adamw = Optimizer(adam, ADAM, lambda values, t: 2e-3, matrices(0.02), "step")
    yield one_step("adamw", FraudNet(), batch, objective(False), adamw, fed=fed, clip=clip_norm(1.0))
    amsgrad = Optimizer(adam, ADAM | {"max_exp_avg_sq": zeros}, lambda values, t: values["lr"], counter="step")
    fed = fed | {"lr": torch.tensor(1e-3)}
    yield one_step("amsgrad", FraudNet(), batch, objective(True), amsgrad, Style(names="exporter"), fed=fed)


class CrossNet(nn.Module):
    """Deep and cross network on one table of all fields."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(60, 4)
        self.cross = nn.ModuleList([nn.Linear(20, 20), nn.Linear(20, 20)])
        self.deep = nn.Sequential(nn.Linear(20, 24), nn.ReLU(), nn.Linear(24, 12), nn.ReLU())
        self.out = nn.Linear(32, 1)

    def forward(self, fields: Tensor) -> Tensor:
        first = x = self.emb(fields).flatten(1)
        for layer in self.cross:
            x = first * layer(x) + x
        return self.out(torch.cat([x, self.deep(first)], 1))[:, 0]


@kind("field-click-through")
def click_through() -> Iterator[Step]:
    """Clicks on ads: offsets into a joint table, Adagrad for it and Adam for the rest; momentum at a decaying rate."""

    def objective(net: Callable, values: Arrays) -> tuple[Tensor, Arrays, Arrays]:
        logit = net(values["fields"] + values["offsets"])
        each = F.binary_cross_entropy_with_logits(logit, values["clicked"], reduction="none")
        shown = {"logloss_per_example": each, "predicted_ctr": torch.sigmoid(logit).mean()}
        return each.mean(), shown, {}

    batch = {"fields": torch.randint(12, (10, 5)), "clicked": (torch.rand(10) > 0.6).float()}
    constants = {"offsets": torch.arange(5) * 12}
    exponential = Optimizer(
        momentum,
        {"momentum_buffer": zeros},
        lambda values, t: 0.05 * 0.98 ** torch.floor(t / 10),
        matrices(1e-4),
        "global_step",
        "opt/{weight}/{slot}",
    )
    shuffled = Style(order="shuffled")
    yield one_step(
        "decaying", CrossNet(), batch, objective, exponential, shuffled, constants=constants, show_rate="learning_rate"
    )

    def both(p, g, s, t, lr, wd):
        return adagrad(p, g, s, t, 0.05, wd) if "sum" in s else adam(p, g, s, t, lr, wd)

    def of_table(weight: Tensor) -> Tensor | None:
        return torch.full_like(weight, 0.1) if weight.shape[0] == 60 else None

    def of_rest(weight: Tensor) -> Tensor | None:
        return None if weight.shape[0] == 60 else torch.zeros_like(weight)

    slots = {"sum": of_table, "exp_avg": of_rest, "exp_avg_sq": of_rest}
    split = Optimizer(both, slots, lambda values, t: values["lr"], counter="t")
    fed = {"lr": torch.tensor(3e-3)}
    yield one_step(
        "two-optimizers", CrossNet(), batch, objective, split, Style(names="exporter"), fed=fed, constants=constants
    )


@kind("field-item-recommender")
def item_recommender() -> Iterator[Step]:
    """Two towers with sampled negatives: scores corrected by carried popularity, Adagrad with a number for each row."""
    for variant, style, pairwise in (
        ("sampled-softmax", Style(), False),
        ("ranking", Style(names="scrambled", states="initializers", order="shuffled"), True),
    ):
        weights = {"user_table": 0.3 * torch.randn(14, 8), "item_table": 0.3 * torch.randn(31, 8)}
        weights |= {"user_proj": torch.randn(8, 8) / 3, "item_bias": torch.zeros(31)}
        totals = {"user_table_rows": torch.full((14, 1), 0.1), "item_table_rows": torch.full((31, 1), 0.1)}
        totals |= {"user_proj_rows": torch.full((8, 1), 0.1)}
        items = torch.randperm(31)
        batch = {"user": torch.randint(14, (6,)), "item": items[:6].clone(), "negatives": items[6:11].clone()}

        def loss_of(weights: Arrays, values: Arrays, pairwise: bool = pairwise) -> tuple[Tensor, Arrays]:
            user = torch.tanh(weights["user_table"][values["user"]] @ weights["user_proj"])

            def score(rows: Tensor) -> tuple[Tensor, Tensor]:
                popular = torch.log(values["popularity"][rows] + 1e-3)
                return weights["item_table"][rows], weights["item_bias"][rows] - popular

            (liked, bias), (others, biases) = score(values["item"]), score(values["negatives"])
            good, bad = (user * liked).sum(1, keepdim=True) + bias[:, None], user @ others.T + biases
            hit = (good > bad.amax(1, keepdim=True)).float().mean()
            decay = 1e-3 * (user.square().sum() + liked.square().sum() + others.square().sum())
            if pairwise:
                return -F.logsigmoid(good - bad).mean() + decay, {"hit_rate": hit, "embedding_penalty": decay}
            chosen = torch.log_softmax(torch.cat([good, bad], 1), 1)[:, 0]
            return decay - chosen.mean(), {"hit_rate": hit, "mean_reciprocal": (1 / (1 + (bad > good).sum(1))).mean()}

        def run(values: Arrays, loss_of: Callable = loss_of, names: tuple = tuple(weights)) -> Outputs:
            present = {name: values[name] for name in names}
            grads, (loss, metrics) = torch.func.grad_and_value(loss_of, has_aux=True)(present, values)
            states = {}
            for name, grad in grads.items():
                if f"{name}_rows" not in values:
                    states[name] = present[name] - 0.05 * grad
                    continue
                rows = states[f"{name}_rows"] = values[f"{name}_rows"] + grad.square().mean(1, keepdim=True)
                states[name] = present[name] - 0.1 * grad * torch.rsqrt(rows)
            seen = (values["item"][:, None] == torch.arange(31)).float().mean(0)
            states["popularity"] = 0.95 * values["popularity"] + 0.05 * seen
            metrics["parameter_norm"] = norm_of(present.values())
            return Outputs({"train_loss": loss}, metrics, states=states)

        states = weights | totals | {"popularity": torch.full((31,), 1 / 31)}
        warm = 0 if style.states == "initializers" else 3
        yield Step(variant, Inputs(batch, states), run, style, warm=warm)
