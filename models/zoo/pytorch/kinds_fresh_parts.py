"""Common parts of `kinds_fresh_*.py`: styles by word, gradients, and update rules over dictionaries."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

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


def steps(names: str, data: Arrays, states: Arrays, run: Callable[[Arrays], Outputs], **others: Arrays) -> Iterator:
    """Yield a step for each word, VARIANT:STYLE or a style alone; `others` are hyperparameters and constants."""
    for name in names.split():
        variant, _, style = name.partition(":")
        yield Step(variant, Inputs(data, states, **others), run, STYLES[style or variant])


def trained(
    names: str,
    data: Arrays,
    net: Arrays,
    objective: Callable[[Arrays, Arrays], Tensor | tuple[Tensor, Arrays]],
    rule: str = "adam",
    losses: str = "loss",
    carried: Arrays | None = None,
    extra: Callable[[Arrays, Arrays, Arrays], Arrays] = lambda *_: {},
    **others: Arrays,
) -> Iterator:
    """Yield steps of an optimizer on `objective(weights, values)`, which returns a total and what else is given out.

    `losses` are names of that, or the total's. What has a name of `carried` is its next value; `extra(values, next
    states, gradients)` returns the rest of those, and may change the next states.
    """
    carried = carried or {}

    def run(v: Arrays) -> Outputs:
        def split(w: Arrays) -> tuple[Tensor, Arrays]:
            found = objective(w, v)
            return found if isinstance(found, tuple) else (found, {})

        total, grads, parts = slope_aux(split, pick(v, net))
        states = RULES[rule](v, pick(v, net), grads) | {name: parts.pop(name) for name in carried if name in parts}
        found = {name: parts.pop(name, total) for name in losses.split()}
        return Outputs(found, parts, states=states | extra(v, states, grads))

    return steps(names, data, slots(rule, net) | carried, run, **others)


def ruled(
    names: str, data: Arrays, net: Arrays, objective: Callable, update: Callable, carried: Arrays, **others: Arrays
) -> Iterator:
    """Yield steps by `update(weights, gradients, values, loss)`, which returns next states and perhaps metrics."""

    def run(v: Arrays) -> Outputs:
        w = pick(v, net)
        loss, grads = slope(lambda weights: objective(weights, v), w)
        found = update(w, grads, v, loss)
        states, metrics = found if isinstance(found, tuple) else (found, {})
        return Outputs({"loss": loss}, metrics, states=states)

    return steps(names, data, net | carried, run, **others)


def runs(name: str, names: str, make: Callable[[], dict], **options: Any) -> Callable:
    """Register the decorated `run(values)` as a kind of steps; `make` returns the other arguments of `steps`."""
    return lambda run: kind(name)(lambda: steps(names, run=run, **make(), **options)) and run


def trains(name: str, names: str, make: Callable[[], dict], **options: Any) -> Callable:
    """Register the decorated objective as a kind of steps; `make` returns arrays for `trained`."""
    return lambda objective: kind(name)(lambda: trained(names, objective=objective, **make(), **options)) and objective


def updates(name: str, names: str, make: Callable[[], dict], objective: Callable, **options: Any) -> Callable:
    """Register the decorated update as a kind of steps; `make` returns arrays for `ruled`."""
    return lambda rule: kind(name)(lambda: ruled(names, objective=objective, update=rule, **make(), **options)) and rule


def pick(values: Arrays, names: Iterable[str], pattern: str = "{}") -> Arrays:
    """Return the values that are named by a pattern of these names, under the plain names."""
    return {name: values[pattern.format(name)] for name in names}


def tag(values: Arrays, pattern: str) -> Arrays:
    """Return the values under names by a pattern."""
    return {pattern.format(name): value for name, value in values.items()}


def clones(values: Arrays, *patterns: str) -> Arrays:
    """Return copies for each pattern."""
    return {pattern.format(name): value.clone() for pattern in patterns for name, value in values.items()}


def zeros(values: Arrays, *patterns: str) -> Arrays:
    """Return zeros for each pattern and value."""
    return {name: torch.zeros_like(value) for name, value in clones(values, *patterns).items()}


def slope(objective: Callable[[Arrays], Tensor], weights: Arrays) -> tuple[Tensor, Arrays]:
    """Return the loss and its gradients."""
    return torch.func.grad_and_value(objective)(weights)[::-1]


def slope_aux(objective: Callable[[Arrays], tuple[Tensor, Arrays]], weights: Arrays) -> tuple[Tensor, Arrays, Arrays]:
    """Return the loss, its gradients, and what the objective returns beside it."""
    grads, (loss, aux) = torch.func.grad_and_value(objective, has_aux=True)(weights)
    return loss, grads, aux


def sgd(weights: Arrays, grads: Arrays, rate: float | Tensor = 0.05) -> Arrays:
    """Return gradient descent."""
    return {name: weight - rate * grads[name] for name, weight in weights.items()}


def heavy(values: Arrays, weights: Arrays, grads: Arrays, rate: float | Tensor = 0.05, beta: float = 0.9) -> Arrays:
    """Return gradient descent with momentum: the next weights and velocities."""
    velocity = {name: beta * values[f"{name}_vel"] - rate * grads[name] for name in weights}
    return {name: weight + velocity[name] for name, weight in weights.items()} | tag(velocity, "{}_vel")


def adam(
    values: Arrays, weights: Arrays, grads: Arrays, rate: float | Tensor = 0.01, t: str = "t", decay: float = 0
) -> Arrays:
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
    """Return the weights with the state that a rule carries."""
    if rule.startswith("adam"):
        return net | zeros(net, "{}_m", "{}_v") | {t: torch.zeros(())}
    return net | (zeros(net, "{}_vel") if rule == "heavy" else {})


def blend(old: Arrays, new: Arrays, decay: float) -> Arrays:
    """Return moving averages of dictionaries with the same names."""
    return {name: decay * value + (1 - decay) * new[name] for name, value in old.items()}


def norm(grads: Arrays) -> Tensor:
    """Return the norm of all gradients together."""
    return torch.sqrt(sum((grad**2).sum() for grad in grads.values()))


def labelled(rows: int = 6, width: int = 5, classes: int = 4) -> Arrays:
    """Return a batch x with integer labels y."""
    return {"x": torch.randn(rows, width), "y": torch.randint(classes, (rows,))}


def measured(rows: int = 6, width: int = 5, targets: int = 3) -> Arrays:
    """Return a batch x with real targets y."""
    return {"x": torch.randn(rows, width), "y": torch.randn(rows, targets)}
