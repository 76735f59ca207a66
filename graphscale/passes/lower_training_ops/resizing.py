"""The derivative of Resize."""

from __future__ import annotations

import onnx_ir as ir

from graphscale.operators import MICROSOFT
from graphscale.passes.lower_training_ops.known_shapes import sizes_of
from graphscale.passes.lower_training_ops.scattering import count_up, size_at
from graphscale.passes.lower_training_ops.writer import Formula, Writer

__all__ = ["FORMULAS"]

# Forms that the kernel accepts.
_TAKEN = {
    "mode": ("nearest", ("linear",)),
    "coordinate_transformation_mode": ("half_pixel", ("half_pixel", "align_corners")),
    "antialias": (0, (0,)),
    "axes": (None, (None,)),
    "keep_aspect_ratio_policy": ("stretch", ("stretch",)),
}


def _resize_grad(f: Writer) -> list[ir.Value]:
    """Compute `dX = R^T dY C`, the forward pass being `Y = R X C^T` with weights R of rows and C of columns.

    Source: the kernel, for two spatial axes. A weight is `max(0, 1 - |s(o) - i|)` for a place o of Y and i of X, with
    `s(o) = r * (o + 0.5) - 0.5` within 0 and the last place of X, or `s(o) = r * o` for align_corners. Without scales
    and for align_corners r is the quotient of the sizes, in the latter case less one each; with scales it is
    `1 / scale`. A value that keeps its shape keeps its numbers.
    """
    for name, (default, taken) in _TAKEN.items():
        value = f.attribute(name, default)
        if value not in taken:
            raise f.refusal(f"the kernel takes no {name} {value!r}")
    dy, x = f.data(0), f.data(1)
    if f.rank(x) != 4:
        raise f.refusal(f"the kernel takes two spatial axes, not {f.rank(x) - 2}")
    own, other = sizes_of(x), sizes_of(dy)
    if own == other and None not in (own or ()):
        return [dy]
    given, scales = f.input(3), None
    # For a Resize with sizes, exporters omit the scales, or make them empty.
    if given is not None and sizes_of(given) != (0,) and _mode(f) == "half_pixel":
        same = f("Equal", f.shape_of(x), f.shape_of(dy))
        moved = f("Greater", f.reduce_sum(f("Cast", f("Not", same), to=ir.DataType.FLOAT), [0]), 0.0)
        scales = f("Where", moved, given, 1.0)
    rows, columns = (_weights(f, axis, scales) for axis in (2, 3))
    return [f("MatMul", f("Transpose", rows, perm=[1, 0]), f("MatMul", dy, columns))]


def _mode(f: Writer) -> str:
    return str(f.attribute("coordinate_transformation_mode", "half_pixel"))


def _weights(f: Writer, axis: int, scales: ir.Value | None) -> ir.Value:
    """Return the weights of an axis: `[places of Y, places of X]`."""
    size, length = size_at(f, f.shape_of(f.data(1)), axis), size_at(f, f.shape_of(f.data(0)), axis)
    places, sources = (f("Cast", count_up(f, count), to=ir.DataType.FLOAT) for count in (length, size))
    size, length = (f("Cast", count, to=ir.DataType.FLOAT) for count in (size, length))
    last = f("Sub", size, 1.0)
    if _mode(f) == "align_corners":
        # With one place of Y, r is 0.
        ratio = f("Div", last, f("Max", f("Sub", length, 1.0), 1.0))
        at = f("Mul", places, ratio)
    else:
        ratio = f("Div", size, length) if scales is None else f("Div", 1.0, f("Gather", scales, f.integers(axis)))
        at = f("Sub", f("Mul", ratio, f("Add", places, 0.5)), 0.5)
    at = f("Min", f("Max", at, 0.0), last)
    distance = f("Abs", f("Sub", f.unsqueeze(at, [1]), f.unsqueeze(sources, [0])))
    return f.cast(f("Relu", f("Sub", 1.0, distance)), f.dtype)


FORMULAS: dict[tuple[str, str], Formula] = {(MICROSOFT, "ResizeGrad"): _resize_grad}
