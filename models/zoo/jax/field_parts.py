"""Parts of the steps from the field: networks by layers, and an optimizer of optax beside a loss with metrics."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from models.zoo.arrays import normal
from models.zoo.jax.problems import matmul
from models.zoo.jax.training import named_leaves
from models.zoo.steps import PLAIN, Arrays, Inputs, Outputs, Step, Style

# (weights, all inputs) -> loss, metrics and next states
Objective = Callable[[Arrays, Arrays], tuple[jax.Array, tuple[Arrays, Arrays]]]


def linear(name: str, rows: int, columns: int) -> Arrays:
    """Return a kernel and a bias, as Flax names them."""
    kernel = normal(rows, columns, scale=rows**-0.5)
    return {f"{name}_kernel": kernel, f"{name}_bias": normal(columns, scale=0.05)}


def apply(weights: Arrays, name: str, x: jax.Array) -> jax.Array:
    return matmul(x, weights[f"{name}_kernel"]) + weights[f"{name}_bias"]


def one_hot(index: jax.Array, count: int) -> jax.Array:
    return (index[..., None] == jnp.arange(count, dtype=index.dtype)).astype(jnp.float32)


def lookup(table: jax.Array, index: jax.Array) -> jax.Array:
    """Return rows of a table by a product: gathers have no gradient in the export."""
    count, width = table.shape
    return matmul(one_hot(index.reshape(-1), count), table).reshape(*index.shape, width)


def labels(count: int, *shape: int) -> np.ndarray:
    return np.random.randint(0, count, shape).astype(np.int32)


def choice(logits: jax.Array) -> jax.Array:
    """Return the class with the largest logit."""
    return jnp.argmax(jax.lax.stop_gradient(logits), 1)


def global_norm(tree: Arrays) -> jax.Array:
    return jnp.sqrt(sum(jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(tree)))


def one_step(
    variant: str,
    weights: Arrays,
    batch: Arrays,
    objective: Objective,
    optimizer: optax.GradientTransformation,
    style: Style = PLAIN,
    *,
    loss_name: str = "loss",
    states: Arrays | None = None,
    fed: Mapping[str, Any] = MappingProxyType({}),
    constants: Arrays | None = None,
    rate: Callable[[Arrays], Any] | None = None,
    report: Callable[[Arrays, Arrays], Arrays] = lambda grads, values: {},
    ema: float = 0.0,
    prefix: str = "",
    warm: int = 3,
) -> Step:
    """Return a step; `rate` multiplies the updates, `report` adds metrics of the gradients."""
    start = optimizer.init(jax.tree.map(jnp.asarray, weights))
    leaves, structure = named_leaves(start), jax.tree.structure(start)
    slots = {f"{prefix}{name}": value for name, value in leaves.items()}

    def run(values: Arrays) -> Outputs:
        present = {name: values[name] for name in weights}
        (loss, (metrics, following)), grads = jax.value_and_grad(objective, has_aux=True)(present, values)
        state = jax.tree.unflatten(structure, [values[name] for name in slots])
        updates, state = optimizer.update(grads, state, present)
        if rate is not None:
            factor = rate(values)
            updates = {name: update * factor for name, update in updates.items()}
        moved = optax.apply_updates(present, updates)
        if ema:
            following |= {f"ema_{n}": ema * values[f"ema_{n}"] + (1 - ema) * moved[n] for n in weights}
        metrics = metrics | report(grads, values)
        carried = moved | dict(zip(slots, jax.tree.leaves(state), strict=True)) | following
        return Outputs({loss_name: loss}, metrics, states=carried)

    averages = {f"ema_{name}": np.array(weight) for name, weight in weights.items()} if ema else {}
    inputs = Inputs(batch, weights | slots | averages | (states or {}), dict(fed), constants or {})
    return Step(variant, inputs, run, style, warm=warm)
