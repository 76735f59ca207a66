"""Gradients of activations and of other functions of single numbers."""

from __future__ import annotations

from typing import Any

import numpy as np

from graphscale.exporters.tensorflow.lowerings.lowering_writer import NodeWriter, lower


@lower("TanhGrad")
def tanh(write: NodeWriter, node: Any) -> str:
    """Return dy * (1 - y^2)."""
    y, dy = node.input
    return write.op("Mul", dy, write.op("Sub", write.constant(1), write.op("Mul", y, y)))


@lower("SigmoidGrad")
def sigmoid(write: NodeWriter, node: Any) -> str:
    """Return dy * y * (1 - y)."""
    y, dy = node.input
    return write.multiply(dy, y, write.op("Sub", write.constant(1), y))


@lower("ReluGrad")
def relu(write: NodeWriter, node: Any) -> str:
    """Return dy where x > 0, else 0."""
    dy, x = node.input
    return write.where_positive(x, dy, write.constant(0))


@lower("Relu6Grad")
def relu6(write: NodeWriter, node: Any) -> str:
    """Return dy where 0 < x < 6, else 0."""
    dy, x = node.input
    inner = write.op("And", write.op("Greater", x, write.constant(0)), write.op("Less", x, write.constant(6)))
    return write.op("Where", inner, dy, write.constant(0))


@lower("LeakyReluGrad")
def leaky_relu(write: NodeWriter, node: Any) -> str:
    """Return dy where x > 0, else alpha * dy."""
    dy, x = node.input
    return write.where_positive(x, dy, write.op("Mul", dy, write.constant(node.get_attr_value("alpha"))))


@lower("EluGrad")
def elu(write: NodeWriter, node: Any) -> str:
    """Return dy where y > 0, else dy * (y + 1)."""
    dy, y = node.input
    return write.where_positive(y, dy, write.op("Mul", dy, write.op("Add", y, write.constant(1))))


@lower("SeluGrad")
def selu(write: NodeWriter, node: Any) -> str:
    """Return scale * dy where y > 0, else dy * (y + scale * alpha)."""
    dy, y = node.input
    scale, alpha = 1.0507009873554805, 1.6732632423543772
    below = write.op("Mul", dy, write.op("Add", y, write.constant(scale * alpha)))
    return write.where_positive(y, write.op("Mul", dy, write.constant(scale)), below)


@lower("SoftplusGrad")
def softplus(write: NodeWriter, node: Any) -> str:
    """Return dy * sigmoid(x)."""
    dy, x = node.input
    return write.op("Mul", dy, write.op("Sigmoid", x))


@lower("SoftsignGrad")
def softsign(write: NodeWriter, node: Any) -> str:
    """Return dy / (1 + |x|)^2."""
    dy, x = node.input
    beside = write.op("Add", write.constant(1), write.op("Abs", x))
    return write.op("Div", dy, write.op("Mul", beside, beside))


@lower("SqrtGrad")
def sqrt(write: NodeWriter, node: Any) -> str:
    """Return dy / (2 y)."""
    y, dy = node.input
    return write.op("Div", write.op("Mul", dy, write.constant(0.5)), y)


@lower("RsqrtGrad")
def rsqrt(write: NodeWriter, node: Any) -> str:
    """Return -dy * y^3 / 2."""
    y, dy = node.input
    return write.multiply(write.constant(-0.5), dy, y, y, y)


@lower("ReciprocalGrad", "InvGrad")
def reciprocal(write: NodeWriter, node: Any) -> str:
    """Return -dy * y^2."""
    y, dy = node.input
    return write.multiply(write.op("Neg", dy), y, y)


@lower("Log1p")
def log1p(write: NodeWriter, node: Any) -> str:
    """Return log(1 + x)."""
    return write.op("Log", write.op("Add", write.constant(1), node.input[0]))


@lower("Expm1")
def expm1(write: NodeWriter, node: Any) -> str:
    """Return exp(x) - 1."""
    return write.op("Sub", write.op("Exp", node.input[0]), write.constant(1))


@lower("Erfc")
def erfc(write: NodeWriter, node: Any) -> str:
    """Return 1 - erf(x)."""
    return write.op("Sub", write.constant(1), write.op("Erf", node.input[0]))


@lower("Xdivy")
def x_div_y(write: NodeWriter, node: Any) -> str:
    """Return x / y, and 0 where x is 0."""
    x, y = node.input
    zero = write.op("Equal", x, write.constant(0))
    return write.op("Where", zero, write.constant(0), write.op("Div", x, y))


@lower("Xlogy")
def x_log_y(write: NodeWriter, node: Any) -> str:
    """Return x * log(y), and 0 where x is 0."""
    x, y = node.input
    zero = write.op("Equal", x, write.constant(0))
    return write.op("Where", zero, write.constant(0), write.op("Mul", x, write.op("Log", y)))


@lower("Bitcast")
def sign_bit(write: NodeWriter, node: Any) -> str:
    """Return the sign bit of numbers alone, where nothing else is read: Keras's argmax tells -0 from 0."""
    sign = np.iinfo(np.int32).min
    readers = write.ctx.find_output_consumers(node.output[0])
    masks = [each for reader in readers for each in reader.inputs if reader.type == "BitwiseAnd" and each.is_const()]
    if write.dtype != np.int32 or [each.get_tensor_value() for each in masks] != [sign] * len(readers):
        raise NotImplementedError("the bits of a number")
    x, zero = node.input[0], write.constant(0, np.float32)
    whole = write.op("Where", write.op("Equal", x, zero), write.op("Reciprocal", x), x)
    return write.op("Where", write.op("Less", whole, zero), write.constant(sign), write.constant(0))
