"""The cross entropies of the last axis, and their derivatives."""

from __future__ import annotations

import math

import onnx_ir as ir

from graphscale.operators import MICROSOFT
from graphscale.passes.lower_training_ops.class_numbers import at_classes, less_one_hot, widest
from graphscale.passes.lower_training_ops.writer import Formula, Writer

__all__ = ["FORMULAS"]


def _dense(f: Writer) -> list[ir.Value]:
    """Compute `log_prob = log_softmax(X)` and `loss = -sum(label * log_prob)`, for a mean divided by the rows.

    The kernel does so for each row along the last axis.
    """
    log_prob = f.log_softmax(f.data(0))
    loss = f("Neg", f.reduce_sum(f("Mul", f.data(1), log_prob), keepdims=False))
    return [_divided(f, loss, log_prob, -1) if _is_mean(f) else loss, log_prob]


def _dense_grad(f: Writer) -> list[ir.Value]:
    """Compute `dX = (exp(log_prob) - label) * dY`, dY divided by the rows for a mean, as the kernel does."""
    dy, log_prob, label = f.data(0), f.data(1), f.data(2)
    if _is_mean(f):
        dy = _divided(f, dy, log_prob, -1)
    return [f("Mul", f("Sub", f("Exp", log_prob), label), dy)]


def _sparse(f: Writer) -> list[ir.Value]:
    """Compute `log_prob = log_softmax(X)` and `loss = -sum(log_prob[n, label[n]] * weight[n])`, n the row.

    The kernel does so; a mean is divided by the sum of the weights, or by the rows. Every other reduction is a sum.
    """
    log_prob, label, weight = f.log_softmax(f.data(0)), f.cast(f.data(1), ir.DataType.INT64), f.input(2)
    losses = f("Neg", at_classes(f, log_prob, label, -1))
    loss = f.reduce_sum(losses if weight is None else f("Mul", losses, weight), keepdims=False)
    return [_averaged(f, loss, label, weight), log_prob]


def _sparse_grad(f: Writer) -> list[ir.Value]:
    """Compute `dX = (exp(log_prob) - one_hot(label)) * dY * weight`, as the kernel does; for a mean, dY is divided."""
    dy, label, weight = f.data(0), f.cast(f.data(2), ir.DataType.INT64), f.input(3)
    dy = _averaged(f, dy, label, weight)
    if weight is not None:
        dy = f.unsqueeze(f("Mul", weight, dy), [-1 if f.opset >= 11 else f.rank(label)])
    return [f("Mul", less_one_hot(f, f("Exp", f.data(1)), label, -1), dy)]


def _averaged(f: Writer, value: ir.Value, label: ir.Value, weight: ir.Value | None) -> ir.Value:
    """Divide by the sum of the weights, or by the rows, for a mean."""
    if _reduction(f) != "mean":
        return value
    return _divided(f, value, label, None) if weight is None else f("Div", value, f.reduce_sum(weight, keepdims=False))


def _divided(f: Writer, value: ir.Value, like: ir.Value, stop: int | None) -> ir.Value:
    """Divide a value by the product of another value's sizes, up to an axis."""
    sizes = f.shape(like)
    if sizes is not None and None not in sizes[:stop]:
        count = f.number(math.prod(size for size in sizes[:stop] if size is not None), widest(f))
    else:
        shape = f("Shape", like)
        shape = shape if stop is None else f("Slice", shape, f.integers(0), f.integers(stop))
        count = f.cast(f("ReduceProd", shape, keepdims=0), widest(f))
    return f.cast(f("Div", f.cast(value, widest(f)), count), f.dtype)


def _is_mean(f: Writer) -> bool:
    reduction = _reduction(f)
    if reduction not in ("mean", "sum"):
        # The kernel returns a loss with the wrong sign, and reads the cotangent from uninitialized memory.
        raise f.refusal(f"its reduction is {reduction!r}; it must be mean or sum")
    return reduction == "mean"


def _reduction(f: Writer) -> str:
    return str(f.attribute("reduction", "mean"))


# ONNX Runtime has the sparse operators in the domain of ONNX.
FORMULAS: dict[tuple[str, str], Formula] = {
    (MICROSOFT, "SoftmaxCrossEntropy"): _dense,
    (MICROSOFT, "SoftmaxCrossEntropyGrad"): _dense_grad,
    ("", "SparseSoftmaxCrossEntropy"): _sparse,
    ("", "SparseSoftmaxCrossEntropyGrad"): _sparse_grad,
}
