"""The models of `workloads` in TensorFlow's graph mode, on weights that are named and laid out as PyTorch's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from training_steps import workloads
from training_steps.sides import PLAIN, Side, Sides
from training_steps.workloads import Arrays, Workload

Weights = Mapping[str, Any]  # variables
Batch = Mapping[str, tf.Tensor]


def linear(weights: Weights, name: str, x: tf.Tensor) -> tf.Tensor:
    """A linear layer over the last axis."""
    weight = weights[f"{name}.weight"]
    flat = tf.matmul(tf.reshape(x, [-1, x.shape[-1]]), weight, transpose_b=True)
    if f"{name}.bias" in weights:
        flat = tf.nn.bias_add(flat, weights[f"{name}.bias"])
    return tf.reshape(flat, [*x.shape[:-1], weight.shape[0]])


def normalise(weights: Weights, name: str, x: tf.Tensor) -> tf.Tensor:
    """Layer normalization over the last axis."""
    mean, variance = tf.nn.moments(x, axes=[-1], keepdims=True)
    return tf.nn.batch_normalization(
        x, mean, variance, weights[f"{name}.bias"], weights[f"{name}.weight"], variance_epsilon=1e-5
    )


def attention(model: workloads.Decoder, weights: Weights, name: str, x: tf.Tensor) -> tf.Tensor:
    """Causal multi-head self-attention."""
    batch, length, width = x.shape
    each = width // model.heads
    split = tf.reshape(linear(weights, f"{name}.qkv", x), [batch, length, 3, model.heads, each])
    q, k, v = tf.unstack(tf.transpose(split, [2, 0, 3, 1, 4]))
    scores = tf.matmul(q, k, transpose_b=True) * each**-0.5
    seen = tf.linalg.band_part(tf.ones([length, length], tf.bool), -1, 0)
    x = tf.matmul(tf.nn.softmax(tf.where(seen, scores, -1e9)), v)
    return linear(weights, f"{name}.out", tf.reshape(tf.transpose(x, [0, 2, 1, 3]), [batch, length, width]))


def perceptron(model: workloads.Mlp, weights: Weights, x: tf.Tensor) -> tf.Tensor:
    """Linear layers with ReLU in between."""
    for index in range(1, len(model.sizes)):
        x = linear(weights, f"fc{index}", tf.nn.relu(x) if index > 1 else x)
    return x


def decoder(model: workloads.Decoder, weights: Weights, tokens: tf.Tensor) -> tf.Tensor:
    """The logits of each token."""
    x = tf.gather(weights["tokens.weight"], tokens) + weights["positions"]
    for index in range(model.layers):
        block = f"blocks.{index}"
        x += attention(model, weights, f"{block}.attention", normalise(weights, f"{block}.norm1", x))
        up = linear(weights, f"{block}.up", normalise(weights, f"{block}.norm2", x))
        x += linear(weights, f"{block}.down", tf.nn.gelu(up, approximate=False))
    return linear(weights, "head", normalise(weights, "norm", x))


def convnet(model: workloads.Convnet, weights: Weights, x: tf.Tensor) -> tf.Tensor:
    """Convolutions with batch norm, on images with the channels last: TensorFlow has no other kernels on the CPU."""
    x = tf.transpose(x, [0, 2, 3, 1])
    for index in range(1, len(model.channels) + 1):
        kernel = tf.transpose(weights[f"conv{index}.weight"], [2, 3, 1, 0])
        x = tf.nn.conv2d(tf.pad(x, [[0, 0], [1, 1], [1, 1], [0, 0]]), kernel, 1 if index == 1 else 2, "VALID")
        mean, variance = tf.nn.moments(x, axes=[0, 1, 2])
        scale, bias = weights[f"norm{index}.weight"], weights[f"norm{index}.bias"]
        x = tf.nn.relu(tf.nn.batch_normalization(x, mean, variance, bias, scale, variance_epsilon=1e-5))
    return linear(weights, "head", tf.reduce_mean(x, axis=[1, 2]))


def lstm(model: workloads.Lstm, weights: Weights, x: tf.Tensor) -> tf.Tensor:
    """An LSTM, unrolled."""
    hidden = cell = tf.zeros([x.shape[0], model.width])
    for element in tf.unstack(x, axis=1):
        gates = linear(weights, "input", element) + linear(weights, "hidden", hidden)
        enter, keep, new, show = tf.split(gates, 4, axis=1)
        cell = tf.sigmoid(keep) * cell + tf.sigmoid(enter) * tf.tanh(new)
        hidden = tf.sigmoid(show) * tf.tanh(cell)
    return linear(weights, "head", hidden)


_NETWORKS: Mapping[type, Callable[..., tf.Tensor]] = {
    workloads.Mlp: perceptron,
    workloads.Decoder: decoder,
    workloads.Convnet: convnet,
    workloads.Lstm: lstm,
}


def loss_of(workload: Workload) -> Callable[[Weights, Batch], tf.Tensor]:
    """The mean cross-entropy of a batch, as a function of weights and batch."""
    model = workload.model

    def loss(weights: Weights, batch: Batch) -> tf.Tensor:
        logits = _NETWORKS[type(model)](model, weights, batch["tokens"] if "tokens" in batch else batch["x"])
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=batch["target"], logits=logits)
        return tf.reduce_mean(losses)

    return loss


class Function:
    """A step as a `tf.function`.

    Args:
        run: computes the loss of a batch and updates the weights.
        weights: the variables, by name.
        state: gives the loss scale and the count of good steps.
    """

    def __init__(
        self,
        run: Callable[[Batch], tf.Tensor],
        weights: Mapping[str, Any],
        state: Callable[[], tuple[float, int] | None],
    ) -> None:
        self._run, self._weights, self.loss_scale = tf.function(run), weights, state

    def step(self, batch: Batch) -> float:
        return float(self._run(batch))

    def weights(self) -> Arrays:
        return {name: weight.numpy() for name, weight in self._weights.items()}


def batches_of(workload: Workload) -> list[Batch]:
    """The batches as tensors."""
    return [{name: tf.constant(array) for name, array in batch.items()} for batch in workload.batches()]


def use_threads(threads: int) -> None:
    """Compute with so many threads, as TensorFlow does of itself on so many cores."""
    tf.config.threading.set_intra_op_parallelism_threads(threads)
    tf.config.threading.set_inter_op_parallelism_threads(threads)


def maker_of(function: Callable[..., Function], scaled: str, threads: int) -> Callable[[Workload], Sides]:
    """Return the function that makes the sides of a workload.

    Args:
        function: makes the step of a workload, with or without a loss scale.
        scaled: its name with a loss scale.
        threads: number of threads.
    """
    use_threads(threads)

    def make(workload: Workload) -> Sides:
        sides: dict[str, Side] = {PLAIN: function(workload, scaled=False), scaled: function(workload, scaled=True)}
        return Sides(sides, batches_of(workload))

    return make
