"""Gradients of slices and of gathers, and operators on shapes."""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx import TensorProto

from graphscale.exporters.tensorflow.lowerings.node_writer import NodeWriter, lower, static_numbers

_LAST = np.iinfo(np.int32).max


@lower("StridedSliceGrad")
def strided_slice(write: NodeWriter, node: Any) -> str:
    """Put the gradient back where the slice was taken from, zeros elsewhere."""
    shape = static_numbers(write, node, 0)
    parts = _axes_of_slice(node, shape, *(static_numbers(write, node, index) for index in (1, 2, 3)))
    axes = range(len(shape))
    sizes = [len(part) if part is not None else size for part, size in zip(parts, shape, strict=True)]
    value = write.reshape(node.input[4], sizes)
    backwards = [axis for axis in axes if (part := parts[axis]) is not None and part.step < 0]
    if backwards:
        minus, first = write.integers([-1] * len(backwards)), write.integers([-_LAST] * len(backwards))
        value = write.op("Slice", value, minus, first, write.integers(backwards), minus)
    forward = [part[::-1] if part is not None and part.step < 0 else part for part in parts]
    for axis in reversed(axes):
        part = forward[axis]
        if part is not None and part.step > 1 and len(part) > 1:
            # Zeros behind each element, and the last ones cut off again.
            value = write.op("Unsqueeze", value, write.integers([axis + 1]))
            pads = [0] * (2 * len(shape) + 2)
            pads[len(shape) + 1 + axis + 1] = part.step - 1
            sizes[axis] = len(part) * part.step
            value = write.reshape(write.op("Pad", value, write.integers(pads)), sizes)
            sizes[axis] -= part.step - 1
            ends = write.integers([sizes[axis]])
            value = write.op("Slice", value, write.integers([0]), ends, write.integers([axis]))
    before = [part.start if part else 0 for part in forward]
    after = [shape[axis] - before[axis] - sizes[axis] if forward[axis] is not None else 0 for axis in axes]
    return write.op("Pad", value, write.integers([*before, *after]))


def _axes_of_slice(
    node: Any, shape: list[int], begin: list[int], end: list[int], strides: list[int]
) -> list[range | None]:
    """Return the positions that a slice takes along each axis; None where it takes all of them."""
    masks = {
        key: node.get_attr_value(f"{key}_mask") or 0 for key in ("begin", "end", "shrink_axis", "new_axis", "ellipsis")
    }
    entries = range(len(begin))
    own = sum(1 for entry in entries if not (masks["new_axis"] | masks["ellipsis"]) >> entry & 1)
    parts: list[range | None] = []
    for entry in entries:
        if masks["ellipsis"] >> entry & 1:
            parts += [None] * (len(shape) - own)
        elif not masks["new_axis"] >> entry & 1:
            size = shape[len(parts)]
            start = None if masks["begin"] >> entry & 1 else begin[entry]
            stop = None if masks["end"] >> entry & 1 else end[entry]
            if masks["shrink_axis"] >> entry & 1:
                start, stop = begin[entry], None if begin[entry] == -1 else begin[entry] + 1
            if start is None and stop is None and strides[entry] == 1:
                parts.append(None)
                continue
            if size == -1:
                raise NotImplementedError("a slice of the batch")
            parts.append(range(size)[start : stop : strides[entry]])
    return parts + [None] * (len(shape) - len(parts))


@lower("UnsortedSegmentSum")
def segment_sum(write: NodeWriter, node: Any) -> str:
    """Add rows where their index says: the gradient of an embedding."""
    data, index = node.input[:2]
    (count,) = static_numbers(write, node, 2)
    rank = len(write.shape(index))
    shape = write.shape(data)[rank:]
    width = int(np.prod(shape))
    rows = write.reshape(data, [-1, width])
    places = write.reshape(write.op("Cast", index, to=TensorProto.INT64), [-1, 1])
    wide = write.op("Expand", places, write.op("Shape", rows))
    zeros = write.op("Expand", write.constant(0), write.integers([count, width]))
    return write.reshape(write.op("ScatterElements", zeros, wide, rows, axis=0, reduction="add"), [count, *shape])


@lower("ShapeN")
def shapes(write: NodeWriter, node: Any) -> tuple[str, ...]:
    kind = write.ctx.get_dtype(node.output[0])
    return tuple(write.op("Cast", write.op("Shape", value), to=kind) for value in node.input)


@lower("BroadcastGradientArgs")
def broadcast_axes(write: NodeWriter, node: Any) -> tuple[str, str]:
    """Return the axes along which each of two tensors was repeated; two sizes of the batch are equal."""
    left, right = (static_numbers(write, node, index) for index in (0, 1))
    rank = max(len(left), len(right))
    left, right = ([1] * (rank - len(each)) + each for each in (left, right))
    sizes = list(zip(left, right, strict=True))
    return (
        write.constant([axis for axis, (own, other) in enumerate(sizes) if own == 1 != other]),
        write.constant([axis for axis, (other, own) in enumerate(sizes) if own == 1 != other]),
    )
