"""The types in ONNX's schemas, and those of computations."""

from __future__ import annotations

import functools

import onnx
import onnx_ir as ir

__all__ = ["alike", "widened"]


@functools.cache
def alike(op_type: str, opset: int, index: int, count: int) -> tuple[int, ...]:
    """Return the operands, of a given number, that must have the type of one of them."""
    inputs = onnx.defs.get_schema(op_type, opset, "").inputs
    types = [inputs[min(i, len(inputs) - 1)].type_str for i in range(count)]
    return tuple(i for i in range(count) if types[i] == types[index])


def widened(dtype: ir.DataType) -> ir.DataType:
    """Return a type with a range for sums and counts of numbers of a floating-point type: float32 or wider."""
    return dtype if dtype is ir.DataType.DOUBLE else ir.DataType.FLOAT
