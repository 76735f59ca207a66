"""Sums and tests over whole values."""

from __future__ import annotations

import onnx_ir as ir

from graphscale.graph.types import dtype_of
from graphscale.operators import MICROSOFT
from graphscale.passes.lower_training_ops.broadcasting import sum_over
from graphscale.passes.lower_training_ops.known_shapes import known_numbers
from graphscale.passes.lower_training_ops.schema_types import widened
from graphscale.passes.lower_training_ops.writer import Formula, Writer
from graphscale.passes.nodes.finite import all_finite
from graphscale.targets import get_target

__all__ = ["FORMULAS"]


def _reduce_sum(f: Writer) -> list[ir.Value]:
    """Sum over the axes in an operand, as ReduceSum of opset 13 does."""
    x, axes = f.data(0), f.data(1)
    keepdims, keeps_all = bool(f.attribute("keepdims", 1)), bool(f.attribute("noop_with_empty_axes", 0))
    known = known_numbers(axes)
    if known is not None:
        return [x if not known and keeps_all else f.reduce_sum(x, known or None, keepdims)]
    if f.opset >= 13:
        return [f("ReduceSum", x, axes, keepdims=int(keepdims), noop_with_empty_axes=int(keeps_all))]
    if not (keepdims and keeps_all):
        raise f.refusal("computed axes need opset 13, or keepdims and noop_with_empty_axes")
    return [sum_over(f, x, axes)]


def _all_l2(f: Writer) -> list[ir.Value]:
    """Compute `sqrt(sum(x * x))` over the elements of all inputs, from the schema."""
    out = f.node.outputs[0].dtype or dtype_of(f.data(0))
    squares = []
    for i in range(len(f.node.inputs)):
        # The sum of squares may exceed the range of narrow types.
        squares.append(f("ReduceSumSquare", f.cast(f.data(i), widened(out)), keepdims=0))
    return [f.cast(f("Sqrt", f("Sum", *squares)), out)]


def _is_finite(f: Writer) -> list[ir.Value]:
    """Test each element, as the schema says: 0 * x is NaN for NaN and infinity, and 0 for other numbers."""
    x = f.cast(f.data(0), widened(dtype_of(f.data(0))))
    return [f("Not", f("IsNaN", f("Mul", x, 0.0)))]


def _is_all_finite(f: Writer) -> list[ir.Value]:
    """Test all elements of all inputs together, as the finite check of scaled graphs does.

    With `isinf_only` no element may be infinite, with `isnan_only` none may be NaN, as the schema says.
    """
    values = [f.data(i) for i in range(len(f.node.inputs))]
    chosen = {"isinf_only": "IsInf", "isnan_only": "IsNaN"}
    tests = [test for name, test in chosen.items() if f.attribute(name, 0)]
    if not tests:
        return [all_finite(f.build, values, get_target("onnx"))]
    if len(tests) > 1:
        raise f.refusal("isinf_only and isnan_only are both set")
    failing = (f(tests[0], f.cast(value, widened(dtype_of(value)))) for value in values)
    return [_none(f, *failing)]


def _all(f: Writer) -> list[ir.Value]:
    """Test whether all elements are true, as the schema says: none is false."""
    return [_none(f, f("Not", f.data(0)))]


def _none(f: Writer, *values: ir.Value) -> ir.Value:
    """Test whether no element of any value is true."""
    counts = [f("ReduceSum", f("Cast", value, to=ir.DataType.FLOAT), keepdims=0) for value in values]
    total = f("Sum", *counts) if len(counts) > 1 else counts[0]
    return f("Not", f("Cast", total, to=ir.DataType.BOOL))


FORMULAS: dict[tuple[str, str], Formula] = {
    (MICROSOFT, "ReduceSumTraining"): _reduce_sum,
    (MICROSOFT, "ReduceAllL2"): _all_l2,
    (MICROSOFT, "IsFinite"): _is_finite,
    (MICROSOFT, "IsAllFinite"): _is_all_finite,
    (MICROSOFT, "All"): _all,
}
