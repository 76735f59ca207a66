"""Common parts of `kinds_fresh_*.py`: styles by word, gradients, and update rules over dictionaries."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from models.zoo.pytorch.problems import dense, layers
from models.zoo.steps import PLAIN, Arrays, Inputs, Outputs, Step, Style, kind

STYLES = {
    "plain": PLAIN,
    "numbered": Style(names="numbered"),
    "scrambled": Style(names="scrambled", order="shuffled"),
    "bare": Style(names="scrambled", order="shuffled", shapes="inputs"),
    "new": Style(names="new_{}"),
    "out": Style(names="{}_out", shapes="interface"),
    "primed": Style(names="{}.1", order="reversed"),
    "exporter": Style(names="exporter"),
    "stored": Style(states="initializers"),
    "overridable": Style(states="overridable", order="shuffled"),
    "embedded": Style(embedded_constants=True),
    "raw": Style(optimize=False, shapes="interface"),
    "dynamic": Style(dynamic=True),
    "old": Style(opset=18, names="numbered", order="shuffled"),
}
TWO = ("w1", "b1", "w2", "b2")


def steps(names: str, data: Arrays, states: Arrays, run: Callable[[Arrays], Outputs], **others: Arrays) -> Iterator:
    """Yield a step for each word, VARIANT:STYLE or a style alone; `others` are hyperparameters and constants."""
    for name in names.split():
        variant, _, style = name.partition(":")
        yield Step(variant, Inputs(data, states, **others), run, STYLES[style or variant])


def trained(
    names, data, net, objective, rule="adam", losses="loss", carried=None, extra=lambda *_: {}, **others
) -> Iterator:
    """Yield steps of an optimizer on `objective(weights, values)`, which returns a total and what else is given out.

    `losses` names that, or the total. Next values of `carried` are parts, or `extra(values, states, gradients)`.
    """
    carried = carried or {}

    def run(v: Arrays) -> Outputs:
        total, grads, parts = slope_aux(lambda w: both(objective(w, v)), pick(v, net))
        states = RULES[rule](v, pick(v, net), grads) | {name: parts.pop(name) for name in carried if name in parts}
        found = {name: parts.pop(name, total) for name in losses.split()}
        return Outputs(found, parts, states=states | extra(v, states, grads))

    return steps(names, data, slots(rule, net) | carried, run, **others)


def ruled(names: str, data: Arrays, net: Arrays, carried: Arrays, objective, update, **others: Arrays) -> Iterator:
    """Yield steps by `update(weights, gradients, values, loss)`, which returns next states and perhaps metrics."""

    def run(v: Arrays) -> Outputs:
        w = pick(v, net)
        loss, grads = slope(lambda weights: objective(weights, v), w)
        states, metrics = both(update(w, grads, v, loss))
        return Outputs({"loss": loss}, metrics, states=states)

    return steps(names, data, net | carried, run, **others)


def runs(name: str, names: str, make: Callable[[], tuple]) -> Callable:
    """Register the decorated `run(values)` as a kind of steps; `make` returns a batch, states, perhaps constants."""

    def build(run: Callable) -> Iterator:
        data, states, constants = (*make(), {})[:3]
        return steps(names, data, states, run, constants=constants)

    return lambda run: kind(name)(lambda: build(run)) and run


def trains(name: str, names: str, make: Callable[[], tuple], **options: Any) -> Callable:
    """Register the decorated objective; `make` returns a batch, weights, perhaps what is carried, and constants."""

    def build(objective: Callable) -> Iterator:
        data, net, carried, constants = (*make(), {}, {})[:4]
        return trained(names, data, net, objective, carried=carried, constants=constants, **options)

    return lambda objective: kind(name)(lambda: build(objective)) and objective


def updates(name: str, names: str, make: Callable[[], tuple], objective: Callable) -> Callable:
    """Register the decorated update; `make` returns a batch, weights, and what is carried."""
    return lambda update: kind(name)(lambda: ruled(names, *make(), objective, update)) and update


def both(found: Any) -> tuple[Any, Arrays]:
    return found if isinstance(found, tuple) else (found, {})


def pick(values: Arrays, names: Iterable[str], pattern: str = "{}") -> Arrays:
    """Return the values that are named by a pattern of these names, under the plain names."""
    return {name: values[pattern.format(name)] for name in names}


def tag(values: Arrays, pattern: str) -> Arrays:
    return {pattern.format(name): value for name, value in values.items()}


def clones(values: Arrays, *patterns: str) -> Arrays:
    return {pattern.format(name): value.clone() for pattern in patterns for name, value in values.items()}


def zeros(values: Arrays, *patterns: str) -> Arrays:
    return {name: torch.zeros_like(value) for name, value in clones(values, *patterns).items()}


def slope(objective: Callable[[Arrays], Tensor], weights: Arrays) -> tuple[Tensor, Arrays]:
    return torch.func.grad_and_value(objective)(weights)[::-1]


def slope_aux(objective: Callable[[Arrays], tuple[Tensor, Arrays]], weights: Arrays) -> tuple[Tensor, Arrays, Arrays]:
    grads, (loss, aux) = torch.func.grad_and_value(objective, has_aux=True)(weights)
    return loss, grads, aux


def sgd(weights: Arrays, grads: Arrays, rate: float | Tensor = 0.05) -> Arrays:
    return {name: weight - rate * grads[name] for name, weight in weights.items()}


def heavy(values: Arrays, weights: Arrays, grads: Arrays, rate: float | Tensor = 0.05, beta: float = 0.9) -> Arrays:
    velocity = {name: beta * values[f"{name}_vel"] - rate * grads[name] for name in weights}
    return {name: weight + velocity[name] for name, weight in weights.items()} | tag(velocity, "{}_vel")


def adam(values: Arrays, weights: Arrays, grads: Arrays, t: str = "t", rate: float = 0.01, decay: float = 0) -> Arrays:
    """Return Adam with bias corrections and a float counter; decay is decoupled."""
    count = values[t] + 1
    following = {t: count}
    for name, weight in weights.items():
        first = 0.9 * values[f"{name}_m"] + 0.1 * grads[name]
        second = 0.99 * values[f"{name}_v"] + 0.01 * grads[name] ** 2
        moved = rate * (first / (1 - 0.9**count)) / (torch.sqrt(second / (1 - 0.99**count)) + 1e-6)
        following |= {name: weight * (1 - decay) - moved, f"{name}_m": first, f"{name}_v": second}
    return following


RULES = {"sgd": lambda v, w, g: sgd(w, g), "heavy": heavy, "adam": adam, "adamw": lambda *a: adam(*a, decay=1e-3)}


def slots(rule: str, net: Arrays, t: str = "t") -> Arrays:
    count = {t: torch.zeros(())} if rule.startswith("adam") else {}
    return net | zeros(net, *{"sgd": (), "heavy": ("{}_vel",)}.get(rule, ("{}_m", "{}_v"))) | count


def blend(old: Arrays, new: Arrays, decay: float) -> Arrays:
    return {name: decay * value + (1 - decay) * new[name] for name, value in old.items()}


def norm(grads: Arrays) -> Tensor:
    return torch.sqrt(sum((grad**2).sum() for grad in grads.values()))


def labelled(rows: int = 6, width: int = 5, classes: int = 4) -> Arrays:
    return {"x": torch.randn(rows, width), "y": torch.randint(classes, (rows,))}


def measured(rows: int = 6, width: int = 5, targets: int = 3) -> Arrays:
    return {"x": torch.randn(rows, width), "y": torch.randn(rows, targets)}


def small(make: Callable, *patterns: str, classes: bool = False, **scalars: Tensor) -> tuple[Arrays, Arrays, Arrays]:
    """Return a small problem: a batch, weights, and what is carried: slots of their shapes, and scalars."""
    net = layers(5, 6, 4 if classes else 3)
    return labelled() if classes else measured(), net, make(net, *patterns) | scalars


def together(made: tuple[Arrays, Arrays, Arrays]) -> tuple[Arrays, Arrays]:
    return made[0], made[1] | made[2]


def mse(w: Arrays, v: Arrays) -> Tensor:
    return F.mse_loss(dense(w, v["x"]), v["y"])


def ce(w: Arrays, v: Arrays) -> Tensor:
    return F.cross_entropy(dense(w, v["x"], torch.relu), v["y"])
