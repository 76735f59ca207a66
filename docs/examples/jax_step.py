"""Export a training step of JAX: forward, backward and Adam in one ONNX graph."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax2onnx import to_onnx


@jax.custom_vjp
def matmul(x: jax.Array, w: jax.Array) -> jax.Array:
    """`x @ w`, its gradients with explicit transposes: JAX's own become a wrong Gemm."""
    return x @ w


matmul.defvjp(lambda x, w: (x @ w, (x, w)), lambda saved, g: (g @ saved[1].T, saved[0].T @ g))


def loss(params: dict, x: jax.Array, labels: jax.Array) -> jax.Array:
    """Mean cross-entropy by one-hot, since the gradient of a gather does not export."""
    hidden = jnp.tanh(matmul(x, params["fc1.weight"]) + params["fc1.bias"])
    logits = matmul(hidden, params["fc2.weight"]) + params["fc2.bias"]
    return -jnp.mean(jnp.sum(jax.nn.one_hot(labels, 10) * jax.nn.log_softmax(logits), axis=-1))


rng = np.random.default_rng(0)
params = {
    "fc1.weight": rng.normal(size=(16, 32), scale=0.25).astype(np.float32),
    "fc1.bias": np.zeros(32, np.float32),
    "fc2.weight": rng.normal(size=(32, 10), scale=0.18).astype(np.float32),
    "fc2.bias": np.zeros(10, np.float32),
}
batch = {
    "x": rng.normal(size=(8, 16)).astype(np.float32),
    "labels": rng.integers(0, 10, 8, dtype=np.int32),
}
optimizer = optax.adam(1e-2)

# A step is a pure function: weights, moments and count go in, their next values come out.
leaves, tree = jax.tree.flatten_with_path((params, optimizer.init(params)))


def name_of(path: tuple) -> str:
    """Call a weight `fc1.weight`, its moment `mu.fc1.weight`."""
    keys = (getattr(entry, "key", getattr(entry, "name", None)) for entry in path)
    return ".".join(key for key in keys if key is not None)


state = {name_of(path): np.asarray(value) for path, value in leaves}


def step(x: jax.Array, labels: jax.Array, *values: jax.Array) -> tuple[jax.Array, ...]:
    """One training step."""
    params, moments = jax.tree.unflatten(tree, values)
    value, gradients = jax.value_and_grad(loss)(params, x, labels)
    updates, moments = optimizer.update(gradients, moments, params)
    return value, *jax.tree.leaves((optax.apply_updates(params, updates), moments))


inputs = batch | state
model = to_onnx(
    step,
    [jax.ShapeDtypeStruct(value.shape, value.dtype) for value in inputs.values()],
    model_name="step",
    opset=21,
    input_names=list(inputs),
    output_names=["loss", *(f"{name}.next" for name in state)],
)
with open("step.onnx", "wb") as file:
    file.write(model.SerializeToString())
np.savez("step.npz", **inputs)
