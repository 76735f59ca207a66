"""Kinds by JAX whose steps steer themselves: a curriculum, weights of tasks and of points, thresholds of clipping."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree

from models.zoo.arrays import normal
from models.zoo.jax.kinds_recipes import (
    EXPORTER,
    Metrics,
    accuracy,
    advance,
    carried,
    cross_entropy,
    labels,
    layer,
    linear,
    mlp,
    stack,
)
from models.zoo.jax.kinds_wrappers import scheduled
from models.zoo.steps import PLAIN, STYLES, Arrays, Inputs, Outputs, Step, Style, kind


def curriculum(optimizer: optax.GradientTransformation, variant: str, style: Style, *, levels: bool) -> Step:
    """Return classification of the examples that are easy enough: by levels that are passed, or by a growing loss."""
    params = stack(7, 14, 10, 4)
    weights, slots = carried(params), carried(optimizer.init(jax.tree.map(jnp.asarray, params)))

    def objective(params: Any, values: Arrays) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        logits = mlp(params, values["x"], jax.nn.relu)
        losses = cross_entropy(logits, values["label"])
        if levels:
            chosen = (values["difficulty"] <= (values["level"].astype(jnp.float32) + 1) / 5).astype(jnp.float32)
        else:
            chosen = jax.nn.sigmoid(5 * (values["threshold"] - jax.lax.stop_gradient(losses)))
        return jnp.sum(losses * chosen) / jnp.maximum(jnp.sum(chosen), 1.0), (logits, jnp.mean(chosen))

    def run(values: Arrays) -> Outputs:
        params = weights.read(values)
        (loss, (logits, share)), grads = jax.value_and_grad(objective, has_aux=True)(params, values)
        params, state = advance(optimizer, grads, slots.read(values), params)
        right = accuracy(logits, values["label"])
        states = weights.write(params) | slots.write(state)
        if levels:
            score, stayed = 0.7 * values["score"] + 0.3 * right, values["steps_at_level"] + 1
            up = (score > 0.3) & (stayed >= 3)
            states |= {"score": jnp.where(up, 0.0, score), "steps_at_level": jnp.where(up, 0, stayed)}
            states |= {"level": jnp.minimum(values["level"] + up.astype(jnp.int32), 4)}
        else:
            states |= {"threshold": jnp.minimum(values["threshold"] * 1.05, 6.0)}
        return Outputs({"loss": loss}, {"accuracy": right, "active_share": share}, states=states)

    batch = {"x": normal(8, 7), "label": labels(4, 8)}
    if levels:
        batch |= {"difficulty": np.linspace(0.05, 0.95, 8, dtype=np.float32)}
        more = {"score": np.float32(0.2), "steps_at_level": np.int32(1), "level": np.int32(1)}
    else:
        more = {"threshold": np.float32(1.2)}
    return Step(variant, Inputs(batch, weights.values | slots.values | more), run, style)


@kind("jax-curriculum", "jax")
def curricula() -> Iterator[Step]:
    """Yield a curriculum with levels, counters and a score that are carried, and self-paced weights of examples."""
    yield curriculum(optax.adamw(3e-3, weight_decay=0.01), "levels", PLAIN, levels=True)
    yield curriculum(optax.nadam(3e-3), "self-paced", EXPORTER, levels=False)


def tasks(optimizer: optax.GradientTransformation, variant: str, style: Style, *, rates: bool) -> Step:
    """Return three tasks weighted by how their losses fell from step to step, or by their coefficients of variation."""
    params = {"trunk": stack(8, 15, 10), "depth": layer(10, 2), "kind": layer(10, 5), "edge": layer(10, 1)}
    weights, slots = carried(params), carried(optimizer.init(jax.tree.map(jnp.asarray, params)))

    def losses_of(params: Any, values: Arrays) -> jax.Array:
        hidden = jax.nn.gelu(mlp(params["trunk"], values["x"], jax.nn.gelu))
        depth = jnp.mean(jnp.abs(linear(params["depth"], hidden) - values["depth"]))
        named = jnp.mean(cross_entropy(linear(params["kind"], hidden), values["kind"]))
        edge = optax.sigmoid_binary_cross_entropy(linear(params["edge"], hidden)[:, 0], values["edge"])
        return jnp.stack([depth, named, jnp.mean(edge)])

    def objective(params: Any, values: Arrays) -> tuple[jax.Array, tuple[jax.Array, jax.Array, Arrays]]:
        losses = losses_of(params, values)
        now = jax.lax.stop_gradient(losses)
        if rates:
            share = 3 * jax.nn.softmax(values["previous_losses"] / values["earlier_losses"] / 2.0)
            states = {"previous_losses": now, "earlier_losses": values["previous_losses"]}
        else:
            seen = values["count"] + 1
            ratio = now / values["mean_loss"]
            mean = values["mean_ratio"] + (ratio - values["mean_ratio"]) / seen
            spread = values["ratio_squares"] + (ratio - values["mean_ratio"]) * (ratio - mean)
            share = jnp.sqrt(spread / seen) / mean
            share = share / jnp.sum(share)
            states = {"count": seen, "mean_ratio": mean, "ratio_squares": spread}
            states["mean_loss"] = values["mean_loss"] + (now - values["mean_loss"]) / seen
        return jnp.sum(share * losses), (losses, share, states)

    def run(values: Arrays) -> Outputs:
        params = weights.read(values)
        (loss, (losses, share, states)), grads = jax.value_and_grad(objective, has_aux=True)(params, values)
        params, state = advance(optimizer, grads, slots.read(values), params)
        metrics = {f"{name}_loss": losses[index] for index, name in enumerate(("depth", "kind", "edge"))}
        metrics |= {"task_weights": share} if rates else {"largest_weight": jnp.max(share)}
        return Outputs({"total_loss": loss}, metrics, states=weights.write(params) | slots.write(state) | states)

    batch = {"x": normal(6, 8), "depth": normal(6, 2), "kind": labels(5, 6), "edge": labels(2, 6).astype(np.float32)}
    if rates:
        more = {"previous_losses": np.array([0.9, 1.7, 0.7], np.float32)}
        more |= {"earlier_losses": np.array([1.1, 1.8, 0.7], np.float32)}
    else:
        more = {"count": np.float32(3), "mean_ratio": np.ones(3, np.float32)}
        more |= {"mean_loss": np.array([0.9, 1.7, 0.7], np.float32)}
        more |= {"ratio_squares": np.array([0.1, 0.05, 0.02], np.float32)}
    return Step(variant, Inputs(batch, weights.values | slots.values | more), run, style)


@kind("jax-task-weights", "jax")
def task_weights() -> Iterator[Step]:
    """Yield three tasks whose weights come from their losses of the last two steps, or from running statistics."""
    yield tasks(optax.adam(2e-3), "rates-of-change", EXPORTER, rates=True)
    yield tasks(optax.sgd(0.03, momentum=0.9), "variation", STYLES["scrambled-bare"], rates=False)


def thresholds(optimizer: optax.GradientTransformation, variant: str, style: Style, *, history: int) -> Step:
    """Return a step whose gradients are clipped by the norms of the steps before: a quantile, or a bound on spikes."""
    params = {"trunk": stack(6, 12, 8, 10), "head": layer(10, 3, bias=False)}
    weights, slots = carried(params), carried(optimizer.init(jax.tree.map(jnp.asarray, params)))

    def objective(params: Any, values: Arrays) -> jax.Array:
        guess = linear(params["head"], jnp.tanh(mlp(params["trunk"], values["x"], jnp.tanh)))
        return jnp.mean(optax.log_cosh(guess, values["y"]))

    def run(values: Arrays) -> Outputs:
        params = weights.read(values)
        loss, grads = jax.value_and_grad(objective)(params, values)
        norm = optax.global_norm(grads)
        if history:
            norms = values["norm_history"].at[values["slot"]].set(norm)
            bound = jnp.quantile(norms, 0.4)
            states = {"norm_history": norms, "slot": (values["slot"] + 1) % history}
        else:
            spread = jnp.sqrt(values["norm_var"])
            bound = values["norm_mean"] + 1.5 * spread
            held = jnp.minimum(norm, bound)
            mean = 0.9 * values["norm_mean"] + 0.1 * held
            states = {"norm_mean": mean, "norm_var": 0.9 * values["norm_var"] + 0.1 * jnp.square(held - mean)}
            states["spikes"] = values["spikes"] + (norm > bound).astype(jnp.int32)
        factor = jnp.minimum(1.0, bound / (norm + 1e-6))
        grads = jax.tree.map(lambda grad: grad * factor, grads)
        updates, state = optimizer.update(grads, slots.read(values), params)
        if not history:
            updates = jax.tree.map(lambda update: -values["learning_rate"] * update, updates)
        states |= weights.write(optax.apply_updates(params, updates)) | slots.write(state)
        shown = {f"grad_{name}": grad for name, grad in weights.write(grads).items()} if history else {}
        return Outputs({"loss": loss}, {"grad_norm": norm, "clip_threshold": bound}, shown, states)

    if history:
        more = {"norm_history": np.linspace(0.2, 1.4, history, dtype=np.float32), "slot": np.int32(history - 2)}
    else:
        more = {"norm_mean": np.float32(0.6), "norm_var": np.float32(0.04), "spikes": np.int32(2)}
    batch, fed = {"x": normal(7, 6), "y": normal(7, 3)}, {} if history else {"learning_rate": np.float32(0.1)}
    return Step(variant, Inputs(batch, weights.values | slots.values | more, fed), run, style)


@kind("jax-clip-by-history", "jax")
def clip_by_history() -> Iterator[Step]:
    """Yield clipping by a quantile of a ring of norms, or by their running mean and variance with a count of spikes."""
    yield thresholds(optax.adam(2e-3), "quantile", EXPORTER, history=10)
    decayed = optax.chain(optax.add_decayed_weights(1e-3), optax.trace(0.9))
    yield thresholds(decayed, "spikes", STYLES["bare"], history=0)


def physics(optimizer: optax.GradientTransformation, variant: str, style: Style, *, inverse: bool) -> Step:
    """Return a network for an equation as one flat vector, with a weight of each point that follows its residual."""
    first: Arrays = stack(2, 10, 8, 1)
    first |= {"log_viscosity": np.float32(-1.0)} if inverse else {}
    vector, unravel = ravel_pytree(jax.tree.map(jnp.asarray, first))
    slots = carried(optimizer.init(vector), "opt_")

    def solution(params: Any, t: jax.Array, x: jax.Array) -> jax.Array:
        h = jnp.stack([t, x])
        for index in range(3):
            h = jnp.sum(params[f"dense_{index}"]["kernel"] * h[:, None], 0) + params[f"dense_{index}"]["bias"]
            h = jnp.tanh(h) if index < 2 else h
        return h[0]

    def residual(params: Any, t: jax.Array, x: jax.Array) -> jax.Array:
        slope = jax.grad(solution, 2)
        bend = jax.grad(slope, 2)(params, t, x)
        viscosity = jnp.exp(params["log_viscosity"]) if inverse else 0.1
        return jax.grad(solution, 1)(params, t, x) + solution(params, t, x) * slope(params, t, x) - viscosity * bend

    def objective(vector: jax.Array, values: Arrays) -> tuple[jax.Array, tuple[jax.Array, Metrics]]:
        params = unravel(vector)
        missed = jax.vmap(lambda point: residual(params, point[0], point[1]))(values["inner"])
        known = jax.vmap(lambda point: solution(params, point[0], point[1]))(values["border"])
        border = jnp.mean(jnp.square(known - values["border_value"]))
        inner = jnp.mean(jnp.square(values["point_weight"] * missed))
        metrics = {"residual": jnp.mean(jnp.square(missed)), "border_error": border}
        return inner + 10 * border, (missed, metrics)

    def run(values: Arrays) -> Outputs:
        (loss, (missed, metrics)), grad = jax.value_and_grad(objective, has_aux=True)(values["theta"], values)
        theta, state = advance(optimizer, grad, slots.read(values), values["theta"])
        size = jnp.abs(missed)
        weight = 0.99 * values["point_weight"] + 0.05 * size / jnp.max(size)
        states = {"theta": theta, "point_weight": weight} | slots.write(state)
        return Outputs({"loss": loss}, metrics, {"grad_theta": grad} if inverse else {}, states)

    batch = {"inner": np.random.rand(9, 2).astype(np.float32), "border": np.random.rand(6, 2).astype(np.float32)}
    states = {"theta": np.asarray(vector), "point_weight": np.full(9, 0.5, np.float32)} | slots.values
    return Step(variant, Inputs(batch | {"border_value": normal(6)}, states), run, style)


@kind("jax-flat-physics", "jax")
def flat_physics() -> Iterator[Step]:
    """Yield an equation's network whose weights are one vector, with weights of points that are carried averages."""
    yield physics(optax.adam(scheduled(optax.exponential_decay, 5e-3, 20, 0.9)), "forward", PLAIN, inverse=False)
    yield physics(optax.chain(optax.clip(1.0), optax.amsgrad(3e-3)), "inverse", EXPORTER, inverse=True)
