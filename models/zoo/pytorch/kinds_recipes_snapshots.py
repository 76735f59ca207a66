"""Recipes with the best, or the last, weights beside the present ones."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.zoo.pytorch.recipes import (
    EXPORTER,
    PLAIN,
    SCRAMBLED,
    call,
    copies_of,
    grads_of,
    heavy_ball,
    keras_adam,
    matrices,
    parameters,
    select,
    zeros_of,
)
from models.zoo.steps import Arrays, Inputs, Outputs, Step, Style, kind


@kind("validated-checkpoints")
def validated_checkpoints() -> Iterator[Step]:
    """Each step validates its next weights: the best ones, their loss, patience and rate are carried."""
    net = nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 8), nn.Tanh(), nn.Linear(8, 3))
    params = parameters(net)
    batch = {"x": torch.randn(6, 7), "y": torch.randn(6, 3), "val_x": torch.randn(5, 7), "val_y": torch.randn(5, 3)}

    def run(values: Arrays, adaptive: bool) -> Outputs:
        weights = select(values, params)

        def objective(w: Arrays) -> tuple[Tensor, Tensor]:
            off = call(net, w, values["x"]) - values["y"]
            penalty = 1e-3 * sum(w[name].square().sum() for name in w if matrices(name))
            return off.square().mean() + penalty, off.square().mean()

        loss, fit, grads = grads_of(objective, weights)
        rate = values["lr"]
        states = keras_adam(weights, grads, values, rate) if adaptive else heavy_ball(weights, grads, values, rate)
        checked = F.mse_loss(call(net, select(states, params), values["val_x"]), values["val_y"])
        better = checked < values["best_val_loss"] - 1e-4
        states["best_val_loss"] = torch.where(better, checked, values["best_val_loss"])
        for name in params:
            states[f"best.{name}"] = torch.where(better, states[name], values[f"best.{name}"])
        bad = torch.where(better, torch.zeros_like(values["bad_epochs"]), values["bad_epochs"] + 1)
        reduce = (bad > 0) & (bad % 5 == 0)
        states |= {"bad_epochs": bad, "lr": torch.where(reduce, (rate * 0.5).clamp(min=1e-5), rate)}
        metrics = {"train_mse": fit, "val_loss": checked, "should_stop": bad >= 20}
        return Outputs({"loss": loss}, metrics, states=states)

    carried = {"best_val_loss": torch.tensor(1.1), "bad_epochs": torch.tensor(3), "lr": torch.tensor(0.02)}
    states = params | zeros_of(params, "momentum") | copies_of(params, "best") | carried
    yield Step("momentum", Inputs(batch, states), lambda values: run(values, False), PLAIN)
    states = params | zeros_of(params, "m", "v") | copies_of(params, "best") | carried | {"iterations": torch.tensor(0)}
    initializers = Style(names="scrambled", states="initializers", order="shuffled", shapes="interface")
    yield Step("adam", Inputs(batch, states), lambda values: run(values, True), initializers)


@kind("mobile-convnet-tail")
def mobile_convnet_tail() -> Iterator[Step]:  # noqa: PLR0915
    """Depthwise blocks with batch statistics; cyclic SGD with SWA, or TensorFlow's RMSprop with EMA."""
    shapes = {"stem": (6, 3, 3), "depth": (6, 1, 3), "point": (10, 6, 1)}
    params: Arrays = {}
    stats: Arrays = {}
    for name, (leave, enter, size) in shapes.items():
        params[f"{name}.weight"] = torch.randn(leave, enter, size, size) / (enter * size * size) ** 0.5
        params |= {f"{name}.bn.weight": torch.ones(leave), f"{name}.bn.bias": torch.zeros(leave)}
        stats |= {f"{name}.bn.running_mean": torch.zeros(leave), f"{name}.bn.running_var": torch.ones(leave)}
        stats[f"{name}.bn.num_batches_tracked"] = torch.tensor(0)
    params |= {"squeeze.weight": torch.randn(4, 10) / 3, "excite.weight": torch.randn(10, 4) / 2}
    params |= {"head.weight": torch.randn(5, 10) / 3, "head.bias": torch.zeros(5)}
    batch = {"image": torch.randn(4, 3, 8, 8), "label": torch.randint(5, (4,))}

    def objective(w: Arrays, values: Arrays) -> tuple[Tensor, tuple[Arrays, Arrays]]:
        x, states = values["image"], {}
        for name in shapes:
            stride, groups = (2, 1) if name == "stem" else (1, 6 if name == "depth" else 1)
            x = F.conv2d(x, w[f"{name}.weight"], stride=stride, padding=int(name != "point"), groups=groups)
            mean, var, key = x.mean((0, 2, 3)), x.var((0, 2, 3), correction=0), f"{name}.bn"
            n = x.numel() / x.shape[1]
            states[f"{key}.running_mean"] = 0.9 * values[f"{key}.running_mean"] + 0.1 * mean.detach()
            states[f"{key}.running_var"] = 0.9 * values[f"{key}.running_var"] + 0.1 * var.detach() * n / (n - 1)
            states[f"{key}.num_batches_tracked"] = values[f"{key}.num_batches_tracked"] + 1
            x = (x - mean[:, None, None]) * torch.rsqrt(var + 1e-5)[:, None, None]
            x = F.hardswish(x * w[f"{key}.weight"][:, None, None] + w[f"{key}.bias"][:, None, None])
        gate = F.hardsigmoid(F.relu(x.mean((2, 3)) @ w["squeeze.weight"].T) @ w["excite.weight"].T)
        logits = (x * gate[:, :, None, None]).mean((2, 3)) @ w["head.weight"].T + w["head.bias"]
        loss = F.cross_entropy(logits, values["label"], label_smoothing=0.1)
        top = logits.topk(2).indices == values["label"][:, None]
        return loss, ({"top1": top[:, 0].float().mean(), "top2": top.any(1).float().mean()}, states)

    def with_swa(values: Arrays) -> Outputs:
        weights = select(values, params)
        loss, (metrics, states), grads = grads_of(lambda w: objective(w, values), weights)
        done = values["iteration"]
        lr = 0.05 - 0.045 * (done % 4).float() / 3
        states |= heavy_ball(weights, grads, values, lr, decay=1e-4, decayed=matrices, nesterov=True)
        due = (done >= 40) & (done % 4 == 3)
        count = values["n_averaged"]
        for name in params:
            mean = values[f"swa.{name}"]
            states[f"swa.{name}"] = torch.where(due, mean + (states[name] - mean) / (count + 1).float(), mean)
        states |= {"n_averaged": count + due.long(), "iteration": done + 1}
        return Outputs({"loss": loss}, metrics | {"lr": lr}, states=states)

    def with_ema(values: Arrays) -> Outputs:
        weights = select(values, params)
        loss, (metrics, states), grads = grads_of(lambda w: objective(w, values), weights)
        n = values["num_updates"].float()
        decay = torch.minimum(torch.tensor(0.999), (1 + n) / (10 + n))
        for name, w in weights.items():
            g = grads[name] + 1e-5 * w
            ms = values[f"square.{name}"] + 0.1 * (g * g - values[f"square.{name}"])
            mom = 0.9 * values[f"mom.{name}"] + values["lr"] * g / torch.sqrt(ms + 1e-3)
            states |= {name: w - mom, f"square.{name}": ms, f"mom.{name}": mom}
            states[f"ema.{name}"] = values[f"ema.{name}"] - (1 - decay) * (values[f"ema.{name}"] - states[name])
        return Outputs({"loss": loss}, metrics, states=states | {"num_updates": values["num_updates"] + 1})

    counts = {"n_averaged": torch.tensor(2), "iteration": torch.tensor(49)}
    states = params | stats | zeros_of(params, "momentum") | copies_of(params, "swa") | counts
    yield Step("swa", Inputs(batch, states), with_swa, SCRAMBLED)
    ones = {f"square.{name}": torch.ones_like(value) for name, value in params.items()}
    states = params | stats | ones | zeros_of(params, "mom") | copies_of(params, "ema")
    states |= {"num_updates": torch.tensor(60)}
    yield Step("rmsprop-ema", Inputs(batch, states, {"lr": torch.tensor(0.01)}), with_ema, EXPORTER)
