"""Export a training step of JAX: forward pass, backward pass and Adam in one ONNX file."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import graphscale as gs

optimizer = optax.adam(1e-2)


def loss_of(params: dict, batch: dict) -> jax.Array:
    """Mean cross-entropy of a small network."""
    hidden = jnp.tanh(batch["x"] @ params["fc1.weight"] + params["fc1.bias"])
    logits = hidden @ params["fc2.weight"] + params["fc2.bias"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()


def step(state: tuple, batch: dict) -> tuple:
    """One training step."""
    params, moments = state
    loss, gradients = jax.value_and_grad(loss_of)(params, batch)
    updates, moments = optimizer.update(gradients, moments, params)
    return (optax.apply_updates(params, updates), moments), loss


def first_state(rng: np.random.Generator) -> tuple:
    """Weights and moments before the first step."""
    params = {
        "fc1.weight": rng.normal(size=(16, 32), scale=0.25).astype(np.float32),
        "fc1.bias": np.zeros(32, np.float32),
        "fc2.weight": rng.normal(size=(32, 10), scale=0.18).astype(np.float32),
        "fc2.bias": np.zeros(10, np.float32),
    }
    return params, optimizer.init(params)


if __name__ == "__main__":
    rng = np.random.default_rng(0)
    state = first_state(rng)
    batch = {"x": rng.normal(size=(8, 16)).astype(np.float32), "labels": rng.integers(0, 10, 8, dtype=np.int32)}
    np.savez("step.npz", **batch)
    print(gs.exporters.jax.export_step(step, state, batch, "step.onnx"))
