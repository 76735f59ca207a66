"""Kinds from the field, time series and sounds: demand, machines, hearts, speakers."""

import math
from collections.abc import Callable, Iterator
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.zoo.pytorch.field_parts import (
    ADAM,
    MOMENTUM,
    Optimizer,
    adadelta,
    adam,
    batch_norm,
    clip_norm,
    lion,
    matrices,
    momentum,
    nadam,
    nesterov,
    norm_of,
    one_step,
    rmsprop,
    zeros,
)
from models.zoo.steps import Arrays, Step, Style, kind

EXPORTER = Style(names="exporter")


class Forecaster(nn.Module):
    """A GRU over the past, the store's own features, and quantiles of the days ahead."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(5, 14, batch_first=True)
        self.static = nn.Linear(4, 6)
        self.mix = nn.Linear(20, 18)
        self.out = nn.Linear(18, 3 * 3)

    def forward(self, past: Tensor, store: Tensor) -> Tensor:
        last = self.rnn(past)[0][:, -1]
        x = torch.cat([last, F.elu(self.static(store))], 1)
        return self.out(F.elu(self.mix(x))).view(-1, 3, 3)


@kind("field-demand-forecast")
def demand_forecast() -> Iterator[Step]:
    """Sales of the days ahead by quantiles: cosine rate after a warm-up, clipped values; RMSprop, averaged weights."""

    def objective(net: Callable, values: Arrays) -> tuple[Tensor, Arrays, Arrays]:
        predicted, wanted = net(values["past_sales"], values["store"]), values["future_sales"][..., None]
        levels = torch.tensor([0.1, 0.5, 0.9])
        error = wanted - predicted
        pinball = torch.maximum(levels * error, (levels - 1) * error)
        smape = 2 * error[..., 1].abs() / (predicted[..., 1].abs() + wanted[..., 0].abs() + 1e-3)
        return pinball.mean(), {"loss_per_quantile": pinball.mean((0, 1)), "smape": smape.mean()}, {}

    def cosine(values: Arrays, t: Tensor) -> Tensor:
        decayed = 0.5 * (1 + torch.cos(math.pi * ((t - 10) / 990).clamp(0.0, 1.0)))
        return 4e-3 * torch.where(t < 10, t / 10, decayed)

    def clip(grads: Arrays) -> tuple[Arrays, Arrays]:
        return {name: torch.clamp(grad, -0.05, 0.05) for name, grad in grads.items()}, {}

    batch = {"past_sales": torch.randn(6, 8, 5), "store": torch.randn(6, 4), "future_sales": torch.randn(6, 3)}
    warm = Optimizer(adam, ADAM, cosine, counter="global_step", label="adam_{slot}_{weight}")
    yield one_step("cosine", Forecaster(), batch, objective, warm, clip=clip, show_rate="lr")
    fed = {"learning_rate": torch.tensor(1e-3)}
    root = Optimizer(rmsprop, {"square_avg": zeros} | MOMENTUM, lambda values, t: values["learning_rate"])
    yield one_step("averaged", Forecaster(), batch, objective, root, EXPORTER, fed=fed, ema=0.99)


class Convolutions(nn.Module):
    """Strided convolutions over time with batch normalization whose statistics are given, and linear heads."""

    def __init__(
        self, channels: tuple[int, ...], heads: dict[str, int], residual: bool = False, learnt: bool = False
    ) -> None:
        super().__init__()
        pairs = list(pairwise(channels))
        self.convs = nn.ModuleList([nn.Conv1d(a, b, 5, stride=2, padding=2, bias=False) for a, b in pairs])
        self.scales = nn.ParameterList([torch.ones(b) for b in channels[1:]])
        self.shifts = nn.ParameterList([torch.zeros(b) for b in channels[1:]])
        self.extra = nn.ModuleList([nn.Conv1d(b, b, 3, padding=1) for b in channels[1:]] if residual else [])
        self.heads = nn.ModuleDict({name: nn.Linear(channels[-1], size) for name, size in heads.items()})
        if learnt:
            self.log_vars = nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor, statistics: list[Tensor]) -> tuple[dict[str, Tensor], list[Tensor], Tensor | None]:
        following = []
        for index, conv in enumerate(self.convs):
            mean, variance = statistics[2 * index], statistics[2 * index + 1]
            x, mean, variance = batch_norm(conv(x), self.scales[index], self.shifts[index], mean, variance)
            following += [mean, variance]
            x = F.relu(x)
            if len(self.extra):
                x = x + F.elu(self.extra[index](x))
        pooled = x.mean(2)
        return {name: head(pooled) for name, head in self.heads.items()}, following, getattr(self, "log_vars", None)


def statistics(*channels: int) -> Arrays:
    """Return the running statistics of layers with these channels."""
    states = {}
    for index, count in enumerate(channels):
        states |= {f"bn{index}.running_mean": torch.zeros(count), f"bn{index}.running_var": torch.ones(count)}
    return states


@kind("field-predictive-maintenance")
def predictive_maintenance() -> Iterator[Step]:
    """Remaining life and failure of a machine from sensor windows: fed task weights, or learnt variances; NAdam."""
    carried = statistics(12, 20)

    def objective(learnt: bool) -> Callable:
        def compute(net: Callable, values: Arrays) -> tuple[Tensor, Arrays, Arrays]:
            heads, following, log_vars = net(values["window"], [values[name] for name in carried])
            life = F.huber_loss(heads["life"][:, 0], values["remaining_life"], delta=0.7)
            failure = F.binary_cross_entropy_with_logits(heads["failure"][:, 0], values["fails_soon"])
            both = torch.stack([life, failure])
            if learnt:
                loss = (both * torch.exp(-log_vars) + log_vars).sum()
            else:
                loss = (values["task_weights"] * both).sum()
            metrics = {"life_loss": life, "failure_loss": failure}
            return loss, metrics, dict(zip(carried, following, strict=True))

        return compute

    def network(learnt: bool) -> Convolutions:
        return Convolutions((7, 12, 20), {"life": 1, "failure": 1}, learnt=learnt)

    batch = {"window": torch.randn(6, 7, 24), "remaining_life": torch.rand(6), "fails_soon": torch.ones(6)}
    batch["fails_soon"][::2] = 0
    slots = ADAM | {"mu_product": lambda _: torch.ones(())}
    first = Optimizer(nadam, slots, lambda values, t: 2e-3, counter="iteration", label="{weight}_{slot}")
    fed = {"task_weights": torch.tensor([1.0, 0.3])}
    yield one_step("nadam", network(False), batch, objective(False), first, states=carried, fed=fed)
    second = Optimizer(momentum, MOMENTUM, lambda values, t: 0.01 / (1 + 0.001 * t), matrices(1e-3), "batches_seen")
    yield one_step(
        "learnt-variances",
        network(True),
        batch,
        objective(True),
        second,
        EXPORTER,
        states=carried,
        clip=clip_norm(2.0),
    )


@kind("field-ecg-classifier")
def ecg_classifier() -> Iterator[Step]:
    """Twelve leads, several diagnoses each: a focal loss, Nesterov with averaged weights; Adadelta, F1 counts."""
    carried = statistics(16, 24)

    def objective(net: Callable, values: Arrays) -> tuple[Tensor, Arrays, Arrays]:
        heads, following, _ = net(values["leads"], [values[name] for name in carried])
        logit, truth = heads["diagnosis"], values["diagnoses"]
        p = torch.sigmoid(logit)
        right = p * truth + (1 - p) * (1 - truth)
        each = -((1 - right) ** 2) * torch.log(right + 1e-5)
        said = (p > 0.5).float()
        counts = torch.stack([(said * truth).sum(0), (said * (1 - truth)).sum(0), ((1 - said) * truth).sum(0)], 1)
        loss = (each * values["label_weights"]).sum(1).mean()
        return loss, {"f1_counts": counts}, dict(zip(carried, following, strict=True))

    def network() -> Convolutions:
        return Convolutions((12, 16, 24), {"diagnosis": 5}, residual=True)

    batch = {"leads": torch.randn(4, 12, 32), "diagnoses": (torch.rand(4, 5) > 0.6).float()}
    given = {"constants": {"label_weights": torch.rand(5) + 0.5}, "states": carried}
    fed = {"lr": torch.tensor(0.02)}
    first = Optimizer(nesterov, MOMENTUM, lambda values, t: values["lr"], matrices(5e-4), label="{slot}.{weight}")
    yield one_step("nesterov", network(), batch, objective, first, fed=fed, ema=0.999, **given)
    second = Optimizer(adadelta, {"square_avg": zeros, "acc_delta": zeros}, lambda values, t: 0.5)
    plain = Style(optimize=False, order="reversed")
    yield one_step("adadelta", network(), batch, objective, second, plain, loss_name="focal", **given)


class SpeakerNet(nn.Module):
    """Dilated convolutions, statistics of all frames, an embedding, and a direction for each speaker."""

    def __init__(self) -> None:
        super().__init__()
        self.frames = nn.ModuleList([nn.Conv1d(20, 24, 3), nn.Conv1d(24, 24, 3, dilation=2), nn.Conv1d(24, 30, 1)])
        self.embed = nn.Linear(60, 16)
        self.norm = nn.LayerNorm(16)
        self.speakers = nn.Parameter(torch.randn(11, 16))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        for layer in self.frames:
            x = F.leaky_relu(layer(x), 0.1)
        spread = torch.sqrt((x - x.mean(2, keepdim=True)).square().mean(2) + 1e-4)
        embedding = self.norm(self.embed(torch.cat([x.mean(2), spread], 1)))
        return F.normalize(embedding, dim=1) @ F.normalize(self.speakers, dim=1).T, embedding


@kind("field-speaker-embedding")
def speaker_embedding() -> Iterator[Step]:
    """Speakers, by an additive angular margin that is fed, or grows with the steps; momentum, Lion."""

    def objective(grows: bool) -> Callable:
        def compute(net: Callable, values: Arrays) -> tuple[Tensor, Arrays, Arrays]:
            cosine, embedding = net(values["spectrum"])
            margin = 0.2 * torch.clamp(values["updates"] / 100.0, max=1.0) if grows else values["margin"]
            cosine = cosine.clamp(-0.999, 0.999)
            moved = cosine * torch.cos(margin) - torch.sqrt(1 - cosine * cosine) * torch.sin(margin)
            chosen = values["speaker"][:, None] == torch.arange(11)
            logits = 16 * torch.where(chosen, moved, cosine)
            each = F.cross_entropy(logits, values["speaker"], reduction="none")
            right = (cosine.argmax(1) == values["speaker"]).float().mean()
            metrics = {"margin_in_use": margin} if grows else {"loss_per_utterance": each}
            return each.mean(), metrics | {"accuracy": right, "embedding_norm": norm_of([embedding])}, {}

        return compute

    batch = {"spectrum": torch.randn(5, 20, 18), "speaker": torch.randint(11, (5,))}
    fed = {"margin": torch.tensor(0.2), "lr": torch.tensor(0.05)}
    first = Optimizer(momentum, MOMENTUM, lambda values, t: values["lr"], matrices(2e-4), label="velocity/{weight}")
    yield one_step("momentum", SpeakerNet(), batch, objective(False), first, fed=fed)
    second = Optimizer(lion, {"momentum": zeros}, lambda values, t: 3e-4, lambda *_: 0.1, "updates")
    yield one_step("lion", SpeakerNet(), batch, objective(True), second, Style(names="exporter", opset=21))
