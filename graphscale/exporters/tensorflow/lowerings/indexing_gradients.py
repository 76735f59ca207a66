"""Gradients of slices and of gathers, and operators on shapes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from onnx import TensorProto

from graphscale.exporters.tensorflow.lowerings.lowering_writer import NodeWriter, lower, static_numbers

_LAST = np.iinfo(np.int32).max


@lower("StridedSliceGrad")
def strided_slice(write: NodeWriter, node: Any) -> str:
    """Put the gradient back where the slice was taken from, zeros elsewhere."""
    shape = static_numbers(write, node, 0)
    parts = _axes_of_slice(node, shape, *(static_numbers(write, node, index) for index in (1, 2, 3)))
    axes = range(len(shape))
    sizes = [size if part is None else part.size for part, size in zip(parts, shape, strict=True)]
    value = write.reshape(node.input[4], sizes)
    backwards = [axis for axis in axes if (part := parts[axis]) is not None and part.backwards]
    if backwards:
        minus, first = write.integers([-1] * len(backwards)), write.integers([-_LAST] * len(backwards))
        value = write.op("Slice", value, minus, first, write.integers(backwards), minus)
    for axis in reversed(axes):
        part = parts[axis]
        if part is not None and part.step > 1 and part.size > 1:
            # Zeros behind each element, and the last ones cut off again.
            pads = [0] * (2 * len(shape) + 2)
            pads[len(shape) + 1 + axis + 1] = part.step - 1
            sizes[axis] = part.size * part.step
            spread = write.op("Pad", write.op("Unsqueeze", value, write.integers([axis + 1])), write.integers(pads))
            sizes[axis], wide = (part.size - 1) * part.step + 1, sizes
            value = write.reshape(spread, [part.size * part.step if each == axis else wide[each] for each in axes])
            value = write.op("Slice", value, write.integers([0]), write.integers([sizes[axis]]), write.integers([axis]))
    before = [0 if part is None else part.start for part in parts]
    if all(part is None or size != -1 for part, size in zip(parts, shape, strict=True)):
        after = [0 if parts[axis] is None else shape[axis] - before[axis] - sizes[axis] for axis in axes]
        return write.op("Pad", value, write.integers([*before, *after]))
    full = write.op("Cast", node.input[0], to=TensorProto.INT64)
    from_end = write.integers([int(start < 0) for start in before])
    begins = write.op("Add", write.integers(before), write.op("Mul", full, from_end))
    rest = write.op("Sub", write.op("Sub", full, begins), write.op("Shape", value))
    return write.op("Pad", value, write.op("Concat", begins, rest, axis=0))


@dataclass(frozen=True)
class _Part:
    """Positions of a slice along an axis, from the first to the last; a size of -1 is not known."""

    start: int
    size: int
    step: int = 1
    backwards: bool = False


def _axes_of_slice(
    node: Any, shape: list[int], begin: list[int], end: list[int], strides: list[int]
) -> list[_Part | None]:
    """Return the positions that a slice takes along each axis; None where it takes all of them."""
    masks = {
        key: node.get_attr_value(f"{key}_mask") or 0 for key in ("begin", "end", "shrink_axis", "new_axis", "ellipsis")
    }
    entries = range(len(begin))
    own = sum(1 for entry in entries if not (masks["new_axis"] | masks["ellipsis"]) >> entry & 1)
    parts: list[_Part | None] = []
    for entry in entries:
        if masks["ellipsis"] >> entry & 1:
            parts += [None] * (len(shape) - own)
        elif not masks["new_axis"] >> entry & 1:
            start = None if masks["begin"] >> entry & 1 else begin[entry]
            stop = None if masks["end"] >> entry & 1 else end[entry]
            single = bool(masks["shrink_axis"] >> entry & 1)
            parts.append(_part_of(shape[len(parts)], start, stop, strides[entry], single))
    return parts + [None] * (len(shape) - len(parts))


def _part_of(size: int, start: int | None, stop: int | None, step: int, single: bool) -> _Part | None:
    if single:
        start, stop, step = start or 0, None if start == -1 else (start or 0) + 1, 1
    if start is None and stop is None and step == 1:
        return None
    if size == -1:
        if step != 1:
            raise NotImplementedError("steps along the batch")
        return _Part(start or 0, 1 if single else -1)
    taken = range(size)[start:stop:step]
    forward = taken[::-1] if step < 0 else taken
    return _Part(forward.start if len(taken) else 0, len(taken), abs(step), step < 0)


@lower("ConcatOffset")
def concat_offset(write: NodeWriter, node: Any) -> tuple[str, ...]:
    """Return the positions where the parts of a concatenation begin."""
    kind, rank = write.ctx.get_dtype(node.output[0]), write.ctx.get_shape(node.input[1])[0]
    (axis,) = static_numbers(write, node, 0)
    own = write.constant([int(each == axis % rank) for each in range(rank)])
    begins = [write.op("Mul", own, write.constant(0))]
    for shape in node.input[1:-1]:
        begins.append(write.op("Add", begins[-1], write.op("Mul", own, write.op("Cast", shape, to=kind))))
    return tuple(begins)


@lower("UnsortedSegmentSum")
def segment_sum(write: NodeWriter, node: Any) -> str:
    """Add rows where their index says, and drop those of a negative index: the gradient of an embedding."""
    data, index = node.input[:2]
    (count,) = static_numbers(write, node, 2)
    rank = len(write.ctx.get_shape(index))
    places = write.reshape(write.op("Cast", index, to=TensorProto.INT64), [-1])
    behind = write.op("Slice", write.op("Shape", data), write.integers([rank]), write.integers([_LAST]))
    rows = write.op("Reshape", data, write.op("Concat", write.op("Shape", places), write.integers([-1]), axis=0))
    size = write.op("Shape", rows)
    places = write.op("Unsqueeze", places, write.integers([1]))
    # ScatterElements of ONNX counts negative indices from the end.
    none = write.constant(0, np.int64)
    rows = write.op("Where", write.op("Less", places, none), write.constant(0), rows)
    wide = write.op("Expand", write.op("Max", places, none), size)
    width = write.op("Slice", size, write.integers([1]), write.integers([2]))
    zeros = write.op("Expand", write.constant(0), write.op("Concat", write.integers([count]), width, axis=0))
    summed = write.scatter_sums(zeros, wide, rows)
    return write.op("Reshape", summed, write.op("Concat", write.integers([count]), behind, axis=0))


@lower("OneHot")
def one_hot(write: NodeWriter, node: Any) -> str:
    """Return one number at each index and another elsewhere, which stands alone for an index out of range."""
    index, count, on, off = node.input
    if node.inputs[1].is_const():
        (count,) = static_numbers(write, node, 1)
    if write.ctx.get_dtype(index) not in (TensorProto.INT32, TensorProto.INT64):
        index = write.op("Cast", index, to=TensorProto.INT64)
    is_there = write.equals_position(index, count, node.get_attr_value("axis", -1))
    if write.ctx.get_dtype(on) != TensorProto.BOOL:
        return write.op("Where", is_there, on, off)
    # ONNX Runtime has no Where of bool.
    numbers = (write.op("Cast", value, to=TensorProto.INT32) for value in (on, off))
    return write.op("Cast", write.op("Where", is_there, *numbers), to=TensorProto.BOOL)


@lower("ShapeN")
def shapes(write: NodeWriter, node: Any) -> tuple[str, ...]:
    """Return the shape of each tensor."""
    kind = write.ctx.get_dtype(node.output[0])
    return tuple(write.op("Cast", write.op("Shape", value), to=kind) for value in node.input)
