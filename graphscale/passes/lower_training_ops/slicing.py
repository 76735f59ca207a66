"""The derivative of slicing."""

from __future__ import annotations

import onnx_ir as ir

from graphscale.operators import MICROSOFT
from graphscale.passes.lower_training_ops.known_shapes import known_numbers, known_sizes
from graphscale.passes.lower_training_ops.scattering import count_up, scatter, zeros
from graphscale.passes.lower_training_ops.writer import Formula, Writer

__all__ = ["FORMULAS"]


def _slice_grad(f: Writer) -> list[ir.Value]:
    """Write dY to the place of the slice, and zeros elsewhere; source: its kernel, and Slice with the same operands.

    The kernel fails for a negative step.
    """
    steps, axes = known_numbers(f.input(5)), known_numbers(f.input(4))
    count = len(known_sizes(f.data(2)) or ())
    if f.input(4) is None:
        axes = list(range(count)) or None
    if axes is not None and (f.input(5) is None or (steps is not None and set(steps) <= {1})):
        padded = _pad(f, [axis % f.rank(f.data(0)) for axis in axes])
        if padded is not None:
            return [padded]
    # Slice returns the places of dY among those of all elements.
    shape, dy = f.data(1), f.data(0)
    size = f("ReduceProd", shape, keepdims=1)
    places = f.reshape(count_up(f, size), shape)
    taken = f("Slice", places, f.data(2), f.data(3), f.input(4), f.input(5))
    flat = scatter(f, zeros(f, size), f.reshape(taken, [-1]), f.reshape(dy, [-1]), 0)
    return [f.reshape(flat, shape)]


def _pad(f: Writer, axes: list[int]) -> ir.Value | None:
    """Return dY with zeros around it, if its elements are neighbours; None if the opset has no computed padding."""
    dy, shape = f.data(0), f.data(1)
    rank = f.rank(dy)
    starts, sizes, lengths = known_numbers(f.data(2)), known_sizes(shape), known_sizes(f.shape_of(dy))
    if starts is not None and sizes is not None and lengths is not None:
        before, after = [0] * rank, [0] * rank
        for axis, start in zip(axes, starts, strict=True):
            size, length = sizes[axis], lengths[axis]
            if not isinstance(size, int) or not isinstance(length, int):
                break
            before[axis] = min(max(start + size if start < 0 else start, 0), size)
            after[axis] = size - length - before[axis]
        else:
            pads = before + after
            return f("Pad", dy, f.integers(*pads)) if f.opset >= 11 else f("Pad", dy, pads=pads)
    if f.opset < 11:
        return None
    chosen = f.integers(*axes)
    ends, taken = f("Gather", shape, chosen), f("Gather", f.shape_of(dy), chosen)
    first = f.cast(f.data(2), ir.DataType.INT64)
    first = f("Where", f("Less", first, 0), f("Add", first, ends), first)
    first = f("Where", f("Less", first, 0), 0, f("Where", f("Greater", first, ends), ends, first))
    rest = f("Sub", f("Sub", ends, first), taken)
    numbers = f("Concat", f.integers(0), first, rest, axis=0)
    places = [1 + axes.index(axis) if axis in axes else 0 for axis in range(rank)]
    later = [place + len(axes) if place else 0 for place in places]
    return f("Pad", dy, f("Gather", numbers, f.integers(*places, *later)))


FORMULAS: dict[tuple[str, str], Formula] = {(MICROSOFT, "SliceGrad"): _slice_grad}
