"""Parts of the steps `unseen-*` by PyTorch: networks, one step, the form of an update rule."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from models.zoo.steps import Arrays, Inputs, Outputs
from models.zoo.unseen import Made

R = torch.randn
FLOAT, INT = torch.float32, torch.int64
Rule = tuple[Callable[[Arrays], Arrays], Callable[..., tuple[Arrays, Arrays]]]


def mlp(*sizes: int, p: str = "fc", bias: bool = True) -> Arrays:
    w: Arrays = {}
    for i, (a, b) in enumerate(pairwise(sizes)):
        w[f"{p}{i}.weight"] = R(b, a) / a**0.5
        if bias:
            w[f"{p}{i}.bias"] = 0.05 * R(b)
    return w


def net(w: Arrays, x: Tensor, p: str = "fc", act: Callable[[Tensor], Tensor] = torch.tanh) -> Tensor:
    i = 0
    while f"{p}{i}.weight" in w:
        x = F.linear(act(x) if i else x, w[f"{p}{i}.weight"], w.get(f"{p}{i}.bias"))
        i += 1
    return x


def fit(
    weights: Arrays,
    batch: Arrays,
    loss: Callable[..., Any],
    rule: Rule,
    *,
    states: Arrays | None = None,
    constants: Arrays | None = None,
    hyper: Arrays | None = None,
    hook: Callable[..., tuple[Arrays, Outputs]] = lambda g, v: (g, Outputs()),
    after: Callable[..., Arrays] = lambda new, v: {},
) -> Made:
    """Put a step together: `loss(w, v)` gives a scalar, or that and `Outputs`; `hook` sees the gradients."""
    slots = rule[0](weights)

    def run(v: Arrays) -> Outputs:
        def objective(w: Arrays) -> Any:
            found = loss(w, v)
            value, more = found if isinstance(found, tuple) else (found, Outputs())
            return value, (value, more.losses, more.metrics, more.states, more.kept)

        w = {n: v[n] for n in weights}
        g, aux = torch.func.grad(objective, has_aux=True)(w)
        g, seen = hook(g, v)
        new, s = rule[1](w, g, {n: v[n] for n in slots}, v)
        new = new | s | aux[3] | seen.states
        new |= after(new, v)
        return Outputs({"loss": aux[0]} | aux[1], aux[2] | seen.metrics, seen.gradients, new, aux[4])

    inputs = Inputs(batch, weights | slots | (states or {}), hyper or {}, constants or {})
    return inputs, run, list(weights)


def per(slots: str, f: Callable[..., Any], count: Any = None, start: float = 0.0) -> Rule:
    """Make a rule of a formula for one weight: `f(w, g, *slots[, t])`."""
    keys = slots.split()

    def init(w: Arrays) -> Arrays:
        s = {f"{k}.{n}": torch.full_like(x, start) for k in keys for n, x in w.items()}
        return s if count is None else s | {"step": torch.zeros((), dtype=count)}

    def step(w: Arrays, g: Arrays, s: Arrays, v: Arrays) -> tuple[Arrays, Arrays]:
        after: Arrays = {}
        t = () if count is None else ((s["step"] + 1).float(),)
        found = {n: f(x, g[n], *[s[f"{k}.{n}"] for k in keys], *t) for n, x in w.items()}
        new = {n: r[0] if isinstance(r, tuple) else r for n, r in found.items()}
        for i, k in enumerate(keys, 1):
            after |= {f"{k}.{n}": r[i] for n, r in found.items()}
        return new, after if count is None else after | {"step": s["step"] + 1}

    return init, step


FLOAT, INT = torch.float32, torch.int64
