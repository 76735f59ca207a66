"""Values as vectors of a type with kernels on all runtimes, and their products with zero."""

from __future__ import annotations

import onnx_ir as ir

from graphscale.graph.builder import Builder

__all__ = ["flatten"]


def flatten(
    build: Builder, value: ir.Value, dtype: ir.DataType, row: ir.Value
) -> tuple[ir.Value, ir.Value, ir.Value, ir.DataType]:
    """Add a floating-point value as a vector, and its products with zero: NaN for infinity and NaN.

    The value has a dtype; `row` is the shape [-1].

    Returns:
        the vector, the products, the zero, and the dtype of all three: float64 for float64, else float32.
    """
    flat = build.op("Reshape", [value, row], dtype=dtype, shape=[None])
    # float64 stays: in float32, a large finite number would become infinite.
    wide = dtype if dtype is ir.DataType.DOUBLE else ir.DataType.FLOAT
    flat = flat if dtype is wide else build.cast(flat, wide)
    zero = build.number(0, wide)
    return flat, build.op("Mul", [flat, zero], like=flat, dtype=wide), zero, wide
