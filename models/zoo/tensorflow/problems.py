"""Small networks with their losses, for steps by TensorFlow."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import tensorflow as tf

from models.zoo.arrays import layers, normal
from models.zoo.steps import Arrays

Loss = Callable[[Arrays, Arrays], tf.Tensor]


@dataclass(frozen=True)
class Problem:
    """Something to train: weights and a batch by name, and the loss of (weights, all inputs)."""

    weights: Arrays
    batch: Arrays
    loss: Loss


def labels(count: int, *shape: int) -> np.ndarray:
    """Return random labels, int32."""
    return np.random.randint(0, count, shape).astype(np.int32)


def dense(weights: Arrays, x: tf.Tensor, activation: Callable[[tf.Tensor], tf.Tensor] = tf.tanh) -> tf.Tensor:
    """Apply the dense layers of `layers`, with an activation between them."""
    index = 1
    while f"w{index}" in weights:
        if index > 1:
            x = activation(x)
        x = x @ weights[f"w{index}"]
        if f"b{index}" in weights:
            x = tf.nn.bias_add(x, weights[f"b{index}"])
        index += 1
    return x


def mean_square(predicted: tf.Tensor, wanted: tf.Tensor) -> tf.Tensor:
    """Return the mean squared error."""
    return tf.reduce_mean(tf.math.squared_difference(predicted, wanted))


def regression(
    *sizes: int, batch: int = 4, bias: bool = True, activation: Callable[[tf.Tensor], tf.Tensor] = tf.tanh
) -> Problem:
    """Return a network with the mean squared error; all dimensions differ by default."""
    sizes = sizes or (5, 7, 3)

    def loss(weights: Arrays, values: Arrays) -> tf.Tensor:
        return mean_square(dense(weights, values["x"], activation), values["y"])

    return Problem(layers(*sizes, bias=bias), {"x": normal(batch, sizes[0]), "y": normal(batch, sizes[-1])}, loss)


def square(size: int = 6, count: int = 3) -> Problem:
    """Return a network whose weights and batch all have one shape: shapes tell nothing."""
    return regression(*[size] * (count + 1), batch=size, bias=False)


def classification(*sizes: int, batch: int = 6) -> Problem:
    """Return a ReLU network with the cross-entropy of integer labels."""
    sizes = sizes or (8, 9, 5)

    def loss(weights: Arrays, values: Arrays) -> tf.Tensor:
        logits = dense(weights, values["x"], tf.nn.relu)
        return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(values["label"], logits))

    return Problem(layers(*sizes), {"x": normal(batch, sizes[0]), "label": labels(sizes[-1], batch)}, loss)


def images(pool: Callable[[tf.Tensor], tf.Tensor], strides: int = 1, padding: str = "SAME") -> Problem:
    """Return two convolutions with a pool between them, and a dense layer with cross-entropy."""

    def loss(weights: Arrays, values: Arrays) -> tf.Tensor:
        x = tf.nn.conv2d(values["image"], weights["conv1"], 1, "SAME")
        x = pool(tf.nn.relu(tf.nn.bias_add(x, weights["bias1"])))
        x = tf.nn.relu(tf.nn.conv2d(x, weights["conv2"], strides, padding))
        logits = tf.reduce_mean(x, [1, 2]) @ weights["head"]
        return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(values["label"], logits))

    weights = {"conv1": normal(3, 3, 2, 4, scale=0.3), "bias1": normal(4, scale=0.1)}
    weights |= {"conv2": normal(3, 3, 4, 5, scale=0.3), "head": normal(5, 3)}
    return Problem(weights, {"image": normal(2, 8, 8, 2), "label": labels(3, 2)}, loss)


def language(width: int = 6, vocabulary: int = 11, length: int = 4, batch: int = 3) -> Problem:
    """Return a causal attention block between an embedding and a head, next-token cross-entropy."""

    def loss(weights: Arrays, values: Arrays) -> tf.Tensor:
        x = tf.gather(weights["embedding"], values["tokens"])
        centred = x - tf.reduce_mean(x, -1, keepdims=True)
        normed = (
            centred * tf.math.rsqrt(tf.reduce_mean(tf.square(centred), -1, keepdims=True) + 1e-5) * weights["scale"]
        )
        q, k, v = (tf.einsum("bti,ij->btj", normed, weights[name]) for name in "qkv")
        scores = tf.matmul(q, k, transpose_b=True) / width**0.5
        scores += tf.constant(np.triu(np.full((length, length), -1e4, np.float32), 1))
        x = x + tf.einsum("bti,ij->btj", tf.nn.softmax(scores) @ v, weights["o"])
        logits = tf.reshape(x, [-1, width]) @ weights["head"]
        target = tf.reshape(values["target"], [-1])
        return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(target, logits))

    weights = {"embedding": normal(vocabulary, width), "scale": np.ones(width, np.float32)}
    weights |= {name: normal(width, width, scale=width**-0.5) for name in "qkvo"}
    weights |= {"head": normal(width, vocabulary, scale=width**-0.5)}
    batches = {"tokens": labels(vocabulary, batch, length), "target": labels(vocabulary, batch, length)}
    return Problem(weights, batches, loss)
