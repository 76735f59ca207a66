"""Kinds from the field by JAX: robots, policies, anomalies, graphs, physics."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import optax

from models.zoo.arrays import normal
from models.zoo.jax.field_parts import apply, global_norm, labels, linear, one_hot, one_step
from models.zoo.jax.problems import matmul
from models.zoo.steps import Arrays, Step, Style, kind

EXPORTER = Style(names="exporter")
Parts = tuple[jax.Array, tuple[Arrays, Arrays]]


@kind("field-behaviour-cloning", "jax")
def behaviour_cloning() -> Iterator[Step]:
    """A robot's actions from demonstrations: Gaussian likelihood, normalized observations; Adam clipped, Nesterov."""
    weights = linear("trunk1", 13, 24) | linear("trunk2", 24, 18) | linear("action", 18, 4)
    weights |= {"log_std": np.full(4, -0.5, np.float32)}
    batch = {"observation": normal(8, 13), "expert_action": normal(8, 4, scale=0.5)}
    constants = {"obs_mean": normal(13, scale=0.2), "obs_std": np.abs(normal(13)) + np.float32(0.5)}

    def objective(w: Arrays, values: Arrays) -> Parts:
        x = jnp.clip((values["observation"] - values["obs_mean"]) / values["obs_std"], -5.0, 5.0)
        x = jax.nn.relu(apply(w, "trunk2", jax.nn.relu(apply(w, "trunk1", x))))
        mean, log_std = jnp.tanh(apply(w, "action", x)), jnp.clip(w["log_std"], -3.0, 1.0)
        error = values["expert_action"] - mean
        likelihood = -0.5 * jnp.square(error * jnp.exp(-log_std)) - log_std - 0.919
        metrics = {"action_mse": jnp.mean(jnp.square(error)), "policy_std": jnp.mean(jnp.exp(log_std))}
        return -jnp.mean(jnp.sum(likelihood, 1)), (metrics, {})

    def norms(grads: Arrays, values: Arrays) -> Arrays:
        return {"grad_norm": global_norm(grads), "param_norm": global_norm({name: values[name] for name in weights})}

    clipped = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))
    yield one_step("adam", weights, batch, objective, clipped, constants=constants, report=norms, loss_name="nll")
    fast = optax.chain(optax.clip(0.2), optax.add_decayed_weights(1e-4), optax.sgd(0.02, 0.9, nesterov=True))
    yield one_step("nesterov", weights, batch, objective, fast, EXPORTER, constants=constants, ema=0.995)


@kind("field-policy-baseline", "jax")
def policy_baseline() -> Iterator[Step]:
    """Policy gradient with a value baseline: returns scaled by carried moments, an entropy bonus that is fed."""
    weights = linear("shared", 9, 20) | linear("policy", 20, 5) | linear("value", 20, 1)
    batch = {"state": normal(10, 9), "action": labels(5, 10), "return": normal(10, scale=2.0)}
    moments = {"return_mean": np.float32(0.0), "return_square": np.float32(1.0)}

    def objective(w: Arrays, values: Arrays) -> Parts:
        hidden = jnp.tanh(apply(w, "shared", values["state"]))
        log_p = jax.nn.log_softmax(apply(w, "policy", hidden))
        value = apply(w, "value", hidden)[:, 0]
        mean = 0.95 * values["return_mean"] + 0.05 * jnp.mean(values["return"])
        square = 0.95 * values["return_square"] + 0.05 * jnp.mean(jnp.square(values["return"]))
        gain = (values["return"] - mean) / jnp.sqrt(jnp.maximum(square - mean * mean, 0.01))
        advantage = jax.lax.stop_gradient(gain - value)
        chosen = jnp.sum(log_p * one_hot(values["action"], 5), 1)
        policy, fit = -jnp.mean(chosen * advantage), jnp.mean(jnp.square(value - gain))
        entropy = -jnp.mean(jnp.sum(jnp.exp(log_p) * log_p, 1))
        metrics = {"policy_loss": policy, "value_loss": fit, "entropy": entropy}
        loss = policy + 0.5 * fit - values["entropy_coefficient"] * entropy
        return loss, (metrics, {"return_mean": mean, "return_square": square})

    fed = {"entropy_coefficient": np.float32(0.01)}
    root = optax.chain(optax.clip_by_global_norm(0.5), optax.rmsprop(7e-4, decay=0.99, eps=1e-5))
    yield one_step("rmsprop", weights, batch, objective, root, states=moments, fed=fed)
    fed = fed | {"learning_rate": np.float32(1e-3)}

    def rate(values: Arrays) -> jax.Array:
        return -values["learning_rate"]

    move = optax.scale_by_adam(eps=1e-5)
    style = Style(names="scrambled", order="shuffled", shapes="interface")
    yield one_step("adam-fed-rate", weights, batch, objective, move, style, states=moments, fed=fed, rate=rate)


@kind("field-telemetry-anomalies", "jax")
def telemetry_anomalies() -> Iterator[Step]:
    """An autoencoder of telemetry with a carried threshold of its errors: AdamW; AMSGrad with averaged weights."""
    weights = (
        linear("encode1", 18, 12) | linear("encode2", 12, 5) | linear("decode1", 5, 12) | linear("decode2", 12, 18)
    )
    batch = {"telemetry": normal(7, 18), "channel_mask": (np.random.rand(7, 18) > 0.1).astype(np.float32)}

    def objective(w: Arrays, values: Arrays) -> Parts:
        x = values["telemetry"] * values["channel_mask"]
        code = jax.nn.elu(apply(w, "encode2", jax.nn.elu(apply(w, "encode1", x))))
        rebuilt = apply(w, "decode2", jax.nn.elu(apply(w, "decode1", code)))
        score = jnp.mean(jnp.square(rebuilt - values["telemetry"]) * values["channel_mask"], 1)
        above = jnp.mean((score > values["threshold"]).astype(jnp.float32))
        threshold = values["threshold"] + 0.05 * (above - 0.1)
        return jnp.mean(score), ({"anomaly_score": score, "flagged": above}, {"threshold": threshold})

    states = {"threshold": np.float32(0.8)}
    yield one_step("adamw", weights, batch, objective, optax.adamw(2e-3, weight_decay=0.02), states=states)
    yield one_step(
        "amsgrad", weights, batch, objective, optax.amsgrad(1e-3), EXPORTER, states=states, ema=0.99, prefix="opt_"
    )


@kind("field-citation-nodes", "jax")
def citation_nodes() -> Iterator[Step]:
    """Nodes of a graph by two convolutions: decay of the first layer only, the accuracy of nodes held out."""
    weights = linear("conv1", 16, 10) | linear("conv2", 10, 4)
    edges = np.random.rand(12, 12) > 0.75
    adjacency = (edges | edges.T | np.eye(12, dtype=bool)).astype(np.float32)
    degree = adjacency.sum(1) ** -0.5
    train = (np.arange(12) % 3 > 0).astype(np.float32)
    batch = {"features": normal(12, 16), "label": labels(4, 12)}
    graph = {"adjacency": (adjacency * degree[:, None] * degree[None]).astype(np.float32)}
    graph |= {"train_mask": train, "val_mask": 1 - train}

    def objective(w: Arrays, values: Arrays) -> Parts:
        hidden = jax.nn.relu(matmul(values["adjacency"], apply(w, "conv1", values["features"])))
        logits = matmul(values["adjacency"], apply(w, "conv2", hidden))
        target = one_hot(values["label"], 4)
        each = -jnp.sum(target * jax.nn.log_softmax(logits), 1)
        right = (jnp.sum(target * logits, 1) >= jnp.max(logits, 1)).astype(jnp.float32)

        def over(what: jax.Array, mask: str) -> jax.Array:
            return jnp.sum(what * values[mask]) / jnp.sum(values[mask])

        metrics = {"train_accuracy": over(right, "train_mask"), "val_accuracy": over(right, "val_mask")}
        return over(each, "train_mask"), (metrics | {"val_loss": over(each, "val_mask")}, {})

    first = {name: name.startswith("conv1") for name in weights}
    adam = optax.chain(optax.add_decayed_weights(5e-4, mask=first), optax.adam(0.01))
    yield one_step("adam", weights, batch, objective, adam, constants=graph)
    grow = optax.chain(optax.add_decayed_weights(5e-4), optax.adagrad(0.05))
    style = Style(names="exporter", embedded_constants=True)
    yield one_step("adagrad", weights, batch, objective, grow, style, constants=graph)


@kind("field-heat-surrogate", "jax")
def heat_surrogate() -> Iterator[Step]:
    """A surrogate of a heat solver, branch and trunk: relative error and a boundary penalty; RAdam, LAMB."""
    weights = linear("branch1", 14, 22) | linear("branch2", 22, 9) | linear("trunk1", 2, 16) | linear("trunk2", 16, 9)
    weights |= {"offset": np.float32(0.0)}
    batch = {"source": normal(6, 14), "points": normal(11, 2), "temperature": normal(6, 11)}
    batch |= {"boundary_points": normal(5, 2)}

    def objective(w: Arrays, values: Arrays) -> Parts:
        branch = apply(w, "branch2", jnp.sin(apply(w, "branch1", values["source"])))

        def at(points: jax.Array) -> jax.Array:
            trunk = jnp.tanh(apply(w, "trunk2", jnp.tanh(apply(w, "trunk1", points))))
            return matmul(branch, trunk.T) + w["offset"]

        error = jnp.sum(jnp.square(at(values["points"]) - values["temperature"]), 1)
        relative = jnp.mean(jnp.sqrt(error / jnp.sum(jnp.square(values["temperature"]), 1)))
        boundary = jnp.mean(jnp.square(at(values["boundary_points"])))
        metrics = {"relative_l2": relative, "boundary_residual": boundary}
        return relative + values["boundary_weight"] * boundary, (metrics, {})

    fed = {"boundary_weight": np.float32(0.1)}
    schedule = optax.exponential_decay(2e-3, 100, 0.9)
    radam = optax.chain(
        optax.scale_by_radam(), optax.scale_by_schedule(lambda count: -schedule(jnp.asarray(count, jnp.float32)))
    )
    yield one_step("radam", weights, batch, objective, radam, fed=fed, loss_name="objective")
    yield one_step("lamb", weights, batch, objective, optax.lamb(2e-3, weight_decay=0.01), EXPORTER, fed=fed)
