"""The finite check: are all elements of all gradients finite?"""

from __future__ import annotations

import dataclasses
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
    if target.is_all_finite:
        from graphscale.passes.nodes.finite_on_cuda import test_by_kernel

        return test_by_kernel(build, gradients)
    wide = (_widen(build, gradient) for gradient in gradients)
    if target.cuda:
        from graphscale.passes.nodes.finite_on_cuda import sum_in_rows

        total = sum_in_rows(build, gradients, wide, _add_probe)
    else:
        probes = [_add_probe(build, value, each.name or "") for each, value in zip(gradients, wide, strict=True)]
        total = build.op("Sum", probes, name="probes", dtype=ir.DataType.FLOAT)
    nonfinite = build.op("IsNaN", [total], name="any_nonfinite", dtype=ir.DataType.BOOL)
    return build.op("Not", [nonfinite], name=ScaledValue.ALL_FINITE.wanted, dtype=ir.DataType.BOOL)


def _widen(build: Builder, gradient: ir.Value) -> ir.Value:
    """Return a gradient in float32 or wider: small types have few kernels, and finite numbers stay finite."""
    if dtype_of(gradient) in (ir.DataType.DOUBLE, ir.DataType.FLOAT):
        return gradient
    return build.cast(gradient, ir.DataType.FLOAT, name=f"{gradient.name or ''}.wide")


def _add_probe(build: Builder, value: ir.Value, name: str) -> ir.Value:
    """Add a probe of any shape: the stored products with zero, summed up.

    IEEE 754: 0*x is 0 for a finite x and NaN otherwise, and so is the sum of all 0*x, in any order of summation.
    """
    dtype = dtype_of(value)
    zero = build.editor.shared_constant(f"graphscale/zero.{dtype.name.lower()}", np.zeros((), dtype=dtype.numpy()))
    zeroed = build.op("Mul", [value, zero], name=f"{name}.zeroed", like=value, dtype=dtype)
    probe = build.op("ReduceSum", [zeroed], name=f"{name}.probe", dtype=dtype, keepdims=0)
    return build.cast(probe, ir.DataType.FLOAT, name="probe") if dtype is ir.DataType.DOUBLE else probe
