"""Batch normalization, and the derivatives of layer and batch normalization.

Each formula is that of ONNX Runtime's kernel for the CPU. Float16 is computed in the type of the statistics.
"""

from __future__ import annotations

import onnx_ir as ir

from graphscale.graph.types import dtype_of
from graphscale.operators import MICROSOFT
from graphscale.passes.lower_training_ops.writer import Formula, Writer
from graphscale.passes.lower_training_ops.written_states import check_states

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
    """Return an operand with one number a row, in a shape that broadcasts: the kernel accepts any."""
    value, rank, axis = f.data(index), f.rank(f.data(1)), _axis(f)
    if value.shape is None or len(value.shape) != rank:
        rows = f("Slice", f.shape_of(f.data(1)), f.integers(0), f.integers(axis))
        ones = f.integers(*[1] * (rank - axis))
        value = f.reshape(value, f("Concat", rows, ones, axis=0) if axis else ones)
    return f.cast(value, ir.DataType.DOUBLE) if f.dtype is ir.DataType.DOUBLE else value


def _wide(f: Writer, index: int, like: ir.Value) -> ir.Value:
    return f.cast(f.data(index), dtype_of(like))


def _batch(f: Writer) -> list[ir.Value | None]:
    """Compute the normalized batch, the next running statistics and those of the batch.

        Y = scale * (X - mean) / sqrt(var + epsilon) + B
        running_mean = momentum * input_mean + (1 - momentum) * mean, and the variance alike
        saved_mean = mean
        saved_inv_std = 1 / sqrt(var + epsilon)

    The mean and the variance, without Bessel's correction, are those of X over all axes but the channels'.
    Without training_mode, they are `input_mean` and `input_var`, and Y is the only result.
    """
    old_mean, old_variance = f.data(3), f.data(4)
    if not f.attribute("training_mode", 1):
        return [_normalized(f, old_mean, old_variance)]
    check_states(f)
    momentum = f.attribute("momentum", 0.9)
    x = _wide(f, 0, old_mean)
    mean = f.reduce_mean(x, _all_but_channels(f), keepdims=False)
    centered = f("Sub", x, _per_channel(f, mean))
    variance = f.reduce_mean(f("Mul", centered, centered), _all_but_channels(f), keepdims=False)
    spread = f("Reciprocal", f("Sqrt", f("Add", variance, f.attribute("epsilon", 1e-5))))
    pairs = ((old_mean, mean), (old_variance, variance))
    running = [f("Add", f("Mul", old, momentum), f("Mul", new, 1 - momentum)) for old, new in pairs]
    return [_normalized(f, mean, variance), *running, mean, spread]


def _batch_slope(f: Writer) -> list[ir.Value | None]:
    """Compute the derivatives from `xhat = (X - saved_mean) * saved_inv_std`.

        dX = scale * saved_inv_std * (dY - dBias / n - xhat * dScale / n)
        dScale = sum(dY * xhat)
        dBias = sum(dY)

    A sum is over all axes but the channels', n being the count of its terms.
    """
    mean, spread = f.data(3), f.data(4)
    dy, x, scale = (_wide(f, index, mean) for index in (0, 1, 2))
    centered = f("Sub", x, _per_channel(f, mean))
    bias_slope = f.reduce_sum(dy, _all_but_channels(f), keepdims=False)
    scale_slope = f("Mul", f.reduce_sum(f("Mul", dy, centered), _all_but_channels(f), keepdims=False), spread)
    count = f("Cast", f("Div", f("Size", x), f("Size", mean)), to=dtype_of(mean))
    factor = f("Mul", scale, spread)
    share = f("Div", factor, count)
    tilt, shift = f("Mul", f("Mul", share, spread), scale_slope), f("Mul", share, bias_slope)
    rest = f("Sub", f("Mul", dy, _per_channel(f, factor)), f("Mul", centered, _per_channel(f, tilt)))
    dx = f("Sub", rest, _per_channel(f, shift))
    kinds = (f.dtype, dtype_of(f.data(2)), dtype_of(f.data(2)))
    return [f.cast(value, kind) for value, kind in zip((dx, scale_slope, bias_slope), kinds, strict=True)]


def _normalized(f: Writer, mean: ir.Value, variance: ir.Value) -> ir.Value:
    x, scale, bias = (_wide(f, index, mean) for index in (0, 1, 2))
    y = f("BatchNormalization", x, scale, bias, mean, variance, epsilon=f.attribute("epsilon", 1e-5), like=x)
    return f.cast(y, f.dtype)


def _all_but_channels(f: Writer) -> list[int]:
    return [0, *range(2, f.rank(f.data(0)))]


def _per_channel(f: Writer, value: ir.Value) -> ir.Value:
    """Return a vector in a shape that broadcasts to the image's."""
    axes = range(1, f.rank(f.data(0)) - 1)
    return f.unsqueeze(value, axes) if axes else value


FORMULAS: dict[tuple[str, str], Formula] = {
    (MICROSOFT, "LayerNormalizationGrad"): _layer,
    (MICROSOFT, "SimplifiedLayerNormalizationGrad"): _simplified_layer,
    (MICROSOFT, "InvertibleLayerNormalizationGrad"): _invertible_layer,
    (MICROSOFT, "BatchNormInternal"): _batch,
    (MICROSOFT, "BatchNormalizationGrad"): _batch_slope,
}
