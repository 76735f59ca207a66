"""The derivatives of layer normalization.

Each formula is that of ONNX Runtime's kernel for the CPU. Float16 is computed in the type of the statistics.
"""

from __future__ import annotations

import onnx_ir as ir

from graphscale.graph.types import dtype_of
from graphscale.operators import MICROSOFT
from graphscale.passes.lower_training_ops.writer import Formula, Writer

__all__ = ["FORMULAS"]


def _layer(f: Writer) -> list[ir.Value | None]:
    """Compute the derivatives from `xhat = (X - mean) * inv_std_var`; see `_row_slopes`."""
    spread = _per_row(f, 4)
    xhat = f("Mul", f("Sub", _wide(f, 1, spread), _per_row(f, 3)), spread)
    return _row_slopes(f, xhat, spread, is_centered=True)


def _simplified_layer(f: Writer) -> list[ir.Value | None]:
    """Compute the derivatives from `xhat = X * inv_std_var`; see `_row_slopes`."""
    spread = _per_row(f, 3)
    return _row_slopes(f, f("Mul", _wide(f, 1, spread), spread), spread, is_centered=False)


def _invertible_layer(f: Writer) -> list[ir.Value | None]:
    """Compute the derivatives from `xhat = (Y - bias) / scale`, Y being the forward result; see `_row_slopes`."""
    spread = _per_row(f, 4)
    y, scale, bias = (_wide(f, index, spread) for index in (1, 2, 3))
    return _row_slopes(f, f("Div", f("Sub", y, bias), scale), spread, is_centered=True)


def _row_slopes(f: Writer, xhat: ir.Value, spread: ir.Value, *, is_centered: bool) -> list[ir.Value | None]:
    """Compute the derivatives of layer normalization.

        dX = inv_std_var * (g - mean(g) - xhat * mean(g * xhat)), with g = dY * scale
        dScale = sum(dY * xhat)
        dBias = sum(dY)

    A mean is over the axes from `axis` on, a sum over those before. Simplified layer normalization has no mean(g).
    """
    rank, axis = f.rank(f.data(1)), _axis(f)
    dy, scale = _wide(f, 0, spread), _wide(f, 2, spread)
    g, product = f("Mul", dy, scale), f("Mul", dy, xhat)
    tilt = f.reduce_mean(f("Mul", product, scale), range(axis, rank))
    rest = f("Sub", g, f.reduce_mean(g, range(axis, rank))) if is_centered else g
    dx = f("Mul", f("Sub", rest, f("Mul", xhat, tilt)), spread)
    sums = [f.reduce_sum(value, range(axis), keepdims=False) for value in (product, dy) if axis]
    return [f.cast(value, f.dtype) for value in (dx, *(sums or (product, dy)))]


def _axis(f: Writer) -> int:
    return int(f.attribute("axis", -1)) % max(f.rank(f.data(1)), 1)


def _per_row(f: Writer, index: int) -> ir.Value:
    """Return an operand with one number per row, in a shape that broadcasts: the kernel accepts all shapes."""
    value, rank, axis = f.data(index), f.rank(f.data(1)), _axis(f)
    if value.shape is None or len(value.shape) != rank:
        rows = f("Slice", f.shape_of(f.data(1)), f.integers(0), f.integers(axis))
        ones = f.integers(*[1] * (rank - axis))
        value = f.reshape(value, f("Concat", rows, ones, axis=0) if axis else ones)
    return f.cast(value, ir.DataType.DOUBLE) if f.dtype is ir.DataType.DOUBLE else value


def _wide(f: Writer, index: int, like: ir.Value) -> ir.Value:
    return f.cast(f.data(index), dtype_of(like))


FORMULAS: dict[tuple[str, str], Formula] = {
    (MICROSOFT, "LayerNormalizationGrad"): _layer,
    (MICROSOFT, "SimplifiedLayerNormalizationGrad"): _simplified_layer,
    (MICROSOFT, "InvertibleLayerNormalizationGrad"): _invertible_layer,
}
