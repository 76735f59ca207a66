"""Statistics of a step: counts of steps and skips, the first gradient that is not finite, the cause; shares of zeros.

In every N-th step also ranges of the gradients: largest magnitude, share of zeros and share of overflow.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir

from graphscale.graph.builder import Builder, Editor
from graphscale.graph.types import dtype_of
from graphscale.targets import Target

__all__ = ["ROWS", "add_counters", "add_ranges", "find_offender", "read_zeros", "zero_fraction"]

# The rows of the ranges; the columns are the gradients, and last all of them together.
ROWS = ("largest", "zeros", "overflow")

_FLAG, _REAL, _INDEX = ir.DataType.BOOL, ir.DataType.FLOAT, ir.DataType.INT64
_NAN, _INF = 1, 2  # the causes; 0 is none


def add_counters(build: Builder, applies: ir.Value, kind: ir.DataType) -> dict[str, tuple[ir.Value, ir.Value]]:
    """Add counters, and return `{role: (present value, next value)}`, scalars: int64, or float32, exact to 2**24 steps.

    `applies` is a scalar bool value: whether the step is applied.
    """
    dtype, editor = kind.numpy(), build.editor
    roles = ("steps", "skipped_steps", "consecutive_skips", "last_skip_step")
    states = {role: editor.state(role, np.asarray(0, dtype=dtype)) for role in roles}
    one, zero = (editor.constant(f"graphscale/count.{n}", np.asarray(n, dtype=dtype)) for n in (1, 0))

    build = dataclasses.replace(build, dtype=kind, shape=())
    # Either way it is one, but it waits for the decision, as all other writes do.
    counted = build.op("Where", [applies, one, one], name="count")
    steps = build.op("Add", [states["steps"], counted], name="steps.next")
    skipped = build.op("Where", [applies, zero, one], name="count")
    all_skipped = build.op("Add", [states["skipped_steps"], skipped], name="skipped_steps.next")
    more = build.op("Add", [states["consecutive_skips"], one], name="count")
    in_a_row = build.op("Where", [applies, zero, more], name="consecutive_skips.next")
    last = build.op("Where", [applies, states["last_skip_step"], steps], name="last_skip_step.next")
    return dict(zip(roles, zip(states.values(), (steps, all_skipped, in_a_row, last), strict=True), strict=True))


def zero_fraction(build: Builder, gradients: Sequence[ir.Value]) -> ir.Value:
    """Add nodes that give the share of gradient elements that are zero, a float32 scalar from 0 to 1."""
    build = dataclasses.replace(build, prefix="zeros", dtype=_REAL, shape=())

    def count(flags: ir.Value) -> ir.Value:
        return build.op("ReduceSum", [build.cast(flags, _REAL)], keepdims=0)

    # A cast to bool gives true for all that is not zero, NaN too.
    flags = [build.cast(gradient, _FLAG) for gradient in gradients]
    nonzero = build.op("Sum", [count(flag) for flag in flags])
    total = _known_total(build.editor, gradients)
    if total is None:
        zeros = [count(build.op("Not", [flag], like=flag, dtype=_FLAG)) for flag in flags]
        total = build.op("Sum", [nonzero, *zeros])
    share = build.op("Div", [nonzero, total])
    one = build.editor.constant("graphscale/telemetry.one", np.asarray(1, dtype=np.float32))
    return build.op("Sub", [one, share], name="zero_fraction")


def _known_total(editor: Editor, gradients: Sequence[ir.Value]) -> ir.Value | None:
    """Add the number of elements, at least 1, as a constant, if all shapes are known."""
    known = [g.shape for g in gradients if g.shape is not None and g.shape.is_static()]
    if len(known) < len(gradients):
        return None
    total = max(1, sum(int(np.prod(shape.numpy(), dtype=np.int64)) for shape in known))
    return editor.constant("graphscale/telemetry.elements", np.asarray(total, dtype=np.float32))


def find_offender(
    build: Builder,
    gradients: Sequence[ir.Value],
    all_finite: ir.Value,
    target: Target,
    activations: Mapping[ir.Value, ir.DataType],
) -> tuple[ir.Value, ...]:
    """Add nodes that find the first gradient that is not finite, and the first such value of some others.

    On the CPU an `If` looks for it only after a step that is not finite. On CUDA, where an `If` waits for the host,
    every step pays for it.

    Args:
        build: the builder of the nodes.
        gradients: the gradients.
        all_finite: whether they are finite, a scalar bool value.
        target: decides between an `If` and standard nodes.
        activations: floating-point values of the forward pass with their dtypes; none on CUDA.

    Returns:
        int64 scalars: the cause, 0 none, 1 NaN, 2 infinity and no NaN in that gradient; the gradient's index, -1 for
        none; and the index of the first activation that is not finite, -1 for none, where there are activations.
    """
    if target.cuda:
        return _on_device(build, gradients, all_finite)
    finite = dataclasses.replace(build, prefix="finite").within(f"{build.mark}.finite")
    offender = dataclasses.replace(build, prefix="offender", dtype=_REAL, shape=()).within(f"{build.mark}.offender")
    names = ("skip_cause", "first_offender", "first_activation")[: 3 if activations else 2]
    found = _search(offender, gradients)
    found += (_first_bad(offender, activations),) if activations else ()
    branches = {
        "then_branch": finite.closed([finite.number(0, _INDEX), *(finite.number(-1, _INDEX) for _ in names[1:])]),
        "else_branch": offender.closed(found),
    }
    return tuple(build.node("If", [all_finite], [(n, _INDEX, ()) for n in names], attributes=branches).outputs)


def _on_device(build: Builder, gradients: Sequence[ir.Value], all_finite: ir.Value) -> tuple[ir.Value, ...]:
    build = dataclasses.replace(build, prefix="telemetry", dtype=_REAL, shape=())
    values = _search(build, gradients)
    results = []
    for name, value, nothing in zip(("skip_cause", "first_offender"), values, (0, -1), strict=True):
        constant = build.editor.constant(f"graphscale/telemetry.no_{name}", np.asarray(nothing, dtype=np.int64))
        results.append(build.op("Where", [all_finite, constant, value], name=name, dtype=_INDEX))
    return tuple(results)


def _first_bad(build: Builder, values: Mapping[ir.Value, ir.DataType]) -> ir.Value:
    """Add nodes that give the index of the first value that is not finite, -1 for none."""
    row, nothing = build.number([-1], _INDEX), build.number(0, _REAL)
    flags = [build.op("IsNaN", [_probe(build, value, dtype, row)[1]], dtype=_FLAG) for value, dtype in values.items()]
    bad = [build.op("Where", [flag, build.number(len(values) - i, _REAL), nothing]) for i, flag in enumerate(flags)]
    weight = build.op("Max", bad)
    position = build.cast(build.op("Sub", [build.number(len(values), _REAL), weight]), _INDEX)
    found = build.op("Greater", [weight, nothing], dtype=_FLAG)
    return build.op("Where", [found, position, build.number(-1, _INDEX)], dtype=_INDEX)


def _probe(build: Builder, value: ir.Value, dtype: ir.DataType, row: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Add nodes that give a value as a vector of float32 or float64, and a scalar: NaN if the value is not finite."""
    flat, products, _, wide = _flatten(build, value, dtype, row)
    return flat, build.op("ReduceSum", [products], dtype=wide, keepdims=0)


def _search(build: Builder, gradients: Sequence[ir.Value]) -> tuple[ir.Value, ...]:
    """Add nodes that give the cause and the index of the first gradient that is not finite, if there is one."""
    row = build.number([-1], _INDEX)
    count = len(gradients)
    nothing = build.number(0, _REAL)
    bad, nan = [], []
    for i, gradient in enumerate(gradients):
        flat, probe = _probe(build, gradient, dtype_of(gradient), row)
        own = build.number(count - i, _REAL)
        bad.append(build.op("Where", [build.op("IsNaN", [probe], dtype=_FLAG), own, nothing]))
        flags = build.cast(build.op("IsNaN", [flat], like=flat, dtype=_FLAG), _REAL)
        nan.append(build.op("ReduceSum", [flags], shape=[1], keepdims=1))
    # The first one at fault has the most weight. ArgMax and ReduceMax have no CUDA kernels in every opset and release.
    weight = build.op("Max", bad)
    number = build.number(count, _REAL)
    # If no gradient is at fault, the last position comes out, so that it is a position at all.
    position = build.op("Min", [build.op("Sub", [number, weight]), build.number(count - 1, _REAL)])
    index = build.cast(position, _INDEX)
    nans = build.op("Gather", [build.op("Concat", nan, shape=[count], axis=0), index], axis=0)
    has_nan = build.op("Greater", [nans, nothing], dtype=_FLAG)
    causes = [build.number(cause, _INDEX) for cause in (_NAN, _INF)]
    return build.op("Where", [has_nan, *causes], dtype=_INDEX), index


def add_ranges(
    build: Builder, gradients: Sequence[ir.Value], number: ir.Value, every: int
) -> tuple[ir.Value, ir.Value]:
    """Add an `If` that measures the gradients in a step whose turn it is, and hands on the present ranges in others.

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
    state = build.editor.state("gradient_ranges", np.zeros(shape, dtype=np.float32))
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
    """Add nodes that read the share of zeros over all `count` gradients, a float32 scalar, from the ranges."""
    zeros = build.op("Gather", [ranges, _constant(build, ROWS.index("zeros"))], dtype=_REAL, shape=[count + 1], axis=0)
    return build.op("Gather", [zeros, _constant(build, count)], name="zero_fraction", dtype=_REAL, shape=(), axis=0)


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
    flat, products, zero, wide = _flatten(build, gradient, dtype_of(gradient), build.number([-1], _INDEX))
    bad = build.op("IsNaN", [products], like=flat, dtype=_FLAG)
    size = build.op("Abs", [flat], like=flat, dtype=wide)
    finite = build.op("Where", [bad, zero, size], like=flat, dtype=wide)
    # A gradient without elements has a largest one, too.
    finite = build.op("Concat", [finite, build.number([0], wide)], dtype=wide, shape=[None], axis=0)
    largest = build.op("ReduceMax", [finite], dtype=wide, shape=[1], keepdims=1)
    flags = [build.cast(flat, _FLAG), bad]
    counts = [build.op("ReduceSum", [build.cast(flag, _REAL)], shape=[1], keepdims=1) for flag in flags]
    elements = build.op("Shape", [flat], dtype=_INDEX, shape=[1])
    return [build.cast(largest, _REAL), *counts, build.cast(elements, _REAL)]


def _flatten(
    build: Builder, value: ir.Value, dtype: ir.DataType, row: ir.Value
) -> tuple[ir.Value, ir.Value, ir.Value, ir.DataType]:
    """Add nodes that give a floating-point value as a vector, and its products with zero: NaN for infinity and NaN.

    The value has a dtype; `row` is the shape [-1].

    Returns:
        the vector, the products, the zero, and the dtype of all three: float64 for float64, else float32.
    """
    flat = build.op("Reshape", [value, row], dtype=dtype, shape=[None])
    # An infinity of float64 stays one; a finite number that float32 cannot hold would become one.
    wide = dtype if dtype is ir.DataType.DOUBLE else ir.DataType.FLOAT
    flat = flat if dtype is wide else build.cast(flat, wide)
    zero = build.number(0, wide)
    return flat, build.op("Mul", [flat, zero], like=flat, dtype=wide), zero, wide
