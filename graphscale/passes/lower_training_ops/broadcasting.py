"""Repeated axes of an operand, and sums over them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from graphscale.passes.lower_training_ops.known_shapes import Sizes, known_sizes
from graphscale.passes.lower_training_ops.scattering import count_up
from graphscale.passes.lower_training_ops.writer import Writer

__all__ = ["repeated_axes", "sum_over", "sum_to"]

# More axes than any value has.
_MANY = 1 << 30


def repeated_axes(f: Writer, shape: ir.Value, other: ir.Value) -> ir.Value:
    """Return the axes, last first, along which a value of one shape is repeated beside a value of another shape.

    These are missing axes, and axes of size 1 where the other value has another size. The result is a constant if the
    model has enough shapes.
    """
    own, beside = known_sizes(shape), known_sizes(other)
    if own is None or beside is None:
        return _last_first(f, _repeated_of_any_number(f, shape, other))
    count = max(len(own), len(beside))
    lead, marks = count - len(own), _marks(own, beside)
    if None not in marks:
        return f.integers(*[axis for axis in reversed(range(count)) if marks[axis]])
    repeated = _repeated(f, _with_ones(f, shape, lead), _with_ones(f, other, count - len(beside)))
    return _last_first(f, f("Or", repeated, np.arange(count) < lead) if lead else repeated)


def sum_to(f: Writer, value: ir.Value, target: ir.Value) -> ir.Value:
    """Sum over the axes along which a target was repeated to a value's shape; the result has the target's shape."""
    shape = f.shape_of(target)
    own, beside = known_sizes(shape), known_sizes(f.shape_of(value))
    if own is None or beside is None:
        return f.reshape(sum_over(f, value, repeated_axes(f, shape, f.shape_of(value))), shape)
    lead = len(beside) - len(own)
    # A sum over an axis of size 1 changes nothing, so that such an axis need not be known as repeated.
    marks = [True if axis >= lead and own[axis - lead] == 1 else mark for axis, mark in enumerate(_marks(own, beside))]
    if None in marks:
        return f.reshape(sum_over(f, value, repeated_axes(f, shape, f.shape_of(value))), shape)
    axes = [axis for axis, mark in enumerate(marks) if mark and not (axis >= lead and beside[axis] == 1)]
    summed = f.reduce_sum(value, axes)
    return f.reshape(summed, shape) if lead else summed


def sum_over(f: Writer, value: ir.Value, axes: ir.Value) -> ir.Value:
    """Sum over computed axes, kept with size 1.

    Before opset 13, axes cannot be an operand: for each axis, the sum is appended to the value, and a slice chooses
    one.
    """
    if f.opset >= 13:
        return f("ReduceSum", value, axes, keepdims=1, noop_with_empty_axes=1)
    rank = f.rank(value)
    same = f("Equal", f.unsqueeze(f("Mod", axes, rank), [1]), np.arange(rank)[None])
    chosen = f.reduce_sum(f("Cast", same, to=ir.DataType.INT64), [0], keepdims=False)
    sizes = f.shape_of(value)
    starts = f("Mul", chosen, sizes)
    ends = f("Add", chosen, sizes)
    for axis in range(rank):
        start, end = (f("Gather", bounds, f.integers(axis)) for bounds in (starts, ends))
        joined = f("Concat", value, f.reduce_sum(value, [axis]), axis=axis)
        value = f("Slice", joined, start, end, f.integers(axis))
    return value


def _repeated_of_any_number(f: Writer, shape: ir.Value, other: ir.Value) -> ir.Value:
    """Mark the repeated axes of a value, where the numbers of axes are known only at run time."""
    if f.opset < 11:
        raise f.refusal("the number of axes is not known; run shape inference on the model")
    own, beside = f("Shape", shape), f("Shape", other)
    count = f("Where", f("Greater", own, beside), own, beside)
    lead, less = f("Sub", count, own), f("Sub", count, beside)
    repeated = _repeated(f, f("Concat", _ones(f, lead), shape, axis=0), f("Concat", _ones(f, less), other, axis=0))
    return f("Or", repeated, f("Less", count_up(f, count), lead))


def _repeated(f: Writer, mine: ir.Value, theirs: ir.Value) -> ir.Value:
    return f("And", f("Equal", mine, 1), f("Not", f("Equal", theirs, 1)))


def _last_first(f: Writer, marks: ir.Value) -> ir.Value:
    """Return the positions of marks, the last one first."""
    axes = f.squeeze(f("NonZero", marks), [0])
    return f("Slice", axes, f.integers(-1), f.integers(-_MANY), f.integers(0), f.integers(-1))


def _ones(f: Writer, count: ir.Value) -> ir.Value:
    return f("ConstantOfShape", count, value=ir.tensor(np.ones(1, np.int64)))


def _marks(own: Sizes, beside: Sizes) -> Sequence[bool | None]:
    """Return for each axis of the result whether one shape is repeated beside the other; None where unknown."""
    lead = len(beside) - len(own)
    marks: list[bool | None] = [True] * lead
    for axis in range(len(own)):
        size, other = own[axis], beside[axis + lead] if axis + lead >= 0 else 1
        is_same = size == other and size is not None
        if is_same or other == 1 or (isinstance(size, int) and size != 1):
            marks.append(False)
        else:
            marks.append(True if isinstance(size, int) and isinstance(other, int) else None)
    return marks


def _with_ones(f: Writer, shape: ir.Value, count: int) -> ir.Value:
    return f("Concat", np.ones(count, np.int64), shape, axis=0) if count else shape
