"""The derivatives of gathering, and gathering itself where stock ONNX Runtime lacks it."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from graphscale.operators import MICROSOFT
from graphscale.passes.lower_training_ops.known_shapes import known_numbers, sizes_of
from graphscale.passes.lower_training_ops.scattering import add_elements, add_rows, count_up, size_at, wrapped, zeros
from graphscale.passes.lower_training_ops.writer import Formula, Writer

__all__ = ["FORMULAS"]


def _gather_grad(f: Writer) -> list[ir.Value]:
    """Compute `dX[.., I[i], ..] += dY[.., i, ..]` along an axis, the indices I being of any shape, from the kernel."""
    shape, indices, dy = f.data(0), f.data(1), f.data(2)
    many = f.rank(indices)
    rank = f.rank(dy) - many + 1
    axis = f.attribute("axis", 0) % rank
    size = size_at(f, shape, axis)
    indices = wrapped(f, indices, size)
    if many == 0:
        numbers = f.cast(count_up(f, size), indices.dtype or ir.DataType.INT64)
        column = f.reshape(f("Equal", numbers, indices), [-1, *[1] * (rank - axis - 1)])
        return [f("Where", column, f.unsqueeze(dy, [axis]), 0.0)]
    if axis == 0:
        return [add_rows(f, indices, dy, size, shape)]
    order = [axis, *(i for i in range(rank) if i != axis)]
    rows = range(axis, axis + many)
    dy = f("Transpose", dy, perm=[*rows, *(i for i in range(rank + many - 1) if i not in rows)])
    turned = add_rows(f, indices, dy, size, f("Gather", shape, f.integers(*order)))
    return [f("Transpose", turned, perm=[order.index(i) for i in range(rank)])]


def _gather_elements_grad(f: Writer) -> list[ir.Value]:
    """Compute `dX[.., I[.., i, ..], ..] += dY[.., i, ..]` along an axis, from the kernel."""
    return [add_elements(f, f.data(2), f.data(0), f.data(1), f.attribute("axis", 0))]


def _gather_nd_grad(f: Writer) -> list[ir.Value]:
    """Compute `dX[b.., I[b.., i]] += dY[b.., i]`, the last axis of I being a place each, from the kernel.

    The first batch_dims axes b are those of dX itself. Horner's rule turns a place into the number of a row.
    """
    shape, indices, dy = f.data(0), f.data(1), f.data(2)
    batches, last = f.attribute("batch_dims", 0), f.rank(indices) - 1
    depth = (sizes_of(indices) or (None,))[-1]
    if not isinstance(depth, int):
        raise f.refusal("the last axis of the indices has no known size; run shape inference on the model")
    rows, height = f.integers(0), f.integers(1)
    for axis in range(batches + depth):
        size = size_at(f, shape, axis)
        if axis < batches:
            numbers = f.reshape(count_up(f, size), [-1, *[1] * (last - axis - 1)])
        else:
            column = f("Gather", indices, f.constant(np.asarray(axis - batches)), axis=last)
            numbers = wrapped(f, column, size)
        rows = f("Add", f("Mul", rows, size), numbers) if axis else numbers
        height = _product(f, height, size)
    if last == 0:  # a single place, a vector because of the sizes
        dy = f.unsqueeze(dy, [0])
    return [add_rows(f, rows, dy, height, shape)]


def _product(f: Writer, one: ir.Value, other: ir.Value) -> ir.Value:
    known, factor = known_numbers(one), known_numbers(other)
    return f.integers(known[0] * factor[0]) if known and factor else f("Mul", one, other)


def _shrunken_gather(f: Writer) -> list[ir.Value]:
    """Compute Gather, as the schema says."""
    return [f("Gather", f.data(0), f.data(1), axis=f.attribute("axis", 0))]


def _pad_and_unflatten(f: Writer) -> list[ir.Value]:
    """Write rows into different places of zeros, and split axis 0 of the result in two, as the schema says."""
    x, places, sizes = f.data(0), f.data(1), f.data(2)
    if f.opset < 11:
        raise f.refusal("ScatterND needs opset 11")
    row = _sizes_from(f, x, 1)
    count = f("ReduceProd", sizes, keepdims=1)
    rows = f("ScatterND", zeros(f, _joined(f, count, row)), f.unsqueeze(places, [1]), x)
    return [f.reshape(rows, _joined(f, sizes, row))]


def _flatten_and_unpad(f: Writer) -> list[ir.Value]:
    """Take rows of the first two axes together; the second result has their sizes, as the schema says."""
    x, places = f.data(0), f.data(1)
    sizes = f("Slice", f.shape_of(x), f.integers(0), f.integers(2), f.integers(0))
    flat = f.reshape(x, _joined(f, f("ReduceProd", sizes, keepdims=1), _sizes_from(f, x, 2)))
    return [f("Gather", flat, places, axis=0), sizes]


def _sizes_from(f: Writer, value: ir.Value, first: int) -> list[ir.Value]:
    """Return the sizes of an axis and all later ones, in one vector or in several."""
    if value.shape is None:
        return [f("Slice", f("Shape", value), f.integers(first), f.integers(np.iinfo(np.int64).max), f.integers(0))]
    return [size_at(f, f.shape_of(value), axis) for axis in range(first, f.rank(value))]


def _joined(f: Writer, first: ir.Value, others: list[ir.Value]) -> ir.Value:
    return f("Concat", first, *others, axis=0) if others else first


FORMULAS: dict[tuple[str, str], Formula] = {
    (MICROSOFT, "GatherGrad"): _gather_grad,
    (MICROSOFT, "GatherElementsGrad"): _gather_elements_grad,
    (MICROSOFT, "GatherNDGrad"): _gather_nd_grad,
    (MICROSOFT, "ShrunkenGather"): _shrunken_gather,
    (MICROSOFT, "PadAndUnflatten"): _pad_and_unflatten,
    (MICROSOFT, "FlattenAndUnpad"): _flatten_and_unpad,
}
