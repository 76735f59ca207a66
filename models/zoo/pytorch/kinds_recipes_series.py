"""Recipes of series, molecules and fields: forecasts with carried scales, messages, rays through a carried grid."""

import math
from collections.abc import Iterator
from itertools import pairwise

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
    copies_of,
    grads_of,
    heavy_ball,
    keras_adam,
    optax_adam,
    parameters,
    select,
    zeros_of,
)
from models.zoo.steps import PLAIN, Arrays, Inputs, Outputs, Step, Style, kind


@kind("quantile-tcn")
def quantile_tcn() -> Iterator[Step]:
    """Dilated causal convolutions with weight normalization, three quantiles; an average of weights without bias."""
    sizes, params = (3, 8, 10, 8), {}
    for index, (enter, leave) in enumerate(pairwise(sizes)):
        params[f"conv{index}.v"] = torch.randn(leave, enter, 3) / (3 * enter) ** 0.5
        params |= {f"conv{index}.g": torch.ones(leave, 1, 1), f"conv{index}.bias": torch.zeros(leave)}
        params[f"skip{index}.weight"] = torch.randn(leave, enter, 1) / enter**0.5
    params |= {"head.weight": torch.randn(3, 8) / 8**0.5, "head.bias": torch.tensor([-0.5, 0.0, 0.5])}
    batch = {"series": torch.randn(4, 3, 12), "future": torch.randn(4, 12)}
    quantiles = torch.tensor([0.1, 0.5, 0.9])

    def objective(weights: Arrays, values: Arrays, size: Tensor | float = 1.0) -> tuple[Tensor, Arrays]:
        x = values["series"] / size
        for index in range(3):
            v = weights[f"conv{index}.v"]
            kernel = weights[f"conv{index}.g"] * v / v.norm(dim=(1, 2), keepdim=True)
            gap = 2**index
            y = F.conv1d(F.pad(x, (2 * gap, 0)), kernel, weights[f"conv{index}.bias"], dilation=gap)
            x = F.relu(y) + F.conv1d(x, weights[f"skip{index}.weight"])
        made = F.linear(x.transpose(1, 2), weights["head.weight"], weights["head.bias"])
        off = values["future"][..., None] / size - made
        pinball = torch.maximum(quantiles * off, (quantiles - 1) * off).mean((0, 1))
        inside = ((off[..., 0] > 0) & (off[..., 2] < 0)).float().mean()
        return pinball.sum(), {"pinball": pinball, "coverage": inside, "mae": off[..., 1].abs().mean()}

    def with_nesterov(values: Arrays) -> Outputs:
        weights = select(values, params)
        loss, metrics, grads = grads_of(lambda w: objective(w, values), weights)
        states = heavy_ball(weights, grads, values, values["lr"], nesterov=True)
        count = values["ema_steps"] + 1
        for name in params:
            states[f"ema.{name}"] = 0.99 * values[f"ema.{name}"] + 0.01 * states[name]
        metrics["ema_head_norm"] = states["ema.head.weight"].norm() / (1 - 0.99**count)
        return Outputs({"loss": loss}, metrics, states=states | {"ema_steps": count})

    def with_scale(values: Arrays) -> Outputs:
        weights = select(values, params)
        size = 0.95 * values["mean_abs"] + 0.05 * values["series"].abs().mean((0, 2))
        loss, metrics, grads = grads_of(lambda w: objective(w, values, size.mean()), weights)
        grads, norm = clip_norm(grads, 0.5)
        states = adamw(weights, grads, values, 1e-3, decay=1e-2) | {"mean_abs": size}
        return Outputs({"loss": loss}, {"norm": norm, "mae": metrics["mae"] * size.mean()}, states=states)

    states = params | zeros_of(params, "momentum", "ema") | {"ema_steps": torch.tensor(0.0)}
    yield Step("nesterov-ema", Inputs(batch, states, {"lr": torch.tensor(0.02)}), with_nesterov, SCRAMBLED)
    states = params | adam_state(params) | {"mean_abs": torch.ones(3)}
    yield Step("running-scale", Inputs(batch, states), with_scale, EXPORTER)


class Forecaster(nn.Module):
    """A cell that reads the last value and covariates, and gives the parameters of a distribution."""

    def __init__(self) -> None:
        super().__init__()
        self.series = nn.Embedding(9, 3)
        self.cell = nn.GRUCell(1 + 2 + 3, 10)
        self.location, self.spread = nn.Linear(10, 1), nn.Linear(10, 1)

    def forward(self, past: Tensor, covariates: Tensor, which: Tensor) -> tuple[Tensor, Tensor]:
        b, t = past.shape
        h, made = torch.zeros(b, 10), []
        for place in range(t):
            parts = [past[:, place, None], covariates[:, place], self.series(which)]
            h = self.cell(torch.cat(parts, -1), h)
            made.append(torch.cat([self.location(h), F.softplus(self.spread(h)) + 0.05], -1))
        return torch.stack(made, 1).unbind(-1)


@kind("probabilistic-forecast")
def probabilistic_forecast() -> Iterator[Step]:
    """DeepAR: values by Welford's statistics, which are carried for all series or for each; Gaussian or Student's t."""
    net = Forecaster()
    params = parameters(net)
    values_of = 5 + 2 * torch.randn(5, 7)
    batch = {"values": values_of, "covariates": torch.randn(5, 6, 2), "series_id": torch.randperm(9)[:5]}

    def objective(w: Arrays, normal: Tensor, values: Arrays, student: bool) -> tuple[Tensor, Arrays]:
        mean, spread = call(net, w, normal[:, :-1], values["covariates"], values["series_id"])
        z = (normal[:, 1:] - mean) / spread
        if student:
            nll = 3.0 * torch.log1p(z**2 / 5.0) + torch.log(spread)
        else:
            nll = 0.5 * z**2 + torch.log(spread) + 0.5 * math.log(2 * math.pi)
        return nll.mean(), {"rmse": (normal[:, 1:] - mean).square().mean().sqrt(), "mean_spread": spread.mean()}

    def shared(values: Arrays) -> Outputs:
        weights, x = select(values, params), values["values"]
        total = values["count"] + x.numel()
        delta = x.mean() - values["running_mean"]
        share = x.numel() / total.float()
        mean = values["running_mean"] + delta * share
        squares = values["running_m2"] + (x - x.mean()).square().sum()
        squares = squares + delta**2 * values["count"].float() * share
        normal = (x - mean) / torch.sqrt(squares / total.float() + 1e-4)
        loss, metrics, grads = grads_of(lambda w: objective(w, normal, values, False), weights)
        states: Arrays = {"running_mean": mean, "running_m2": squares, "count": total, "step": values["step"] + 1}
        for name, w in weights.items():
            m = 0.9 * values[f"exp_avg.{name}"] + 0.1 * grads[name]
            v = 0.999 * values[f"exp_avg_sq.{name}"] + 0.001 * grads[name].square()
            top = torch.maximum(values[f"max_exp_avg_sq.{name}"], v)
            t = states["step"].float()
            denominator = (top / (1 - 0.999**t)).sqrt() + 1e-5
            states |= {name: w - 1e-3 / (1 - 0.9**t) * m / denominator}
            states |= {f"exp_avg.{name}": m, f"exp_avg_sq.{name}": v, f"max_exp_avg_sq.{name}": top}
        return Outputs({"nll": loss}, metrics, states=states)

    def each(values: Arrays) -> Outputs:
        weights, x, rows = select(values, params), values["values"], values["series_id"]
        level = 0.9 * values["level"][rows] + 0.1 * x.mean(1)
        scale = 0.9 * values["scale"][rows] + 0.1 * (x - level[:, None]).abs().mean(1)
        normal = (x - level[:, None]) / (scale[:, None] + 1e-3)
        loss, metrics, grads = grads_of(lambda w: objective(w, normal, values, True), weights)
        states = {"level": values["level"].index_copy(0, rows, level)}
        states["scale"] = values["scale"].index_copy(0, rows, scale)
        for name, w in weights.items():
            v = 0.99 * values[f"v.{name}"] + 0.01 * grads[name].square()
            mean = 0.99 * values[f"mg.{name}"] + 0.01 * grads[name]
            momentum = 0.9 * values[f"mom.{name}"] + values["lr"] * grads[name] / torch.sqrt(v - mean**2 + 1e-3)
            states |= {name: w - momentum, f"v.{name}": v, f"mg.{name}": mean, f"mom.{name}": momentum}
        return Outputs({"nll": loss}, metrics, states=states)

    carried = {"running_mean": torch.tensor(4.0), "running_m2": torch.tensor(50.0), "count": torch.tensor(20)}
    states = params | zeros_of(params, "exp_avg", "exp_avg_sq", "max_exp_avg_sq") | carried | {"step": torch.tensor(0)}
    yield Step("gaussian-amsgrad", Inputs(batch, states), shared)
    states = params | zeros_of(params, "v", "mg", "mom") | {"level": torch.full((9,), 5.0), "scale": torch.ones(9)}
    yield Step("student-rmsprop", Inputs(batch, states, {"lr": torch.tensor(1e-3)}), each, BARE)


class Messages(nn.Module):
    """Messages along bonds, of their features; a mean over the atoms of each molecule."""

    def __init__(self) -> None:
        super().__init__()
        self.atom = nn.Embedding(7, 8)
        self.bond1, self.bond2 = nn.Linear(3, 8), nn.Linear(3, 12)
        self.in1, self.out1 = nn.Linear(8, 14), nn.Linear(14, 12)
        self.in2, self.out2 = nn.Linear(12, 16), nn.Linear(16, 10)
        self.eps = nn.Parameter(torch.zeros(2))
        self.read1, self.read2 = nn.Linear(10, 6), nn.Linear(6, 1)

    def forward(self, atoms: Tensor, start: Tensor, end: Tensor, bonds: Tensor, owner: Tensor) -> Tensor:
        x = self.atom(atoms)
        for index, (bond, enter, leave) in enumerate(
            ((self.bond1, self.in1, self.out1), (self.bond2, self.in2, self.out2))
        ):
            sent = F.relu(x[start] + bond(bonds))
            got = torch.zeros_like(x).index_add(0, end, sent)
            x = F.relu(leave(F.relu(enter((1 + self.eps[index]) * x + got))))
        pooled = torch.zeros(4, 10).index_add(0, owner, x)
        sizes = torch.zeros(4).index_add(0, owner, torch.ones(owner.shape[0]))
        return self.read2(F.relu(self.read1(pooled / sizes[:, None])))[:, 0]


@kind("molecule-property")
def molecule_property() -> Iterator[Step]:
    """A property standardised by what was seen of it, or by fed constants; errors in its own unit."""
    net = Messages()
    params = parameters(net)
    owner = torch.tensor([0, 0, 0, 1, 1, 1, 1, 2, 2, 3, 3, 3])
    start = torch.randint(12, (20,))
    batch = {"atoms": torch.randint(7, (12,)), "start": start, "end": (start + torch.randint(1, 3, (20,))) % 12}
    batch |= {"bonds": torch.randn(20, 3), "molecule": owner, "property": 10 + 3 * torch.randn(4)}

    def objective(w: Arrays, values: Arrays, mean: Tensor, spread: Tensor) -> tuple[Tensor, Arrays]:
        made = call(net, w, *(values[name] for name in ("atoms", "start", "end", "bonds", "molecule")))
        off = made - (values["property"] - mean) / spread
        return F.huber_loss(off, torch.zeros_like(off)), {"mae": (off * spread).abs().mean()}

    def standardised(values: Arrays) -> Outputs:
        weights, y = select(values, params), values["property"]
        mean = torch.lerp(values["target_mean"], y.mean(), 0.05)
        variance = torch.lerp(values["target_var"], (y - mean).square().mean(), 0.05)
        loss, metrics, grads = grads_of(lambda w: objective(w, values, mean, variance.sqrt()), weights)
        lr = 2e-3 * 0.98 ** values["count"].float()
        states = optax_adam(weights, grads, values, lr) | {"target_mean": mean, "target_var": variance}
        return Outputs({"loss": loss}, metrics | {"lr": lr}, states=states)

    def gradients(values: Arrays) -> Outputs:
        weights = select(values, params)
        mean, spread = values["target_mean"], values["target_std"]
        loss, metrics, grads = grads_of(lambda w: objective(w, values, mean, spread), weights)
        return Outputs({"loss": loss}, metrics, {f"{name}.grad": grad for name, grad in grads.items()})

    carried = {"target_mean": torch.tensor(9.0), "target_var": torch.tensor(8.0), "count": torch.tensor(0)}
    yield Step("standardised", Inputs(batch, params | zeros_of(params, "mu", "nu") | carried), standardised, EXPORTER)
    constants = params | {"target_mean": torch.tensor(9.0), "target_std": torch.tensor(3.0)}
    yield Step("gradients", Inputs(batch, constants=constants), gradients, Style(optimize=False))


@kind("occupancy-grid-field")
def occupancy_grid_field() -> Iterator[Step]:
    """A radiance field: colours along rays, empty cells left out by a grid of densities that decays and is renewed."""
    net = nn.Sequential(nn.Linear(3 + 12, 20), nn.ReLU(), nn.Linear(20, 16), nn.ReLU(), nn.Linear(16, 4))
    params, cells = parameters(net), 4
    batch = {"origin": torch.rand(6, 3), "direction": F.normalize(torch.randn(6, 3), dim=-1)}
    batch |= {"jitter": torch.rand(6, 5), "colour": torch.rand(6, 3)}

    def field(w: Arrays, place: Tensor) -> Tensor:
        waves = torch.cat([torch.sin(place * 2.0**k * math.pi) for k in range(4)], -1)
        return call(net, w, torch.cat([place, waves], -1))

    def run(values: Arrays, averaged: bool) -> Outputs:
        weights = select(values, params)
        depth = (torch.arange(5) + values["jitter"]) * 0.2
        place = values["origin"][:, None] + depth[..., None] * values["direction"][:, None]
        cell = (place - torch.floor(place)).mul(cells).long().clamp(0, cells - 1)
        cell = (cell[..., 0] * cells + cell[..., 1]) * cells + cell[..., 2]
        full = (values["grid"][cell] > 0.01).float()

        def objective(w: Arrays) -> tuple[Tensor, tuple[Arrays, Tensor]]:
            made = field(w, place)
            density = F.softplus(made[..., 3] - 1)
            passed = density * full * 0.2
            through = torch.exp(-(passed.cumsum(-1) - passed))
            alpha = 1 - torch.exp(-passed)
            colour = ((through * alpha)[..., None] * torch.sigmoid(made[..., :3])).sum(1)
            off = F.mse_loss(colour, values["colour"])
            opacity = (through * alpha).sum(-1)
            loss = F.huber_loss(colour, values["colour"], delta=0.1) + 1e-3 * (opacity * (1 - opacity)).mean()
            return loss, ({"psnr": -10 * torch.log10(off), "opacity": opacity.mean()}, density.detach())

        loss, (metrics, density), grads = grads_of(objective, weights)
        decayed = values["grid"] * 0.95
        grid = decayed.scatter_reduce(0, cell.flatten(), density.flatten(), "amax", include_self=True)
        lr = 1e-2 * 0.33 ** (values["iterations"].float() / 100)
        states = keras_adam(weights, grads, values, lr) | {"grid": grid}
        if averaged:
            for name in params:
                states[f"ema.{name}"] = 0.95 * values[f"ema.{name}"] + 0.05 * states[name]
        return Outputs({"loss": loss}, metrics | {"occupied": (grid > 0.01).float().mean()}, states=states)

    carried = {"grid": torch.rand(cells**3) * 0.1, "iterations": torch.tensor(10)}
    states = params | zeros_of(params, "m", "v") | carried
    yield Step("adam", Inputs(batch, states), lambda values: run(values, False), PLAIN)
    averages = copies_of(params, "ema")
    scrambled = Style(names="scrambled", states="initializers", order="shuffled")
    yield Step("averaged", Inputs(batch, states | averages), lambda values: run(values, True), scrambled)
