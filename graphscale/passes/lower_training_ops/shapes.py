"""Operators that move data, or compute with shapes."""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from graphscale.operators import MICROSOFT
from graphscale.passes.lower_training_ops.broadcasting import repeated_axes
from graphscale.passes.lower_training_ops.known_shapes import known_numbers, sizes_of
from graphscale.passes.lower_training_ops.writer import Formula, Writer

__all__ = ["FORMULAS"]


def _concat(f: Writer) -> list[ir.Value | None]:
    """Join the inputs along an axis; the second result has their sizes along it, as the schema says.

    The kernel omits the second result where the first one is empty.
    """
    parts = [f.data(i) for i in range(len(f.node.inputs))]
    axis = f.axis(parts[0], f.attribute("axis"))
    joined = f("Concat", *parts, axis=axis)
    if not f.wants(1):
        return [joined]
    sizes = [(sizes_of(part) or ())[axis] if part.shape is not None else None for part in parts]
    known = [size for size in sizes if isinstance(size, int)]
    if len(known) == len(parts):
        return [joined, f.integers(*known)]
    lengths = [f("Gather", f.shape_of(part), f.integers(axis)) for part in parts]
    return [joined, f("Concat", *lengths, axis=0)]


def _split(f: Writer) -> list[ir.Value]:
    """Split a value along an axis, as the schema says; an operand has the sizes of the parts."""
    return _parts(f, f.data(0), f.data(1), f.attribute("axis", 0))


def _view(f: Writer) -> list[ir.Value]:
    """Cut the elements of a value, in order, into results of the shapes given, as the schema says."""
    shapes = [f.data(i) for i in range(1, len(f.node.inputs))]
    if len(shapes) == 1:
        return [f.reshape(f.data(0), shapes[0])]
    numbers = [known_numbers(shape) for shape in shapes]
    known = [math.prod(sizes) for sizes in numbers if sizes is not None]
    if len(known) == len(shapes):
        lengths = f.integers(*known)
    else:
        lengths = f("Concat", *(f("ReduceProd", shape, keepdims=1) for shape in shapes), axis=0)
    parts = _parts(f, f.reshape(f.data(0), [-1]), lengths, 0)
    return [f.reshape(part, shape) for part, shape in zip(parts, shapes, strict=True)]


def _parts(f: Writer, value: ir.Value, lengths: ir.Value, axis: int) -> list[ir.Value]:
    count, axis = len(f.node.outputs), f.axis(value, axis)
    if f.opset >= 13:
        return list(f.several(count, "Split", value, lengths, axis=axis))
    if (known := known_numbers(lengths)) is not None:
        return list(f.several(count, "Split", value, axis=axis, split=known))
    parts, end = [], f.integers(0)
    for i in range(count):
        start, end = end, f("Add", end, f("Slice", lengths, f.integers(i), f.integers(i + 1), f.integers(0)))
        parts.append(f("Slice", value, start, end, f.integers(axis)))
    return parts


def _broadcast_axes(f: Writer) -> list[ir.Value | None]:
    """Return the axes along which each of two shapes is repeated beside the other, last first.

    Source: the kernel. These are missing axes, and axes of size 1 where the other shape has another size.
    """
    one, other = f.data(0), f.data(1)
    return [repeated_axes(f, *pair) if f.wants(i) else None for i, pair in enumerate(((one, other), (other, one)))]


def _group(f: Writer) -> list[ir.Value]:
    """Return true: all inputs exist.

    The schema has a scalar, and the kernel returns a vector of one element: the model's declared shape decides.
    """
    declared = f.node.outputs[0].shape
    return [f.constant(np.full(() if declared is not None and len(declared) == 0 else (1,), True))]


def _pass_through(f: Writer) -> list[ir.Value]:
    """Return each input, as the schema says."""
    return [f.data(i) for i in range(len(f.node.outputs))]


FORMULAS: dict[tuple[str, str], Formula] = {
    (MICROSOFT, "ConcatTraining"): _concat,
    (MICROSOFT, "SplitTraining"): _split,
    (MICROSOFT, "View"): _view,
    (MICROSOFT, "BroadcastGradientArgs"): _broadcast_axes,
    (MICROSOFT, "Group"): _group,
    (MICROSOFT, "PassThrough"): _pass_through,
}
