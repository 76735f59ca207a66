"""Sums of rows, or of single elements, with repeated places.

ScatterND with a reduction is not used: the CPU kernel of ONNX Runtime 1.32 adds up in several threads without a lock,
and loses updates of equal places. ScatterElements has a reduction since opset 16.
"""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from graphscale.passes.lower_training_ops.known_shapes import known_numbers, known_sizes, sizes_of
from graphscale.passes.lower_training_ops.schema_types import widened
from graphscale.passes.lower_training_ops.writer import Writer

__all__ = ["add_elements", "add_rows", "count_up", "scatter", "size_at", "wrapped", "zeros"]

# Up to this number of rows, a product with a matrix of zeros and ones is faster than ScatterElements, measured with
# ONNX Runtime 1.32 on the CPU for 2 to 30000 rows of 64 to 512 elements.
_FEW = 256


def add_rows(f: Writer, rows: ir.Value, updates: ir.Value, height: ir.Value, shape: ir.Value) -> ir.Value:
    """Return `result[rows[i]] += updates[i]`, the result being zeros before.

    With a non-finite update, a product with zeros and ones makes too many elements of the result NaN.

    Args:
        f: the writer of the nodes.
        rows: the numbers of rows, not negative, of any shape but a scalar.
        updates: the updates, with the shape of `rows` followed by that of a row.
        height: the number of rows of the result, in a vector.
        shape: the shape of the result, with any axes for the rows.
    """
    places, most = sizes_of(rows), next(iter(known_numbers(height) or ()), None)
    sizes = [size for size in places or (None,) if isinstance(size, int)]
    count = math.prod(sizes) if places is not None and len(sizes) == len(places) else None
    flat = rows if f.rank(rows) == 1 else f.reshape(rows, [-1])
    matrix = f("Flatten", updates, axis=f.rank(rows))
    is_low = most is not None and (most <= _FEW or (f.opset < 16 and count is not None and most <= count))
    if is_low or f.opset < 11:
        chosen = f("Equal", f.unsqueeze(_like(f, count_up(f, height), flat), [1]), f.unsqueeze(flat, [0]))
        return f.reshape(f("MatMul", f("Cast", chosen, to=f.dtype), matrix), shape)
    extent = _joined(f, height, size_at(f, f.shape_of(matrix), 1))
    flat = f.unsqueeze(flat, [1])
    if f.opset >= 16 and (count is None or count > _FEW):
        return f.reshape(_add_up(f, f.expand(flat, f.shape_of(matrix)), matrix, extent, 0), shape)
    # Updates of equal places become equal, so that their order does not matter.
    same = f("Equal", flat, f("Transpose", flat, perm=[1, 0]))
    matrix = f("MatMul", f("Cast", same, to=f.dtype), matrix)
    return f.reshape(f("ScatterND", zeros(f, extent), f.cast(flat, ir.DataType.INT64), matrix), shape)


def add_elements(f: Writer, places: ir.Value, updates: ir.Value, shape: ir.Value, axis: int) -> ir.Value:
    """Return `result[.., places[.., i, ..], ..] += updates[.., i, ..]`, the result being zeros of a shape before."""
    if f.opset >= 16:
        return _add_up(f, places, updates, shape, axis)
    axis %= f.rank(updates)
    places = wrapped(f, places, size_at(f, shape, axis))
    same = f("Equal", f.unsqueeze(places, [axis + 1]), f.unsqueeze(places, [axis]))
    sums = f.reduce_sum(f("Where", same, f.unsqueeze(updates, [axis]), 0.0), [axis + 1], keepdims=False)
    return scatter(f, zeros(f, shape), places, sums, axis)


def _add_up(f: Writer, places: ir.Value, updates: ir.Value, shape: ir.Value, axis: int) -> ir.Value:
    # The CPU kernel does not add up narrow types, and their sums are less precise than those of float32.
    wide = widened(f.dtype)
    target, updates = zeros(f, shape, wide), f.cast(updates, wide)
    return f.cast(f("ScatterElements", target, places, updates, axis=axis, reduction="add"), f.dtype)


def scatter(f: Writer, data: ir.Value, places: ir.Value, updates: ir.Value, axis: int) -> ir.Value:
    """Write ScatterElements, or Scatter before opset 11."""
    return f("ScatterElements" if f.opset >= 11 else "Scatter", data, places, updates, axis=axis)


def zeros(f: Writer, shape: ir.Value, dtype: ir.DataType | None = None) -> ir.Value:
    """Return zeros, by default of the dtype of the node's data."""
    return f.expand(f.number(0.0, dtype), shape)


def size_at(f: Writer, shape: ir.Value, axis: int) -> ir.Value:
    """Return one size of a shape in a vector, a constant if known."""
    size = (known_sizes(shape) or {axis: None})[axis]
    return f.integers(size) if isinstance(size, int) else f("Gather", shape, f.integers(axis))


def count_up(f: Writer, count: ir.Value) -> ir.Value:
    """Return the numbers from 0 on; a vector of one element has their count."""
    known = known_numbers(count)
    if known is not None and known[0] <= _FEW:
        return f.constant(np.arange(known[0]))
    if f.opset < 11:
        return f.squeeze(f("NonZero", f.expand(f.integers(1), count)), [0])
    return f("Range", 0, f.squeeze(count, [0]), 1)


def wrapped(f: Writer, indices: ir.Value, size: ir.Value) -> ir.Value:
    """Return indices counted from the front: negative ones count from the back of an axis of this size."""
    return f("Where", f("Less", indices, 0), f("Add", indices, _like(f, size, indices)), indices)


def _like(f: Writer, value: ir.Value, other: ir.Value) -> ir.Value:
    return f.cast(value, other.dtype or ir.DataType.INT64)


def _joined(f: Writer, *parts: ir.Value) -> ir.Value:
    known = [number for part in parts for number in known_numbers(part) or ()]
    return f.integers(*known) if len(known) == len(parts) else f("Concat", *parts, axis=0)
