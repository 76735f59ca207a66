"""Losses, normalization, and sums over batches."""

from __future__ import annotations

from typing import Any

from tf2onnx import utils

from graphscale.exporters.tensorflow.lowerings.lowering_writer import NodeWriter, lower

# All axes of images but the last.
CHANNELWISE = (0, 1, 2)


def _standardize(write: NodeWriter, node: Any, x: str, mean: str, variance: str) -> tuple[str, str]:
    """Return the standardized images, and one over the standard deviation of each channel."""
    if node.get_attr_value("data_format") not in (b"NHWC", "NHWC"):
        raise NotImplementedError("channels first")
    epsilon = write.constant(node.get_attr_value("epsilon"))
    inverse = write.op("Reciprocal", write.op("Sqrt", write.op("Add", variance, epsilon)))
    return write.op("Mul", write.op("Sub", x, mean), inverse), inverse


@lower("FusedBatchNormV3")
def batch_norm(write: NodeWriter, node: Any) -> tuple[str, ...]:
    """Return the normalized images, the mean, the variance over N - 1; for the gradient the mean and that over N."""
    x, scale, offset, mean, variance = node.input[:5]
    unbiased = variance
    if node.get_attr_value("is_training"):
        if (node.get_attr_value("exponential_avg_factor") or 1.0) != 1.0:
            raise NotImplementedError("running statistics of its own")
        count, one = write.count(x, CHANNELWISE), write.constant(1)
        mean = write.mean(x, CHANNELWISE)
        centred = write.op("Sub", x, mean)
        variance = write.mean(write.op("Mul", centred, centred), CHANNELWISE)
        others = write.op("Max", write.op("Sub", count, one), one)
        unbiased = write.op("Mul", variance, write.op("Div", count, others))
    standard, _ = _standardize(write, node, x, mean, variance)
    return write.op("Add", write.op("Mul", standard, scale), offset), mean, unbiased, mean, variance


@lower("FusedBatchNormGradV3")
def batch_norm_gradient(write: NodeWriter, node: Any) -> tuple[str, str, str]:
    """Return the gradients of the images, the scale and the offset.

    Formula, s the standardized images, d their standard deviation, means over all but the channels:
    dx = scale / d * (dy - mean(dy) - s * mean(dy * s)) in training, scale / d * dy otherwise.
    """
    dy, x, scale, mean, variance = node.input[:5]
    standard, inverse = _standardize(write, node, x, mean, variance)
    product = write.op("Mul", dy, standard)
    axes = write.integers(CHANNELWISE)
    dscale, doffset = (write.op("ReduceSum", each, axes, keepdims=0) for each in (product, dy))
    dx = dy
    if node.get_attr_value("is_training"):
        count = write.count(x, CHANNELWISE)
        mean_product, mean_dy = (write.op("Div", total, count) for total in (dscale, doffset))
        dx = write.op("Sub", write.op("Sub", dy, mean_dy), write.op("Mul", standard, mean_product))
    return write.multiply(dx, write.op("Mul", scale, inverse)), dscale, doffset


@lower("SparseSoftmaxCrossEntropyWithLogits")
def sparse_cross_entropy(write: NodeWriter, node: Any) -> tuple[str, str]:
    """Return the loss of each row, and softmax - one-hot, which TensorFlow computes beside it.

    A row whose label is no class gives NaN, as in TensorFlow on a GPU; on a CPU, TensorFlow refuses it.
    """
    logits, label = node.input
    (count,) = write.known(write.shape(logits)[-1:], "classes")
    places = write.op("Cast", write.equals_position(label, count), to=utils.map_numpy_to_onnx_dtype(write.dtype))
    # Zeros alone, and 0 / 0 is NaN, where the label is no class.
    ones = write.op("ReduceSum", places, write.integers([-1]), keepdims=1)
    return _cross_entropy_of(write, logits, write.op("Div", places, ones))


@lower("SoftmaxCrossEntropyWithLogits")
def cross_entropy(write: NodeWriter, node: Any) -> tuple[str, str]:
    """Return the loss of each row, and softmax - target, which TensorFlow computes beside it."""
    return _cross_entropy_of(write, *node.input)


def _cross_entropy_of(write: NodeWriter, logits: str, target: str) -> tuple[str, str]:
    """Return the cross-entropy of each row, and its gradient."""
    product = write.op("Mul", target, write.op("LogSoftmax", logits, axis=-1))
    loss = write.op("Neg", write.op("ReduceSum", product, write.integers([-1]), keepdims=0))
    return loss, write.op("Sub", write.op("Softmax", logits, axis=-1), target)


@lower("BiasAddGrad")
def bias_add(write: NodeWriter, node: Any) -> str:
    """Sum over all axes but the last."""
    rank = len(write.ctx.get_shape(node.input[0]))
    return write.op("ReduceSum", node.input[0], write.integers(range(rank - 1)), keepdims=0)


@lower("L2Loss")
def l2_loss(write: NodeWriter, node: Any) -> str:
    """Return half the sum of squares."""
    squares = write.op("ReduceSumSquare", node.input[0], keepdims=0)
    return write.op("Mul", squares, write.constant(0.5))
