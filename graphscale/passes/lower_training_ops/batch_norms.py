"""Batch normalization and its derivatives.

Each formula is that of ONNX Runtime's kernel for the CPU. Float16 is computed in the type of the statistics.
"""

from __future__ import annotations

import math

import onnx_ir as ir

from graphscale.graph.types import dtype_of
from graphscale.operators import MICROSOFT
from graphscale.passes.lower_training_ops.writer import Formula, Writer
from graphscale.passes.lower_training_ops.written_states import check_states

__all__ = ["FORMULAS"]


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
    count = _count(f, x, mean)
    shift, tilt = f("Div", bias_slope, count), f("Div", f("Mul", scale_slope, spread), count)
    moved = f("Add", f("Mul", centered, _per_channel(f, tilt)), _per_channel(f, shift))
    dx = f("Mul", f("Sub", dy, moved), _per_channel(f, f("Mul", scale, spread)))
    kinds = (f.dtype, dtype_of(f.data(2)), dtype_of(f.data(2)))
    return [f.cast(value, kind) for value, kind in zip((dx, scale_slope, bias_slope), kinds, strict=True)]


def _count(f: Writer, image: ir.Value, channels: ir.Value) -> ir.Value:
    """Return the number of elements of a channel, a constant if known."""
    sizes, dtype = f.shape(image), dtype_of(channels)
    known = [size for size in sizes or (None,) if size is not None]
    if sizes is not None and len(known) == len(sizes):
        return f.number(math.prod(known) / max(known[1], 1), dtype)
    return f("Cast", f("Div", f("Size", image), f("Size", channels)), to=dtype)


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
    (MICROSOFT, "BatchNormInternal"): _batch,
    (MICROSOFT, "BatchNormalizationGrad"): _batch_slope,
}
