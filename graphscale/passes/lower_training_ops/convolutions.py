"""The derivatives of convolutions."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from graphscale.graph.types import dtype_of
from graphscale.operators import MICROSOFT
from graphscale.passes.lower_training_ops.image_windows import Sizes, Window, spatial
from graphscale.passes.lower_training_ops.writer import Formula, Writer

__all__ = ["FORMULAS"]


def _convolution(f: Writer) -> list[ir.Value | None]:
    """Compute the derivatives of `Y = Conv(X, W, B)`; source: the definition of Conv in ONNX.

        dX = ConvTranspose(dY, W), with the sizes of X
        dW: see `_weight_slope`, the windows being those of X
        dB = sum of dY over all axes but the channels

    The kernel for the CPU ignores auto_pad, and does not pad for SAME_UPPER and SAME_LOWER. The standard form pads.
    """
    dy, x, w = f.data(0), f.data(1), f.data(2)
    sizes, group = _sizes(f, w), int(f.attribute("group", 1))
    window = Window.of(f, sizes[2:], spatial(f, x, len(sizes) - 2))
    dx = _image_slope(f, window, sizes, group) if f.wants(0) else None
    dw = _weight_slope(f, window, x, dy, sizes, group) if f.wants(1) else None
    return [dx, dw, _bias_slope(f, len(sizes)) if f.wants(2) else None]


def _transposed_convolution(f: Writer) -> list[ir.Value | None]:
    """Compute the derivatives of `Y = ConvTranspose(X, W, B)`; source: the definition of ConvTranspose in ONNX.

    dX = Conv(dY, W)
    dW: see `_weight_slope`, the windows being those of dY
    dB = sum of dY over all axes but the channels
    """
    dy, x, w = f.data(0), f.data(1), f.data(2)
    sizes, group = _sizes(f, w), int(f.attribute("group", 1))
    if f.attribute("auto_pad", "NOTSET").startswith("SAME") or f.attribute("output_shape"):
        raise f.refusal("releases of ONNX Runtime pad differently for auto_pad and output_shape; export it with pads")
    window = Window.of(f, sizes[2:], [None] * len(sizes[2:]))
    longer = f.attribute("output_padding", [0] * len(window.strides))
    if any(more >= stride for more, stride in zip(longer, window.strides, strict=True)):
        raise f.refusal("its output_padding is not less than its strides")
    dx = f("Conv", dy, w, **window.options, group=group) if f.wants(0) else None
    dw = _weight_slope(f, window, dy, x, sizes, group) if f.wants(1) else None
    return [dx, dw, _bias_slope(f, len(sizes)) if f.wants(2) else None]


def _sizes(f: Writer, weight: ir.Value) -> list[int]:
    """Return the sizes of the weight, which must be known."""
    sizes = f.shape(weight)
    if sizes is None or None in sizes:
        raise f.refusal(f"the shape of the weight {weight.name!r} is not known; run shape inference on the model")
    return [size for size in sizes if size is not None]


def _bias_slope(f: Writer, rank: int) -> ir.Value:
    return f.reduce_sum(f.data(0), [0, *range(2, rank)], keepdims=False)


def _image_slope(f: Writer, window: Window, sizes: Sequence[int], group: int) -> ir.Value:
    """Return the derivative for X.

    With strides of 1, the derivative is also the convolution of dY with the reversed weight. Its CPU kernel is faster
    unless it has one output and many inputs.
    """
    dy, x, w = f.data(0), f.data(1), f.data(2)
    rows, columns, *kernel = sizes
    pads = [reach - 1 - pad for reach, pad in zip(window.reach * 2, (*window.begin, *window.end), strict=True)]
    if any(stride > 1 for stride in window.strides) or min(pads) < 0 or (columns == 1 and rows > group):
        return window.scatter(f, dy, w, spatial(f, x, len(kernel)), f.shape_of(x), group)
    axes = list(range(3, 3 + len(kernel)))
    parts = f.reshape(w, [group, rows // group, columns, *kernel])
    parts = f("Transpose", parts, perm=[0, 2, 1, *axes])
    if math.prod(kernel) > 1:
        back, limits = [-1] * len(axes), [-size - 1 for size in kernel]
        parts = f("Slice", parts, *(f.integers(*numbers) for numbers in (back, limits, axes, back)))
    reversed_weight = f.reshape(parts, [group * columns, rows // group, *kernel])
    options = {**window.options, "pads": pads, "group": group}
    return f("Conv", dy, reversed_weight, **options, like=x)


def _weight_slope(
    f: Writer, window: Window, image: ir.Value, places: ir.Value, sizes: Sequence[int], group: int
) -> ir.Value:
    """Compute `dW[m, c, k] = sum of places[n, m, o] * windows[n, c, k, o]` over n and o, for each group.

    `windows[n, c, k, o]` is `image[n, c, o * stride + k * dilation - begin]`, made by a convolution with unit weights.
    """
    rows, columns = sizes[0] // group, math.prod(sizes[1:])
    windows = _windows(f, window, image, sizes[1] * group)
    count = _count(spatial(f, places, len(sizes) - 2))
    if count is None:
        batch = f("Slice", f.shape_of(places), f.integers(0), f.integers(1))
        shape = f("Concat", batch, f.integers(group, columns, -1), axis=0)
        windows = f("Reshape", windows, shape)
    else:
        windows = f.reshape(windows, [-1, group, columns, count])
    if rows == 1 and count is not None:
        # A vector needs no transposition.
        products = f("MatMul", windows, f.reshape(places, [-1, group, count, 1]))
        return f.reshape(f.reduce_sum(products, [0], keepdims=False), sizes)
    places = f.reshape(places, [0, group, rows, -1])
    if count is not None and rows * columns > 2 * count * (rows + columns):
        # One product for the whole batch, if a matrix for each image would be larger than its factors.
        places, windows = (f("Transpose", value, perm=[1, 2, 0, 3]) for value in (places, windows))
        places, windows = f.reshape(places, [group, rows, -1]), f.reshape(windows, [group, columns, -1])
        return f.reshape(f("MatMul", places, f("Transpose", windows, perm=[0, 2, 1])), sizes)
    products = f("MatMul", places, f("Transpose", windows, perm=[0, 1, 3, 2]))
    return f.reshape(f.reduce_sum(products, [0], keepdims=False), sizes)


def _windows(f: Writer, window: Window, image: ir.Value, channels: int) -> ir.Value:
    """Return the elements of each window as channels."""
    size = math.prod(window.kernel)
    if size == 1 and set(window.strides) == {1} and not any(window.options["pads"]):
        return image
    units = np.eye(size).reshape(size, 1, *window.kernel).astype(dtype_of(image).numpy())
    # With a group for each channel, ONNX Runtime does not convert the result to blocks of channels and back.
    weight = f("Tile", units, f.integers(channels, *[1] * (units.ndim - 1)))
    return f("Conv", image, weight, **window.options, group=channels)


def _count(sizes: Sizes) -> int | None:
    """Return the number of places in an image, if known."""
    known = [size for size in sizes if size is not None]
    return math.prod(known) if len(known) == len(sizes) else None


FORMULAS: dict[tuple[str, str], Formula] = {
    (MICROSOFT, "ConvGrad"): _convolution,
    (MICROSOFT, "ConvTransposeGrad"): _transposed_convolution,
}
