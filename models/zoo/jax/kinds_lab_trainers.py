"""Kinds from laboratories by JAX, ordinary trainers: trips of taxis, pen strokes, faults of bearings."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from models.zoo.arrays import normal
from models.zoo.jax.problems import matmul
from models.zoo.jax.training import named_leaves
from models.zoo.steps import PLAIN, Arrays, Inputs, Outputs, Step, Style, kind


def affine(rows: int, columns: int) -> dict[str, np.ndarray]:
    return {"w": normal(rows, columns, scale=rows**-0.5), "b": np.zeros(columns, np.float32)}


def at(layer: Any, x: jax.Array) -> jax.Array:
    return matmul(x, layer["w"]) + layer["b"]


def flat(prefix: str, tree: Any) -> tuple[Arrays, Any]:
    tree = jax.tree.map(jnp.asarray, tree)
    return {f"{prefix}.{name}": value for name, value in named_leaves(tree).items()}, jax.tree.structure(tree)


def fit(
    variant: str, params: Any, batch: Arrays, objective: Any, tx: optax.GradientTransformation, style: Style,
    fed: Arrays | None = None, scale: Any = None,
) -> Step:  # fmt: skip
    """Return the step `jit(update)` of a script by optax; `scale` multiplies the updates by what is fed."""
    weights, shape = flat("params", params)
    slots, of_state = flat("opt", tx.init(jax.tree.map(jnp.asarray, params)))

    def run(values: Arrays) -> Outputs:
        p = jax.tree.unflatten(shape, [values[name] for name in weights])
        state = jax.tree.unflatten(of_state, [values[name] for name in slots])
        (loss, metrics), grads = jax.value_and_grad(objective, has_aux=True)(p, values)
        updates, state = tx.update(grads, state, p)
        if scale is not None:
            updates = jax.tree.map(lambda update: update * scale(values), updates)
        p = optax.apply_updates(p, updates)
        following = dict(zip([*weights, *slots], [*jax.tree.leaves(p), *jax.tree.leaves(state)], strict=True))
        return Outputs({"loss": loss}, metrics, states=following)

    return Step(variant, Inputs(batch, weights | slots, fed or {}), run, style, warm=3)


@kind("lab-jax-taxi-trips", "jax")
def taxi_trips() -> Iterator[Step]:
    """Durations and fares of taxi trips from zones and hours: two weighted terms; Adam, Adagrad."""
    params = {"zones": normal(15, 6, scale=0.3), "hours": normal(24, 3, scale=0.3), "first": affine(17, 20)}
    params |= {"second": affine(20, 12), "minutes": affine(12, 1), "fare": affine(12, 1)}
    batch = {
        "origin": np.random.randint(0, 15, 9).astype(np.int32),
        "goal": np.random.randint(0, 15, 9).astype(np.int32),
    }
    batch |= {"hour": np.random.randint(0, 24, 9).astype(np.int32), "weather": normal(9, 2)}
    batch |= {"log_minutes": normal(9), "log_fare": normal(9)}

    def rows(table: jax.Array, index: jax.Array) -> jax.Array:
        return matmul(jax.nn.one_hot(index, table.shape[0]), table)

    def objective(p: Any, values: Arrays) -> tuple[jax.Array, Arrays]:
        places = [rows(p["zones"], values["origin"]), rows(p["zones"], values["goal"])]
        x = jnp.concatenate([*places, rows(p["hours"], values["hour"]), values["weather"]], 1)
        x = jax.nn.leaky_relu(at(p["second"], jax.nn.leaky_relu(at(p["first"], x))))
        minutes = jnp.square(at(p["minutes"], x)[:, 0] - values["log_minutes"])
        fare = jnp.abs(at(p["fare"], x)[:, 0] - values["log_fare"])
        terms = {"minutes_loss": jnp.mean(minutes), "fare_loss": jnp.mean(fare)}
        return 0.6 * terms["minutes_loss"] + 0.4 * terms["fare_loss"], terms

    yield fit("adam", params, batch, objective, optax.adam(2e-3), Style(names="exporter"))
    tx = optax.chain(optax.clip_by_global_norm(2.0), optax.adagrad(0.05))
    yield fit("adagrad", params, batch, objective, tx, Style(shapes="interface"))


@kind("lab-jax-pen-strokes", "jax")
def pen_strokes() -> Iterator[Step]:
    """The next movement of a pen by a mixture of Gaussians after a recurrent network: RMSprop, AdaMax."""
    params = {
        "input": affine(3, 12),
        "recurrent": normal(12, 12, scale=0.28),
        "mixture": affine(12, 4 * 5),
        "up": affine(12, 1),
    }
    lifted = (np.random.rand(4, 7, 1) > 0.8).astype(np.float32)
    batch = {"strokes": np.concatenate([normal(4, 7, 2, scale=0.5), lifted], 2)}

    def objective(p: Any, values: Arrays) -> tuple[jax.Array, Arrays]:
        h, fits, lifts = jnp.zeros((4, 12), jnp.float32), [], []
        for index in range(6):
            h = jnp.tanh(at(p["input"], values["strokes"][:, index]) + matmul(h, p["recurrent"]))
            share, *moments = jnp.split(at(p["mixture"], h), 5, 1)
            log_share = jax.nn.log_softmax(share)
            x, y = values["strokes"][:, index + 1, 0:1], values["strokes"][:, index + 1, 1:2]
            log_x, log_y = jnp.clip(moments[2], -3.0, 3.0), jnp.clip(moments[3], -3.0, 3.0)
            each = jnp.square((x - moments[0]) * jnp.exp(-log_x)) + jnp.square((y - moments[1]) * jnp.exp(-log_y))
            density = log_share - 0.5 * each - log_x - log_y - 1.8379
            peak = jax.lax.stop_gradient(jnp.max(density, 1, keepdims=True))
            fits.append(-jnp.mean(peak[:, 0] + jnp.log(jnp.sum(jnp.exp(density - peak), 1))))
            logit, up = at(p["up"], h), values["strokes"][:, index + 1, 2:]
            lifts.append(jnp.mean(jax.nn.softplus(logit) - up * logit))
        fit, lift = sum(fits) / 6, sum(lifts) / 6
        return fit + lift, {"stroke_nll": fit, "pen_loss": lift}

    fed = {"lr": np.float32(1e-3)}
    tx = optax.chain(optax.clip(5.0), optax.scale_by_rms(0.95, 1e-4))
    yield fit("rmsprop", params, batch, objective, tx, PLAIN, fed, lambda values: -values["lr"])
    yield fit("adamax", params, batch, objective, optax.adamax(1e-3), Style(names="exporter", order="shuffled"))


@kind("lab-jax-bearing-faults", "jax")
def bearing_faults() -> Iterator[Step]:
    """Faults of bearings from windows of vibration: smoothed labels, Nesterov with cosine restarts; NovoGrad."""
    params = {
        "window": affine(10, 14),
        "mix": affine(14, 14),
        "norm": {"g": np.ones(14, np.float32)},
        "out": affine(14, 5),
    }
    batch = {"vibration": normal(6, 40), "fault": np.random.randint(0, 5, 6).astype(np.int32)}

    def objective(p: Any, values: Arrays) -> tuple[jax.Array, Arrays]:
        x = jax.nn.relu(at(p["window"], values["vibration"].reshape(24, 10)))
        x = x + jax.nn.relu(
            at(p["mix"], x / jnp.sqrt(jnp.mean(jnp.square(x), 1, keepdims=True) + 1e-5) * p["norm"]["g"])
        )
        logits = at(p["out"], jnp.mean(x.reshape(6, 4, 14), 1))
        target = optax.smooth_labels(jax.nn.one_hot(values["fault"], 5), 0.1)
        loss = -jnp.mean(jnp.sum(target * jax.nn.log_softmax(logits), 1))
        right = jnp.argmax(jax.lax.stop_gradient(logits), 1) == values["fault"]
        confidence = jnp.mean(jnp.max(jax.nn.softmax(jax.lax.stop_gradient(logits)), 1))
        return loss, {"accuracy": jnp.mean(right.astype(jnp.float32)), "confidence": confidence}

    def rate(count: jax.Array) -> jax.Array:
        part = jnp.mod(jnp.asarray(count, jnp.float32), 40.0) / 40.0
        return 0.05 * 0.5 * (1 + jnp.cos(jnp.pi * part))

    tx = optax.chain(optax.add_decayed_weights(1e-4), optax.sgd(rate, momentum=0.9, nesterov=True))
    yield fit("restarts", params, batch, objective, tx, Style(names="exporter"))
    style = Style(names="scrambled", states="initializers")
    yield fit("novograd", params, batch, objective, optax.novograd(5e-3, weight_decay=1e-3), style)
