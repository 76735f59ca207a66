"""What stands at the class of each row, in the forms of all opsets."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from graphscale.passes.lower_training_ops.writer import Writer

__all__ = ["at_classes", "less_one_hot", "widest"]


def at_classes(f: Writer, values: ir.Value, classes: ir.Value, axis: int) -> ir.Value:
    """Take the element of each row along an axis that an int64 class number points at."""
    if f.opset >= 11:
        return f.squeeze(f("GatherElements", values, f.unsqueeze(classes, [axis]), axis=axis), [axis])
    chosen = f.cast(_one_hot(f, values, classes, axis), ir.DataType.BOOL)
    return f.reduce_sum(f("Where", chosen, values, 0.0), [axis], keepdims=False)


def less_one_hot(f: Writer, values: ir.Value, classes: ir.Value, axis: int) -> ir.Value:
    """Subtract 1 where the class numbers point at."""
    if f.opset < 11:
        return f("Sub", values, f.cast(_one_hot(f, values, classes, axis), f.dtype))
    # No matrix of zeros and ones: a row has one place, and ScatterElements may write into its operand.
    places = f.unsqueeze(classes, [axis])
    less = f("Sub", f("GatherElements", values, places, axis=axis), 1.0)
    return f("ScatterElements", values, places, less, axis=axis)


def widest(f: Writer) -> ir.DataType:
    """Return the dtype for sums over rows: float32 for narrower ones, as in the kernels."""
    return ir.DataType.DOUBLE if f.dtype is ir.DataType.DOUBLE else ir.DataType.FLOAT


def _one_hot(f: Writer, values: ir.Value, classes: ir.Value, axis: int) -> ir.Value:
    # ONNX Runtime's OneHot has float32 for all these classes, not double.
    count = f("Gather", f.shape_of(values), f.integers(f.axis(values, axis)))
    return f("OneHot", classes, count, np.asarray([0, 1], np.float32), axis=axis)
