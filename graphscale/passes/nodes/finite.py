"""The finite check: are all elements of all gradients finite?"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from graphscale.graph.builder import Builder
from graphscale.graph.types import dtype_of
from graphscale.targets import Target

__all__ = ["all_finite"]


def all_finite(build: Builder, gradients: Sequence[ir.Value], target: Target) -> ir.Value:
    """Add nodes that test gradients for finiteness; the result is a scalar bool value, true for no gradients.

    Args:
        build: the builder of the nodes.
        gradients: floating-point values.
        target: decides between `com.microsoft.IsAllFinite` and standard ops.
    """
    build = dataclasses.replace(build, shape=())
    if not gradients:
        truth = ir.tensor(np.asarray(True))
        return build.op("Constant", [], name="all_finite", dtype=ir.DataType.BOOL, value=truth)
    return _by_kernel(build, gradients) if target.is_all_finite else _by_standard_ops(build, gradients)


def _by_standard_ops(build: Builder, gradients: Sequence[ir.Value]) -> ir.Value:
    """IEEE 754: 0*x is 0 for a finite x and NaN otherwise, so the sum of all 0*x is NaN if any x is not finite."""
    probes = []
    for gradient in gradients:
        dtype, value = dtype_of(gradient), gradient
        if dtype is not ir.DataType.DOUBLE and dtype is not ir.DataType.FLOAT:
            # Small types have few kernels on the CPU; finite numbers stay finite in float32.
            value = build.cast(value, ir.DataType.FLOAT, name=f"{gradient.name}.wide")
            dtype = ir.DataType.FLOAT
        zero = build.editor.shared_constant(f"graphscale/zero.{dtype.name.lower()}", np.zeros((), dtype=dtype.numpy()))
        probe = build.op("Mul", [value, zero], name=f"{gradient.name}.zeroed", like=gradient, dtype=dtype)
        probe = build.op("ReduceSum", [probe], name=f"{gradient.name}.probe", dtype=dtype, keepdims=0)
        probes.append(build.cast(probe, ir.DataType.FLOAT, name="probe") if dtype is ir.DataType.DOUBLE else probe)
    total = build.op("Sum", probes, name="probes", dtype=ir.DataType.FLOAT)
    nonfinite = build.op("IsNaN", [total], name="any_nonfinite", dtype=ir.DataType.BOOL)
    return build.op("Not", [nonfinite], name="all_finite", dtype=ir.DataType.BOOL)


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
