"""Numbers at the class of each row, in the forms of all opsets."""

from __future__ import annotations

import onnx_ir as ir

from graphscale.graph.types import dtype_of
from graphscale.passes.lower_training_ops.writer import Writer

__all__ = ["at_classes", "less_one_hot", "widest"]


def at_classes(f: Writer, values: ir.Value, classes: ir.Value, axis: int) -> ir.Value:
    """Take the element of each row at an int64 class number along an axis."""
    if f.opset >= 11:
        return f.squeeze(f("GatherElements", values, f.unsqueeze(classes, [axis]), axis=axis), [axis])
    chosen = f("Where", _one_hot(f, values, classes, axis), values, 0.0)
    return f.reduce_sum(chosen, [axis], keepdims=False)


def less_one_hot(f: Writer, values: ir.Value, classes: ir.Value, axis: int) -> ir.Value:
    """Subtract 1 at the class numbers."""
    if f.opset < 11:
        return f("Sub", values, f.cast(_one_hot(f, values, classes, axis), dtype_of(values)))
    # A matrix of zeros and ones is not needed: a row has one place, and ScatterElements may write into its operand.
    places = f.unsqueeze(classes, [axis])
    less = f("Sub", f("GatherElements", values, places, axis=axis), 1.0)
    return f("ScatterElements", values, places, less, axis=axis)


def widest(f: Writer) -> ir.DataType:
    """Return the dtype for sums over rows: float32 for narrower ones, as in the kernels."""
    return ir.DataType.DOUBLE if f.dtype is ir.DataType.DOUBLE else ir.DataType.FLOAT


def _one_hot(f: Writer, values: ir.Value, classes: ir.Value, axis: int) -> ir.Value:
    """Return whether each class is that of its row; OneHot would crash in ONNX Runtime without rows."""
    axis = range(f.rank(values))[axis]
    size = f("Gather", f.shape_of(values), f.integers(axis))
    numbers = f("NonZero", f("ConstantOfShape", size, value=ir.tensor([1], dtype=ir.DataType.INT64)))
    beside = [1] * (f.rank(values) - 1 - axis)
    return f("Equal", f.unsqueeze(classes, [axis]), f.reshape(numbers, [-1, *beside]))
