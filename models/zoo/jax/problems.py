"""Small networks with their losses, for steps by JAX: weights by name, a batch by name, and a pure function of both."""

from collections.abc import Callable
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np

from models.zoo.arrays import layers, normal
from models.zoo.steps import Arrays

Loss = Callable[[Arrays, Arrays], jax.Array]


@dataclass(frozen=True)
class Problem:
    """Something to train: weights and a batch by name, and the loss of (weights, all inputs)."""

    weights: Arrays
    batch: Arrays
    loss: Loss
    constants: Arrays = field(default_factory=dict)


@jax.custom_vjp
def matmul(x: jax.Array, w: jax.Array) -> jax.Array:
    """Return `x @ w` of matrices, with explicit transposes in its gradients.

    JAX's own gradients contract over dimension 0, which jax2onnx lowers to a Gemm of the wrong shape.
    """
    return x @ w


matmul.defvjp(lambda x, w: (x @ w, (x, w)), lambda saved, g: (g @ saved[1].T, saved[0].T @ g))


def dense(weights: Arrays, x: jax.Array, activation: Callable[[jax.Array], jax.Array] = jnp.tanh) -> jax.Array:
    """Apply the dense layers of `layers`, with an activation between them."""
    index = 1
    while f"w{index}" in weights:
        if index > 1:
            x = activation(x)
        x = matmul(x, weights[f"w{index}"])
        if f"b{index}" in weights:
            x = x + weights[f"b{index}"]
        index += 1
    return x


def regression(*sizes: int, batch: int = 4, bias: bool = True) -> Problem:
    """Return a tanh network with the mean squared error; all dimensions differ by default."""
    sizes = sizes or (5, 7, 3)

    def loss(weights: Arrays, values: Arrays) -> jax.Array:
        return jnp.mean(jnp.square(dense(weights, values["x"]) - values["y"]))

    return Problem(layers(*sizes, bias=bias), {"x": normal(batch, sizes[0]), "y": normal(batch, sizes[-1])}, loss)


def square(size: int = 6, count: int = 3) -> Problem:
    """Return a network whose weights and batch all have one shape: shapes tell nothing."""
    return regression(*[size] * (count + 1), batch=size, bias=False)


def classification(*sizes: int, batch: int = 6) -> Problem:
    """Return a ReLU network with the cross-entropy of integer labels.

    The labels are one-hot: jax2onnx does not export the gradient of a gather.
    """
    sizes = sizes or (8, 9, 5)

    def loss(weights: Arrays, values: Arrays) -> jax.Array:
        logits = jax.nn.log_softmax(dense(weights, values["x"], jax.nn.relu))
        return -jnp.mean(jnp.sum(jax.nn.one_hot(values["label"], sizes[-1]) * logits, axis=-1))

    label = np.random.randint(0, sizes[-1], (batch,)).astype(np.int32)
    return Problem(layers(*sizes), {"x": normal(batch, sizes[0]), "label": label}, loss)
