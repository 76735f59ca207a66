"""The finite check on CUDA: rows that MatMul adds, or the kernel of training builds."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import onnx_ir as ir

from graphscale.graph.builder import Builder
from graphscale.graph.types import dtype_of
from graphscale.passes.nodes.row_widths import row_widths

__all__ = ["sum_in_rows", "test_by_kernel"]


def sum_in_rows(
    build: Builder,
    gradients: Sequence[ir.Value],
    wide: Iterable[ir.Value],
    add_probe: Callable[[Builder, ir.Value, str], ir.Value],
) -> ir.Value:
    """Add the sum of all probes: a row for all gradients of one width, a scalar for each other gradient.

    Args:
        build: the builder of the nodes.
        gradients: the gradients.
        wide: the same in float32 or wider.
        add_probe: adds a probe of any shape.
    """
    probes, rows = [], dict[int, list[ir.Value]]()
    sizes = [_size(gradient) for gradient in gradients]
    widths = row_widths(filter(None, sizes))
    for gradient, value, size in zip(gradients, wide, sizes, strict=True):
        name = gradient.name or ""
        if size in widths and dtype_of(value) is ir.DataType.FLOAT:
            product = _product(build, value, size // widths[size], widths[size], name)
            rows.setdefault(widths[size], []).append(product)
        else:
            probes.append(add_probe(build, value, name))
    for width, products in rows.items():
        if width == 1:
            probes += products
        else:
            total = _sum_up(build, products, f"rows.{width}")
            probes.append(build.op("ReduceSum", [total], name="probe", dtype=ir.DataType.FLOAT, keepdims=0))
    return _sum_up(build, probes, "probes")


def _size(value: ir.Value) -> int:
    """Return the number of elements, 0 if unknown."""
    return math.prod(value.shape.numpy()) if value.shape is not None and value.shape.is_static() else 0


def _product(build: Builder, value: ir.Value, rows: int, width: int, name: str) -> ir.Value:
    """Add the product of zeros with a float32 value in rows: `[width]`, or a scalar for width 1."""
    matrix = [rows] if width == 1 else [rows, width]
    value = build.reshape(value, matrix, name=f"{name}.rows")
    zeros = build.editor.shared_constant(f"graphscale/zeros.{rows}", np.zeros(rows, np.float32))
    return build.op("MatMul", [zeros, value], name=f"{name}.probe", dtype=ir.DataType.FLOAT, shape=matrix[1:])


def _sum_up(build: Builder, values: Sequence[ir.Value], name: str) -> ir.Value:
    """Add sums of at most eight float32 values of one shape, up to a single sum: CUDA adds eight in one kernel."""
    left = deque(values)
    while len(left) > 1:
        terms = [left.popleft() for _ in range(min(8, len(left)))]
        left.append(build.op("Sum", terms, name=name, like=terms[0], dtype=ir.DataType.FLOAT))
    return left[0]


def test_by_kernel(build: Builder, gradients: Sequence[ir.Value]) -> ir.Value:
    """Add one IsAllFinite node for each dtype: its inputs must have one dtype."""
    by_dtype: dict[ir.DataType, list[ir.Value]] = {}
    for gradient in gradients:
        by_dtype.setdefault(dtype_of(gradient), []).append(gradient)
    results = []
    for dtype, group in by_dtype.items():
        name = "all_finite" if len(by_dtype) == 1 else f"all_finite.{dtype.name.lower()}"
        results.append(build.op("IsAllFinite", group, name=name, dtype=ir.DataType.BOOL, domain="com.microsoft"))
    finite = results[0]
    for i, other in enumerate(results[1:], 2):
        name = "all_finite" if i == len(results) else f"all_finite.{i}"
        finite = build.op("And", [finite, other], name=name, dtype=ir.DataType.BOOL)
    return finite
