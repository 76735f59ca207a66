"""Rules of gathers and scatters: rows of a matrix, chosen by one number each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.lax import GatherScatterMode

from graphscale.exporters.jax.onnx_primitives import put_rows, take_rows
from graphscale.exporters.jax.rewriting import is_number, rule

__all__: list[str] = []

_REDUCTIONS = {
    "scatter": "none",
    "scatter-add": "add",
    "scatter-mul": "mul",
    "scatter-min": "min",
    "scatter-max": "max",
}


class _Rows:
    """A gather or scatter as one of rows: the axes that are indexed come first, and make one.

    Args:
        shape: the shape of the operand.
        indices: start indices, `[..., number of indexed axes]`.
        index_map: the axis of the operand for each number of an index.
        batch: pairs of an axis of the operand and the axis of the indices that goes with it.
        hidden: axes of the operand that the slices lack.
        sizes: sizes of a slice along each axis of the operand.
        mode: treatment of indices outside.

    Attributes:
        row: number of the row of each index, and of each place in its slice, int32.
        inside: flags of the indices whose slice is in the operand; None where they are not needed.
    """

    def __init__(
        self,
        shape: Sequence[Any],
        indices: Any,
        index_map: Sequence[int],
        batch: Sequence[tuple[int, int]],
        hidden: Sequence[int],
        sizes: Sequence[Any],
        mode: Any,
    ) -> None:
        self.shape, self.batch_shape = tuple(shape), tuple(indices.shape[:-1])
        rank = len(self.batch_shape)
        starts, self.inside = {}, None
        for position, axis in enumerate(index_map):
            start = lax.convert_element_type(lax.index_in_dim(indices, position, rank, keepdims=False), np.int32)
            last = jnp.broadcast_to(_as_int(shape[axis] - sizes[axis]), start.shape)
            if mode == GatherScatterMode.FILL_OR_DROP:
                fits = lax.bitwise_and(lax.ge(start, jnp.zeros_like(start)), lax.le(start, last))
                self.inside = fits if self.inside is None else lax.bitwise_and(self.inside, fits)
            starts[axis] = lax.min(lax.max(start, jnp.zeros_like(start)), last)
        for axis, at in batch:
            starts[axis] = lax.broadcasted_iota(np.int32, self.batch_shape, at)
        self.indexed = [axis for axis in range(len(shape)) if axis in hidden or not _equal(sizes[axis], shape[axis])]
        self.kept = [axis for axis in range(len(shape)) if axis not in self.indexed]
        self.windows = [axis for axis in self.indexed if axis not in hidden]
        wide = (*self.batch_shape, *(sizes[axis] for axis in self.windows))
        row: Any = jnp.zeros(wide, np.int32)
        for axis in self.indexed:
            row = lax.mul(row, jnp.broadcast_to(_as_int(shape[axis]), wide))
            if axis in starts:
                row = lax.add(row, jnp.broadcast_to(lax.expand_dims(starts[axis], range(rank, len(wide))), wide))
            if axis in self.windows:
                row = lax.add(row, lax.broadcasted_iota(np.int32, wide, rank + self.windows.index(axis)))
        self.row = row
        self.count = math.prod(shape[axis] for axis in self.indexed)
        self.rest = tuple(shape[axis] for axis in self.kept)

    def to_rows(self, operand: Any) -> Any:
        """Return the operand as `[rows, ...]`."""
        return lax.reshape(lax.transpose(operand, (*self.indexed, *self.kept)), (self.count, *self.rest))

    def from_rows(self, rows: Any) -> Any:
        """Return rows as the operand."""
        order = [*self.indexed, *self.kept]
        moved = lax.reshape(rows, tuple(self.shape[axis] for axis in order))
        return lax.transpose(moved, tuple(order.index(axis) for axis in range(len(order))))

    def order(self, slice_axes: Sequence[int]) -> list[int]:
        """Return the axes of `[indices, places in slices, rest of the row]`, in the order of a gather's result.

        Args:
            slice_axes: the axes of the result that belong to the slices, in the order of the operand's axes.
        """
        rank = len(self.batch_shape)
        have = [*self.windows, *self.kept]
        slices, batches = iter(sorted(have)), iter(range(rank))
        return [
            rank + have.index(next(slices)) if axis in slice_axes else next(batches) for axis in range(rank + len(have))
        ]

    def spread(self, flags: Any, shape: Sequence[Any]) -> Any:
        """Repeat a flag of each index over its slice."""
        rank = len(self.batch_shape)
        return jnp.broadcast_to(lax.expand_dims(flags, range(rank, len(shape))), shape)


def _as_int(size: Any) -> Any:
    return np.int32(size) if isinstance(size, int) else lax.convert_element_type(jnp.asarray(size), np.int32)


def _equal(size: Any, other: Any) -> bool:
    return isinstance(size, int) == isinstance(other, int) and bool(size == other)


@rule("gather")
def _gather(
    operand: Any, indices: Any, dimension_numbers: Any, slice_sizes: Sequence[Any], mode: Any, fill_value: Any, **_: Any
) -> Any:
    numbers = dimension_numbers
    hidden = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    batch = list(zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True))
    index_map = numbers.start_index_map
    # XLA moves an index outside into the operand, whatever was promised.
    rows = _Rows(operand.shape, indices, index_map, batch, hidden, slice_sizes, mode)
    found = take_rows(rows.to_rows(operand), rows.row)
    if rows.inside is not None:
        filling = np.asarray(_fill_value(fill_value, operand.dtype), operand.dtype)
        found = lax.select(rows.spread(rows.inside, found.shape), found, jnp.full_like(found, filling))
    return lax.transpose(found, rows.order(numbers.offset_dims))


def _fill_value(value: Any, dtype: Any) -> Any:
    """Return the number for indices outside: `fill_value` of jax.lax.gather."""
    if value is not None:
        return value
    if jnp.issubdtype(dtype, np.inexact):
        return np.nan
    if jnp.issubdtype(dtype, np.bool_):
        return True
    return np.iinfo(dtype).min if jnp.issubdtype(dtype, np.signedinteger) else np.iinfo(dtype).max


@rule("dynamic_slice")
def _dynamic_slice(operand: Any, *starts: Any, slice_sizes: Sequence[Any], **_: Any) -> Any:
    if all(is_number(start) for start in starts) and all(isinstance(size, int) for size in operand.shape):
        ends = [full - size for full, size in zip(operand.shape, slice_sizes, strict=True)]
        first = [int(np.clip(start, 0, end)) for start, end in zip(starts, ends, strict=True)]
        return lax.slice(operand, first, [start + size for start, size in zip(first, slice_sizes, strict=True)])
    axes = tuple(range(operand.ndim))
    rows = _Rows(operand.shape, _vector(starts), axes, (), (), slice_sizes, GatherScatterMode.CLIP)
    return lax.transpose(take_rows(rows.to_rows(operand), rows.row), rows.order(axes))


def _vector(starts: Sequence[Any]) -> Any:
    return lax.concatenate([jnp.reshape(lax.convert_element_type(start, np.int32), (1,)) for start in starts], 0)


@rule("dynamic_update_slice")
def _dynamic_update_slice(operand: Any, update: Any, *starts: Any) -> Any:
    axes = tuple(range(operand.ndim))
    rows = _Rows(operand.shape, _vector(starts), axes, (), (), update.shape, GatherScatterMode.CLIP)
    return _put(rows, operand, update, axes, "none")


def _scatter(name: str, reduction: str) -> None:
    @rule(name)
    def compute(operand: Any, indices: Any, updates: Any, dimension_numbers: Any, mode: Any, **_: Any) -> Any:
        numbers = dimension_numbers
        hidden = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
        windows = iter(updates.shape[axis] for axis in numbers.update_window_dims)
        sizes = [1 if axis in hidden else next(windows) for axis in range(operand.ndim)]
        batch = list(zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True))
        index_map = numbers.scatter_dims_to_operand_dims
        # XLA drops an update outside of the operand, whatever was promised.
        mode = GatherScatterMode.FILL_OR_DROP if mode == GatherScatterMode.PROMISE_IN_BOUNDS else mode
        rows = _Rows(operand.shape, indices, index_map, batch, hidden, sizes, mode)
        return _put(rows, operand, updates, numbers.update_window_dims, reduction)


for _name, _reduction in _REDUCTIONS.items():
    _scatter(_name, _reduction)


def _put(rows: _Rows, operand: Any, updates: Any, window_dims: Sequence[int], reduction: str) -> Any:
    """Put updates into the rows of the operand, or add them, each in the row of its index."""
    updates = lax.transpose(updates, np.argsort(rows.order(window_dims)))
    matrix, row = rows.to_rows(operand), rows.row
    if rows.inside is not None and reduction == "add":
        updates = lax.select(rows.spread(rows.inside, updates.shape), updates, jnp.zeros_like(updates))
    elif rows.inside is not None:
        # A row behind the last takes what belongs nowhere.
        spare = jnp.zeros((1, *matrix.shape[1:]), matrix.dtype)
        matrix = lax.concatenate([matrix, spare], 0)
        row = lax.select(rows.spread(rows.inside, row.shape), row, jnp.full_like(row, 0) + _as_int(rows.count))
    count = math.prod(row.shape)
    updates = lax.reshape(updates, (count, *rows.rest))
    result = put_rows(matrix, lax.reshape(row, (count, 1)), updates, reduction)
    if rows.inside is not None and reduction != "add":
        result = lax.slice_in_dim(result, 0, rows.count, axis=0)
    return rows.from_rows(result)
