"""Ranges of a step's gradients: largest magnitude, share of zeros and share of overflow, in every N-th step."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from graphscale.graph.builder import Builder
from graphscale.graph.types import dtype_of
from graphscale.passes.nodes.flat_values import flatten
from graphscale.policy.names import ScaledValue

__all__ = ["ROWS", "add_ranges", "read_zeros"]

# The rows of the ranges; the columns are the gradients, and lastly all of them together.
ROWS = ("largest", "zeros", "overflow")

_FLAG, _REAL, _INDEX = ir.DataType.BOOL, ir.DataType.FLOAT, ir.DataType.INT64


def add_ranges(
    build: Builder, gradients: Sequence[ir.Value], number: ir.Value, every: int
) -> tuple[ir.Value, ir.Value]:
    """Add an `If` that measures the gradients in every N-th step, and returns the present ranges in others.

    Args:
        build: the builder of the nodes.
        gradients: floating-point values, n of them.
        number: the number of this step, from 1, a scalar.
        every: steps from one measurement to the next; the first step is measured.

    Returns:
        the present ranges and the next ones, float32 of the shape [3, n + 1]: the largest magnitude among the finite
        elements, the share of zeros and the share of elements that are not finite, both from 0 to 1; in the last column
        over all gradients together.
    """
    shape = [len(ROWS), len(gradients) + 1]
    state = build.editor.state(ScaledValue.RANGES.wanted, np.zeros(shape, dtype=np.float32))
    build = dataclasses.replace(build, prefix="ranges", shape=())
    count = build.op("Sub", [build.cast(number, _INDEX), _constant(build, 1)], dtype=_INDEX)
    rest = build.op("Mod", [count, _constant(build, every)], dtype=_INDEX)
    is_due = build.op("Equal", [rest, _constant(build, 0)], dtype=_FLAG)
    measured, kept = (build.within(f"{build.mark}.{name}") for name in ("ranges", "kept"))
    branches = {
        "then_branch": measured.closed([_measure(dataclasses.replace(measured, dtype=_REAL), gradients, shape)]),
        "else_branch": kept.closed([kept.op("Identity", [state], dtype=_REAL, shape=shape)]),
    }
    return state, build.node("If", [is_due], [(f"{state.name}.next", _REAL, shape)], attributes=branches).outputs[0]


def read_zeros(build: Builder, ranges: ir.Value, count: int) -> ir.Value:
    """Add the share of zeros over all `count` gradients, a float32 scalar, from the ranges."""
    zeros = build.op("Gather", [ranges, _constant(build, ROWS.index("zeros"))], dtype=_REAL, shape=[count + 1], axis=0)
    return build.op(
        "Gather", [zeros, _constant(build, count)], name=ScaledValue.ZERO_FRACTION.wanted, dtype=_REAL, shape=(), axis=0
    )


def _constant(build: Builder, number: int) -> ir.Value:
    return build.editor.shared_constant(f"graphscale/telemetry.{number}", np.asarray(number, dtype=np.int64))


def _measure(build: Builder, gradients: Sequence[ir.Value], shape: Sequence[int]) -> ir.Value:
    found = [_measure_one(build, gradient) for gradient in gradients]
    rows = []
    for values, total in zip(zip(*found, strict=True), ("ReduceMax", *["ReduceSum"] * 3), strict=True):
        row = build.op("Concat", values, shape=[len(gradients)], axis=0)
        rows.append(build.op("Concat", [row, build.op(total, [row], shape=[1], keepdims=1)], shape=shape[1:], axis=0))
    largest, nonzero, overflow, sizes = rows
    elements = build.op("Max", [sizes, build.number(1, _REAL)], like=sizes)
    zeros = build.op("Sub", [sizes, nonzero], like=sizes)
    shares = [build.op("Div", [counted, elements], like=sizes) for counted in (zeros, overflow)]
    numbers = build.op("Concat", [largest, *shares], shape=[shape[0] * shape[1]], axis=0)
    return build.op("Reshape", [numbers, build.number(shape, _INDEX)], shape=shape)


def _measure_one(build: Builder, gradient: ir.Value) -> list[ir.Value]:
    """Add nodes for the largest magnitude, and the numbers of nonzero, of infinite or NaN, and of all elements: [1]."""
    flat, products, zero, wide = flatten(build, gradient, dtype_of(gradient), build.number([-1], _INDEX))
    bad = build.op("IsNaN", [products], like=flat, dtype=_FLAG)
    size = build.op("Abs", [flat], like=flat, dtype=wide)
    finite = build.op("Where", [bad, zero, size], like=flat, dtype=wide)
    # A gradient without elements has a largest magnitude, too.
    finite = build.op("Concat", [finite, build.number([0], wide)], dtype=wide, shape=[None], axis=0)
    largest = build.op("ReduceMax", [finite], dtype=wide, shape=[1], keepdims=1)
    flags = [build.cast(flat, _FLAG), bad]
    counts = [build.op("ReduceSum", [build.cast(flag, _REAL)], shape=[1], keepdims=1) for flag in flags]
    elements = build.op("Shape", [flat], dtype=_INDEX, shape=[1])
    return [build.cast(largest, _REAL), *counts, build.cast(elements, _REAL)]
