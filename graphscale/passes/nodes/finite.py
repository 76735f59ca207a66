"""The finite check: are all elements of all gradients finite?"""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from graphscale.graph.builder import Builder
from graphscale.graph.types import dtype_of
from graphscale.policy.names import ScaledValue
from graphscale.targets import Target

__all__ = ["all_finite"]


def all_finite(build: Builder, gradients: Sequence[ir.Value], target: Target) -> ir.Value:
    """Add nodes that test gradients for finiteness; the result is a scalar bool value, true for no gradients.

    Args:
        build: the builder of the nodes.
        gradients: floating-point values.
        target: the target, for the choice between `com.microsoft.IsAllFinite` and standard operators.
    """
    build = dataclasses.replace(build, shape=())
    if not gradients:
        truth = ir.tensor(np.asarray(True))
        return build.op("Constant", [], name=ScaledValue.ALL_FINITE.wanted, dtype=ir.DataType.BOOL, value=truth)
    return (
        _by_kernel(build, gradients) if target.is_all_finite else _by_standard_ops(build, gradients, cuda=target.cuda)
    )


def _by_standard_ops(build: Builder, gradients: Sequence[ir.Value], *, cuda: bool) -> ir.Value:
    """Test the sum of all probes: a scalar for each gradient, or on CUDA a row for all gradients of one width.

    IEEE 754: 0*x is 0 for a finite x and NaN otherwise, and so is the sum of all 0*x, in any order of summation.
    """
    probes, rows = [], dict[int, list[ir.Value]]()
    sizes = [_size(gradient) for gradient in gradients]
    widths: dict[int, int] = {}
    if cuda:
        from graphscale.passes.nodes.row_widths import row_widths

        widths = row_widths(filter(None, sizes))
    for gradient, size in zip(gradients, sizes, strict=True):
        value, name = gradient, gradient.name or ""
        if dtype_of(gradient) not in (ir.DataType.DOUBLE, ir.DataType.FLOAT):
            # Small types have few kernels on the CPU; finite numbers stay finite in float32.
            value = build.cast(value, ir.DataType.FLOAT, name=f"{name}.wide")
        if size in widths and dtype_of(value) is ir.DataType.FLOAT:
            product = _product(build, value, size // widths[size], widths[size], name)
            rows.setdefault(widths[size], []).append(product)
        else:
            probes.append(_probe(build, value, name))
    for width, products in rows.items():
        if width == 1:
            probes += products
        else:
            total = _sum_up(build, products, f"rows.{width}")
            probes.append(build.op("ReduceSum", [total], name="probe", dtype=ir.DataType.FLOAT, keepdims=0))
    if cuda:
        total = _sum_up(build, probes, "probes")
    else:
        total = build.op("Sum", probes, name="probes", dtype=ir.DataType.FLOAT)
    nonfinite = build.op("IsNaN", [total], name="any_nonfinite", dtype=ir.DataType.BOOL)
    return build.op("Not", [nonfinite], name=ScaledValue.ALL_FINITE.wanted, dtype=ir.DataType.BOOL)


def _size(value: ir.Value) -> int:
    """Return the number of elements, 0 if unknown."""
    return math.prod(value.shape.numpy()) if value.shape is not None and value.shape.is_static() else 0


def _probe(build: Builder, value: ir.Value, name: str) -> ir.Value:
    """Add a probe of any shape: the stored products with zero, summed up."""
    dtype = dtype_of(value)
    zero = build.editor.shared_constant(f"graphscale/zero.{dtype.name.lower()}", np.zeros((), dtype=dtype.numpy()))
    zeroed = build.op("Mul", [value, zero], name=f"{name}.zeroed", like=value, dtype=dtype)
    probe = build.op("ReduceSum", [zeroed], name=f"{name}.probe", dtype=dtype, keepdims=0)
    return build.cast(probe, ir.DataType.FLOAT, name="probe") if dtype is ir.DataType.DOUBLE else probe


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


def _by_kernel(build: Builder, gradients: Sequence[ir.Value]) -> ir.Value:
    """One IsAllFinite node for each dtype: its inputs must have one dtype."""
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
