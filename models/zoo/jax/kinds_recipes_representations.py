"""Kinds by JAX that learn or adapt representations: towers, a support set, groups of layers, best weights, a graph."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from models.zoo.arrays import normal
from models.zoo.jax.kinds_recipes import (
    EXPORTER,
    Metrics,
    accuracy,
    advance,
    carried,
    cross_entropy,
    fit,
    labels,
    layer,
    linear,
    mlp,
    stack,
)
from models.zoo.jax.problems import matmul
from models.zoo.steps import PLAIN, STYLES, Arrays, Inputs, Outputs, Step, Style, kind


def unit(x: jax.Array) -> jax.Array:
    """Divide rows by their length."""
    return x * jax.lax.rsqrt(jnp.sum(jnp.square(x), -1, keepdims=True) + 1e-6)


def by_name(params: dict[str, Any]) -> dict[str, Any]:
    """Return for each weight the name of its part of the network."""
    return {name: jax.tree.map(lambda _, name=name: name, part) for name, part in params.items()}


def is_body(params: dict[str, Any]) -> dict[str, Any]:
    """Return for each weight whether it is in the body."""
    return jax.tree.map(lambda name: name == "body", by_name(params))


def two_towers(optimizer: optax.GradientTransformation, variant: str, style: Style, *, corrected: bool) -> Step:
    """Return two towers with a learnt temperature; corrected by the items' frequencies, as their last steps tell."""
    params = {"query": stack(7, 12, 5), "item": stack(10, 14, 9, 5), "log_scale": np.float32(1.5)}
    weights, slots = carried(params), carried(optimizer.init(jax.tree.map(jnp.asarray, params)))
    buckets, rows = 11, 6

    def objective(params: Any, values: Arrays, interval: jax.Array) -> tuple[jax.Array, Metrics]:
        query, item = (unit(mlp(params[name], values[name], jax.nn.relu)) for name in ("query", "item"))
        logits = matmul(query, item.T) * jnp.exp(params["log_scale"])
        if corrected:
            logits = logits + jnp.log(interval)[None, :]
        own = jnp.arange(rows)
        losses = cross_entropy(logits, own) + (0 if corrected else cross_entropy(logits.T, own))
        return jnp.mean(losses) / (1 if corrected else 2), {"recall_at_1": accuracy(logits, own)}

    def run(values: Arrays) -> Outputs:
        params, interval, states = weights.read(values), jnp.ones(rows), {}
        if corrected:
            bucket, now = values["item_bucket"], values["step"] + 1
            gap = (now - values["last_seen"][bucket]).astype(jnp.float32)
            interval = 0.9 * values["interval"][bucket] + 0.1 * gap
            states = {"last_seen": values["last_seen"].at[bucket].set(now), "step": now}
            states["interval"] = values["interval"].at[bucket].set(interval)
        (loss, metrics), grads = jax.value_and_grad(objective, has_aux=True)(params, values, interval)
        metrics["temperature"] = jnp.exp(-params["log_scale"])
        params, state = advance(optimizer, grads, slots.read(values), params)
        params = params | {"log_scale": jnp.clip(params["log_scale"], 0.0, np.log(100.0))}
        return Outputs({"loss": loss}, metrics, states=weights.write(params) | slots.write(state) | states)

    batch, states = {"query": normal(rows, 7), "item": normal(rows, 10)}, weights.values | slots.values
    if corrected:
        batch |= {"item_bucket": np.random.permutation(buckets)[:rows].astype(np.int32)}
        states |= {"last_seen": np.zeros(buckets, np.int32), "interval": np.full(buckets, 4, np.float32)}
        states |= {"step": np.int32(5)}
    return Step(variant, Inputs(batch, states), run, style)


@kind("jax-two-towers", "jax")
def towers() -> Iterator[Step]:
    """Yield contrastive towers with a rule for each tower and the temperature, and with estimated frequencies."""
    rules = {"query": optax.adamw(3e-3), "item": optax.adamw(2e-3), "log_scale": optax.sgd(0.05, momentum=0.9)}
    yield two_towers(optax.multi_transform(rules, by_name), "two-rules", PLAIN, corrected=False)
    yield two_towers(optax.adagrad(0.05), "frequencies", EXPORTER, corrected=True)


def neighbours(optimizer: optax.GradientTransformation, variant: str, style: Style, *, ring: bool) -> Step:
    """Return contrastive learning with the nearest neighbour of a view among embeddings that are kept."""
    rows, size, kept = 4, 5, 12
    params = {"encoder": stack(9, 14, size), "predictor": stack(size, 8, size)}
    weights, slots = carried(params), carried(optimizer.init(jax.tree.map(jnp.asarray, params)))

    def objective(params: Any, values: Arrays) -> tuple[jax.Array, tuple[jax.Array, Metrics]]:
        first, second = (mlp(params["encoder"], values[name], jax.nn.relu) for name in ("view_a", "view_b"))
        key = jax.lax.stop_gradient(unit(first))
        near = jnp.argmax(matmul(key, values["support"].T), -1)
        neighbour = values["support"][near]
        guess = unit(mlp(params["predictor"], second, jax.nn.relu))
        logits = matmul(neighbour, guess.T) / 0.2
        closeness = jnp.mean(jnp.sum(neighbour * key, -1))
        metrics = {"neighbour_similarity": closeness, "matched": accuracy(logits, jnp.arange(rows))}
        return jnp.mean(cross_entropy(logits, jnp.arange(rows))), (key, metrics)

    def run(values: Arrays) -> Outputs:
        params = weights.read(values)
        (loss, (key, metrics)), grads = jax.value_and_grad(objective, has_aux=True)(params, values)
        params, state = advance(optimizer, grads, slots.read(values), params)
        if ring:
            support = jax.lax.dynamic_update_slice(values["support"], key, (values["pointer"], 0))
            states = {"support": support, "pointer": (values["pointer"] + rows) % kept}
        else:
            states = {"support": jnp.concatenate([key, values["support"][:-rows]])}
        return Outputs({"loss": loss}, metrics, states=weights.write(params) | slots.write(state) | states)

    support = normal(kept, size)
    states = weights.values | slots.values | {"support": support / np.linalg.norm(support, axis=1, keepdims=True)}
    states |= {"pointer": np.int32(0)} if ring else {}
    return Step(variant, Inputs({"view_a": normal(rows, 9), "view_b": normal(rows, 9)}, states), run, style)


@kind("jax-neighbour-support", "jax")
def neighbour_support() -> Iterator[Step]:
    """Yield a support set of embeddings, as a ring with a pointer and as a queue, that gives the positives."""
    yield neighbours(optax.lars(0.1, weight_decay=1e-4), "ring", EXPORTER, ring=True)
    yield neighbours(optax.adamw(3e-3), "queue", STYLES["scrambled-bare"], ring=False)


@kind("jax-layerwise-finetune", "jax")
def layerwise() -> Iterator[Step]:
    """Yield fine-tuning: frozen, slow and fast layers by three rules of a transform, and a pull to where they began."""
    params = {"stem": layer(8, 12), "body": stack(12, 16, 9), "head": layer(9, 5)}
    began = carried(jax.tree.map(lambda weight: weight + 0.05, params["body"]), "pretrained_body_")

    def objective(params: Any, values: Arrays) -> tuple[jax.Array, Metrics]:
        stem = params["stem"] if "stem" in params else {name: values[f"stem_{name}"] for name in ("kernel", "bias")}
        hidden = mlp(params["body"], jnp.tanh(linear(stem, values["x"])), jnp.tanh)
        logits = linear(params["head"], jnp.tanh(hidden))
        change = jax.tree.map(lambda now, then: jnp.sum(jnp.square(now - then)), params["body"], began.read(values))
        drift = sum(jax.tree.leaves(change))
        loss = jnp.mean(cross_entropy(logits, values["label"]))
        return loss + 0.05 * drift, {"drift": drift, "accuracy": accuracy(logits, values["label"])}

    rules = {
        "stem": optax.set_to_zero(),
        "body": optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-3)),
        "head": optax.sgd(0.1, momentum=0.9, nesterov=True),
    }

    batch = {"x": normal(6, 8), "label": labels(5, 6)}
    grouped = optax.multi_transform(rules, by_name)
    yield fit("frozen-by-rule", params, grouped, batch, objective, constants=began.values)
    trained = {name: params[name] for name in ("body", "head")}
    stem = {f"stem_{name}": value for name, value in params["stem"].items()}
    slower = optax.chain(optax.scale_by_adam(), optax.masked(optax.scale(0.1), is_body), optax.scale(-3e-3))
    yield fit("frozen-outside", trained, slower, batch, objective, STYLES["overridable"], constants=began.values | stem)


def patient(optimizer: optax.GradientTransformation, variant: str, style: Style, *, restoring: bool) -> Step:
    """Return a step that keeps the best weights, the best loss, and the steps since; then slows down, or goes back."""
    params = {"trunk": stack(6, 13, 8), "head": layer(8, 2)}
    weights, slots = carried(params), carried(optimizer.init(jax.tree.map(jnp.asarray, params)))
    best = carried(jax.tree.map(lambda weight: 0.95 * weight, params), "best_")

    def objective(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        guess = linear(params["head"], jax.nn.silu(mlp(params["trunk"], x, jax.nn.silu)))
        return jnp.mean(optax.huber_loss(guess, y))

    def run(values: Arrays) -> Outputs:
        params = weights.read(values)
        loss, grads = jax.value_and_grad(objective)(params, values["x"], values["y"])
        updates, state = optimizer.update(grads, slots.read(values), params)
        params = jax.tree.map(lambda weight, update: weight + values["rate_scale"] * update, params, updates)
        valid = objective(params, values["x_valid"], values["y_valid"])
        better = valid < values["best_loss"] - 1e-4
        kept = jax.tree.map(lambda new, old: jnp.where(better, new, old), params, best.read(values))
        waited = jnp.where(better, 0, values["bad_steps"] + 1)
        due = waited >= 3
        if restoring:
            params = jax.tree.map(lambda old, new: jnp.where(due, old, new), kept, params)
        states = weights.write(params) | slots.write(state) | best.write(kept)
        states |= {"best_loss": jnp.where(better, valid, values["best_loss"]), "bad_steps": jnp.where(due, 0, waited)}
        states |= {"rate_scale": jnp.where(due, 0.5, 1.0) * values["rate_scale"], "step": values["step"] + 1}
        states |= {"best_step": jnp.where(better, values["step"], values["best_step"])}
        metrics = {"valid_loss": valid, "stop": (values["step"] - states["best_step"] > 8).astype(jnp.float32)}
        return Outputs({"train_loss": loss}, metrics, states=states)

    batch = {"x": normal(7, 6), "y": normal(7, 2), "x_valid": normal(5, 6), "y_valid": normal(5, 2)}
    states = weights.values | slots.values | best.values | {"best_loss": np.float32(2), "bad_steps": np.int32(1)}
    states |= {"rate_scale": np.float32(1), "best_step": np.int32(4), "step": np.int32(6)}
    return Step(variant, Inputs(batch, states), run, style)


@kind("jax-best-weights", "jax")
def best_weights() -> Iterator[Step]:
    """Yield the best weights, loss and step on other data, and bad steps, whose count lowers the rate or restores."""
    yield patient(optax.adam(3e-3), "slower", EXPORTER, restoring=False)
    yield patient(optax.sgd(0.1, momentum=0.9), "restoring", PLAIN, restoring=True)


@kind("jax-graph-nodes", "jax")
def graph_nodes() -> Iterator[Step]:
    """Yield graph convolutions with masked nodes: a loss on some, metrics on the others; and a perturbed pass."""

    def parts(params: Any, values: Arrays, mask: jax.Array) -> tuple[jax.Array, jax.Array]:
        hidden = jax.nn.relu(matmul(values["adjacency"], linear(params["gcn_0"], values["features"])))
        logits = matmul(values["adjacency"], linear(params["gcn_1"], hidden))
        right = (jnp.argmax(jax.lax.stop_gradient(logits), -1) == values["label"]).astype(jnp.float32)
        share = mask / jnp.sum(mask)
        return jnp.sum(cross_entropy(logits, values["label"]) * share), jnp.sum(right * share)

    def objective(params: Any, values: Arrays) -> tuple[jax.Array, Metrics]:
        loss, right = parts(params, values, values["train_mask"])
        valid_loss, valid = parts(params, values, 1 - values["train_mask"])
        penalty = 5e-3 * jnp.sum(jnp.square(params["gcn_0"]["kernel"]))
        return loss + penalty, {"train_accuracy": right, "valid_accuracy": valid, "valid_loss": valid_loss}

    near = (np.random.rand(9, 9) < 0.3) + np.eye(9)
    near = ((near + near.T) > 0).astype(np.float32)
    batch = {"adjacency": near / np.sqrt(near.sum(0)[:, None] * near.sum(1)), "features": normal(9, 7)}
    batch |= {"label": labels(4, 9), "train_mask": (np.arange(9) < 5).astype(np.float32)}
    params = {"gcn_0": layer(7, 11, bias=False), "gcn_1": layer(11, 4, bias=False)}
    yield fit("adam", params, optax.adam(0.01), batch, objective)
    flatter = optax.chain(optax.add_decayed_weights(1e-3), optax.sgd(0.1, momentum=0.9))
    yield fit("flatter", params, flatter, batch, objective, Style(names="exporter", order="shuffled"), sharpness=0.05)
