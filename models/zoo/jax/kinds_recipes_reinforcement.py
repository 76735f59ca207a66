"""Kinds by JAX that learn from rewards, or in a population: what they normalize, copy and rescale is carried."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from models.zoo.arrays import normal
from models.zoo.jax.kinds_recipes import EXPORTER, Metrics, advance, carried, labels, layer, linear, mlp, stack
from models.zoo.steps import PLAIN, STYLES, Arrays, Inputs, Outputs, Step, Style, kind


def merge(mean: jax.Array, var: jax.Array, count: jax.Array, rows: jax.Array) -> tuple[jax.Array, ...]:
    """Return the mean, the variance and the count with more rows, by the formula for two groups."""
    more = rows.shape[0]
    total = count + more
    gap = jnp.mean(rows, 0) - mean
    squares = var * count + jnp.var(rows, 0) * more + jnp.square(gap) * count * more / total
    return mean + gap * more / total, squares / total, total


def proximal(variant: str, style: Style, *, continuous: bool) -> Step:
    """Return a clipped policy gradient; observations and returns are normalized by statistics of all that was seen."""
    actions, rows = (2, 8) if continuous else (4, 8)
    params = {"trunk": stack(6, 16, 11), "policy": layer(11, actions), "value": layer(11, 1)}
    params |= {"log_std": normal(actions, scale=0.1)} if continuous else {}
    optimizer = optax.scale_by_adam(eps=1e-5) if continuous else optax.adam(2e-3, eps=1e-5)
    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optimizer)
    weights, slots = carried(params), carried(optimizer.init(jax.tree.map(jnp.asarray, params)))

    def objective(params: Any, values: Arrays, seen: jax.Array, returns: jax.Array) -> tuple[jax.Array, Metrics]:
        hidden = jnp.tanh(mlp(params["trunk"], seen, jnp.tanh))
        made, value = linear(params["policy"], hidden), linear(params["value"], hidden)[:, 0]
        if continuous:
            scaled = (values["action"] - made) * jnp.exp(-params["log_std"])
            log_prob = -jnp.sum(0.5 * jnp.square(scaled) + params["log_std"] + 0.5 * np.log(2 * np.pi), -1)
            entropy = jnp.sum(params["log_std"] + 0.5 * np.log(2 * np.pi * np.e))
        else:
            logs = jax.nn.log_softmax(made)
            log_prob = jnp.sum(jax.nn.one_hot(values["action"], actions) * logs, -1)
            entropy = -jnp.mean(jnp.sum(jnp.exp(logs) * logs, -1))
        gain = (values["advantage"] - jnp.mean(values["advantage"])) / (jnp.std(values["advantage"]) + 1e-8)
        change = log_prob - values["old_log_prob"]
        ratio = jnp.exp(change)
        policy = -jnp.mean(jnp.minimum(ratio * gain, jnp.clip(ratio, 0.8, 1.2) * gain))
        fit = 0.5 * jnp.mean(jnp.square(value - returns))
        metrics = {"policy_loss": policy, "value_loss": fit, "entropy": entropy}
        metrics |= {"approximate_kl": jnp.mean(ratio - 1 - change)}
        clipped = (jnp.abs(jax.lax.stop_gradient(ratio) - 1) > 0.2).astype(jnp.float32)
        return policy + 0.5 * fit - 0.01 * entropy, metrics | {"clip_fraction": jnp.mean(clipped)}

    def run(values: Arrays) -> Outputs:
        params, states = weights.read(values), {}
        for name, rows in {"obs": values["observation"], "ret": values["return"]}.items():
            old = (values[f"{name}_{part}"] for part in ("mean", "var", "count"))
            states |= dict(zip((f"{name}_{part}" for part in ("mean", "var", "count")), merge(*old, rows), strict=True))
        seen = (values["observation"] - states["obs_mean"]) * jax.lax.rsqrt(states["obs_var"] + 1e-8)
        returns = (values["return"] - states["ret_mean"]) * jax.lax.rsqrt(states["ret_var"] + 1e-8)
        made = jax.value_and_grad(objective, has_aux=True)(params, values, jnp.clip(seen, -5, 5), returns)
        (loss, metrics), grads = made
        updates, state = optimizer.update(grads, slots.read(values), params)
        if continuous:
            kl, rate = metrics["approximate_kl"], values["learning_rate"]
            rate = jnp.where(kl > 0.02, rate / 1.5, jnp.where(kl < 0.005, rate * 1.5, rate))
            states["learning_rate"] = jnp.clip(rate, 1e-5, 1e-2)
            updates = jax.tree.map(lambda update: -states["learning_rate"] * update, updates)
        states |= weights.write(optax.apply_updates(params, updates)) | slots.write(state)
        return Outputs({"loss": loss}, metrics, states=states)

    batch = {"observation": 2 * normal(rows, 6) + 1, "advantage": normal(rows), "return": 3 * normal(rows) + 1}
    batch |= {"action": normal(rows, actions) if continuous else labels(actions, rows)}
    batch |= {"old_log_prob": normal(rows, scale=0.2) - (2.6 if continuous else 1.4)}
    states = {"obs_mean": normal(6, scale=0.1), "obs_var": np.ones(6, np.float32), "obs_count": np.float32(10)}
    states |= {"ret_mean": np.float32(0.2), "ret_var": np.float32(1.5), "ret_count": np.float32(10)}
    states |= {"learning_rate": np.float32(1e-3)} if continuous else {}
    return Step(variant, Inputs(batch, weights.values | slots.values | states), run, style)


@kind("jax-normalised-policy", "jax")
def normalised_policy() -> Iterator[Step]:
    """Yield proximal policy steps with running statistics of observations and returns, and a rate led by divergence."""
    yield proximal("discrete", PLAIN, continuous=False)
    yield proximal("continuous", STYLES["scrambled"], continuous=True)


def duelling(optimizer: optax.GradientTransformation, variant: str, style: Style, *, polyak: bool) -> Step:
    """Return double Q-learning with weighted rows; the target follows slowly, or is copied every fourth step."""
    params = {"trunk": stack(5, 12, 8), "advantage": layer(8, 3), "value": layer(8, 1)}
    weights, slots = carried(params), carried(optimizer.init(jax.tree.map(jnp.asarray, params)))
    target = carried(jax.tree.map(lambda weight: 0.9 * weight, params), "target_")

    def score(net: Any, seen: jax.Array) -> jax.Array:
        hidden = jax.nn.relu(mlp(net["trunk"], seen, jax.nn.relu))
        gain = linear(net["advantage"], hidden)
        return linear(net["value"], hidden) + gain - jnp.mean(gain, -1, keepdims=True)

    def objective(params: Any, slow: Any, values: Arrays) -> tuple[jax.Array, jax.Array]:
        best = jnp.argmax(jax.lax.stop_gradient(score(params, values["after"])), -1)
        ahead = jnp.sum(score(slow, values["after"]) * jax.nn.one_hot(best, 3), -1)
        wanted = jax.lax.stop_gradient(values["reward"] + 0.97 * (1 - values["done"]) * ahead)
        miss = jnp.sum(score(params, values["seen"]) * jax.nn.one_hot(values["action"], 3), -1) - wanted
        return jnp.mean(values["importance"] * optax.huber_loss(miss)), miss

    def run(values: Arrays) -> Outputs:
        params, slow = weights.read(values), target.read(values)
        (loss, miss), grads = jax.value_and_grad(objective, has_aux=True)(params, slow, values)
        params, state = advance(optimizer, grads, slots.read(values), params)
        count = values["updates"] + 1
        if polyak:
            slow = optax.incremental_update(params, slow, 0.01)
        else:
            slow = jax.tree.map(lambda new, old: jnp.where(count % 4 == 0, new, old), params, slow)
        metrics = {"td_error": miss, "priority": jnp.abs(miss) ** 0.6}
        metrics["exploration"] = jnp.maximum(0.05, 1 - count.astype(jnp.float32) / 50)
        states = weights.write(params) | slots.write(state) | target.write(slow) | {"updates": count}
        return Outputs({"loss": loss}, metrics, states=states)

    batch = {"seen": normal(6, 5), "after": normal(6, 5), "reward": normal(6), "action": labels(3, 6)}
    batch |= {"done": labels(2, 6).astype(np.float32), "importance": np.random.rand(6).astype(np.float32)}
    states = weights.values | slots.values | target.values | {"updates": np.int32(0)}
    return Step(variant, Inputs(batch, states), run, style)


@kind("jax-duelling-targets", "jax")
def duelling_targets() -> Iterator[Step]:
    """Yield duelling double Q-learning with a target by Polyak's averages or by copies, and errors of each row."""
    yield duelling(optax.adamw(2e-3, weight_decay=1e-4), "polyak", EXPORTER, polyak=True)
    yield duelling(optax.rmsprop(1e-3, decay=0.95, eps=1e-2, centered=True), "copied", PLAIN, polyak=False)


def rescaled(optimizer: optax.GradientTransformation, variant: str, style: Style, tasks: int) -> Step:
    """Return values of tasks with normalized targets; the last layer is rescaled so that its predictions stay."""
    params = {"trunk": stack(5, 12, 9), "head": layer(9, tasks)}
    weights, slots = carried(params), carried(optimizer.init(jax.tree.map(jnp.asarray, params)))

    def objective(params: Any, values: Arrays) -> tuple[jax.Array, jax.Array]:
        guess = linear(params["head"], jax.nn.relu(mlp(params["trunk"], values["x"], jax.nn.relu)))
        spread = jnp.sqrt(values["second_moment"] - jnp.square(values["mean"]))
        raw = guess * spread + values["mean"]
        wanted = (values["target"] - values["mean"]) / spread
        return jnp.mean(jnp.square(guess - wanted)), jnp.mean(jnp.abs(raw - values["target"]))

    def run(values: Arrays) -> Outputs:
        params = weights.read(values)
        (loss, error), grads = jax.value_and_grad(objective, has_aux=True)(params, values)
        params, state = advance(optimizer, grads, slots.read(values), params)
        mean = 0.95 * values["mean"] + 0.05 * jnp.mean(values["target"], 0)
        second = 0.95 * values["second_moment"] + 0.05 * jnp.mean(jnp.square(values["target"]), 0)
        old, new = (jnp.sqrt(b - jnp.square(a)) for a, b in ((values["mean"], values["second_moment"]), (mean, second)))
        head = {"kernel": params["head"]["kernel"] * (old / new)}
        head["bias"] = (old * params["head"]["bias"] + values["mean"] - mean) / new
        states = weights.write(params | {"head": head}) | slots.write(state) | {"mean": mean, "second_moment": second}
        return Outputs({"loss": loss}, {"absolute_error": error, "largest_scale": jnp.max(new)}, states=states)

    batch = {"x": normal(6, 5), "target": 3 * normal(6, tasks) + 2}
    states = {"mean": normal(tasks, scale=0.2), "second_moment": 2 + np.abs(normal(tasks))}
    return Step(variant, Inputs(batch, weights.values | slots.values | states), run, style)


@kind("jax-rescaled-head", "jax")
def rescaled_head() -> Iterator[Step]:
    """Yield adaptive normalization of targets that keeps the outputs: moments are carried, and the head is rescaled."""
    yield rescaled(optax.adam(2e-3), "tasks", EXPORTER, 3)
    yield rescaled(optax.chain(optax.clip_by_global_norm(1.0), optax.yogi(3e-3)), "one-task", STYLES["initializers"], 1)


def population(inner: optax.GradientTransformation, variant: str, style: Style, *, exploiting: bool) -> Step:
    """Return members stacked on the first axis: the worst copies the best now and then, or all are averaged."""
    count, sizes = 4, (5, 9, 3)
    members = [stack(*sizes) for _ in range(count)]
    params = jax.tree.map(lambda *parts: np.stack(parts), *members)
    weights, slots = carried(params), carried(jax.vmap(inner.init)(jax.tree.map(jnp.asarray, params)))

    def objective(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.mean(jnp.square(mlp(params, x, jnp.tanh) - y))

    def run(values: Arrays) -> Outputs:
        def one(params: Any, state: Any, rate: jax.Array, x: jax.Array, y: jax.Array) -> tuple[Any, ...]:
            loss, grads = jax.value_and_grad(objective)(params, x, y)
            updates, state = inner.update(grads, state, params)
            return jax.tree.map(lambda weight, update: weight - rate * update, params, updates), state, loss

        held = weights.read(values), slots.read(values), values["rates"]
        params, state, losses = jax.vmap(one)(*held, values["x"], values["y"])
        step, rates = values["step"] + 1, values["rates"]
        due, states = step % 3 == 0, {}
        if exploiting:
            score = 0.8 * values["score"] + 0.2 * losses
            source = jnp.where(due & (jnp.arange(count) == jnp.argmax(score)), jnp.argmin(score), jnp.arange(count))
            params, state = jax.tree.map(lambda stacked: stacked[source], (params, state))
            copied = source != jnp.arange(count)
            rates = jnp.where(copied, rates[source] * values["perturbation"], rates)
            states = {"score": jnp.where(copied, score[source], score), "rates": rates}
        else:
            params = jax.tree.map(lambda w: jnp.where(due, jnp.mean(w, 0, keepdims=True), w), params)
        metrics = {"member_losses": losses, "best_loss": jnp.min(losses)}
        states |= weights.write(params) | slots.write(state) | {"step": step}
        return Outputs({"mean_loss": jnp.mean(losses)}, metrics, states=states)

    batch, fed = {"x": normal(count, 6, 5), "y": normal(count, 6, 3)}, {}
    states = weights.values | slots.values | {"step": np.int32(0)}
    rates = np.array([0.02, 0.05, 0.01, 0.03], np.float32)
    if exploiting:
        batch |= {"perturbation": np.array([0.8, 1.2, 1.2, 0.8], np.float32)}
        states |= {"score": np.abs(normal(count)), "rates": rates}
    else:
        fed = {"rates": rates}
    return Step(variant, Inputs(batch, states, fed), run, style)


@kind("jax-stacked-population", "jax")
def stacked_population() -> Iterator[Step]:
    """Yield replicas on a leading axis, trained by vmap: a population with its own rates, and averaged local steps."""
    yield population(optax.scale_by_adam(), "exploiting", PLAIN, exploiting=True)
    yield population(optax.trace(0.9), "averaged", EXPORTER, exploiting=False)
