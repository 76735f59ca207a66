"""Gradients of pooling and of resizing; channels last."""

from __future__ import annotations

from typing import Any

import numpy as np

from graphscale.exporters.tensorflow.lowerings.convolution_gradients import find_pads
from graphscale.exporters.tensorflow.lowerings.lowering_writer import NodeWriter, lower, static_numbers


def _windows(node: Any) -> tuple[list[int], list[int]]:
    window, stride = (list(node.get_attr_value(name))[1:-1] for name in ("ksize", "strides"))
    return window, stride


@lower("MaxPoolGrad", "MaxPool3DGrad")
def max_pool(write: NodeWriter, node: Any) -> str:
    """Add each gradient to the first largest number of its window: MaxPool gives its index."""
    x, y, dy = node.input
    shape = write.shape(x)
    size, (window, stride) = write.known(shape[1:-1], "images"), _windows(node)
    pads = find_pads(node, size, window, stride, write.shape(y)[1:-1])
    images = write.channels_first(x)
    pooled = write.ctx.make_node(
        "MaxPool", [images], attr={"kernel_shape": window, "strides": stride, "pads": pads}, output_count=2
    )
    index, flat = write.reshape(pooled.output[1], [-1]), write.reshape(write.channels_first(dy), [-1])
    zeros = write.zeros_like(write.reshape(x, [-1]))
    summed = write.scatter_sums(zeros, index, flat)
    return write.channels_last(write.reshape(summed, [-1, shape[-1], *size]), len(shape))


@lower("AvgPoolGrad", "AvgPool3DGrad")
def average_pool(write: NodeWriter, node: Any) -> str:
    """Spread each gradient over its window, divided by how many pixels the window has, padding aside."""
    shape, (window, stride) = static_numbers(write, node, 0), _windows(node)
    size, out = write.known(shape[1:-1], "images"), write.known(write.shape(node.input[1])[1:-1], "images")
    pads = find_pads(node, size, window, stride, out)
    rank, channels = len(shape), shape[-1]
    counts = [_pixels_in_windows(n, w, s, p, o) for n, w, s, p, o in zip(size, window, stride, pads, out, strict=False)]
    counted = np.ones(())
    for each in counts:
        counted = np.multiply.outer(counted, each)
    share = write.op("Div", node.input[1], write.constant(counted[..., None]))
    if window == stride and all(n == o * w for n, o, w in zip(size, out, window, strict=True)):
        return _repeat(write, share, [*out, channels], [*window, 1])
    alone = write.reshape(write.channels_first(share), [-1, 1, *out])
    total = [pads[axis] + pads[axis + len(size)] for axis in range(len(size))]
    rest = [n - ((o - 1) * s + w - p) for n, o, s, w, p in zip(size, out, stride, window, total, strict=True)]
    ones = write.constant(np.ones((1, 1, *window)))
    spread = write.op(
        "ConvTranspose", alone, ones, strides=stride, pads=pads, output_padding=[max(each, 0) for each in rest]
    )
    return write.channels_last(write.reshape(spread, [-1, channels, *size]), rank)


def _pixels_in_windows(size: int, window: int, stride: int, before: int, count: int) -> np.ndarray[Any, Any]:
    start = np.arange(count) * stride - before
    return np.minimum(start + window, size) - np.maximum(start, 0)


def _repeat(write: NodeWriter, value: str, shape: list[int], times: list[int]) -> str:
    """Repeat each element of images of that shape, axis by axis; the batch stays."""
    split = [size for pair in zip(shape, [1] * len(shape), strict=True) for size in pair]
    wide = [size for pair in zip(shape, times, strict=True) for size in pair]
    spread = write.op("Expand", write.reshape(value, [-1, *split]), write.integers([1, *wide]))
    return write.reshape(spread, [-1, *(a * b for a, b in zip(shape, times, strict=True))])


@lower("ResizeNearestNeighborGrad")
def resize_nearest(write: NodeWriter, node: Any) -> str:
    """Sum over the pixels that repeat one, for whole factors."""
    _, height, width, channels = write.shape(node.input[0])
    rows, columns = static_numbers(write, node, 1)
    if height % rows or width % columns:
        raise NotImplementedError("a factor that is no whole number")
    split = write.reshape(node.input[0], [-1, rows, height // rows, columns, width // columns, channels])
    return write.op("ReduceSum", split, write.integers([2, 4]), keepdims=0)


@lower("ResizeBilinearGrad")
def resize_bilinear(write: NodeWriter, node: Any) -> str:
    """Multiply rows and columns by the transposed weights of the interpolation."""
    _, height, width, _ = write.shape(node.input[0])
    _, rows, columns, _ = write.shape(node.input[1])
    aligned, centred = (node.get_attr_value(name) for name in ("align_corners", "half_pixel_centers"))
    images = write.channels_first(node.input[0])
    by_row = write.constant(_interpolation(rows, height, aligned, centred).T)
    by_column = write.constant(_interpolation(columns, width, aligned, centred))
    return write.channels_last(write.op("MatMul", write.op("MatMul", by_row, images), by_column), 4)


def _interpolation(size: int, out: int, aligned: bool, centred: bool) -> np.ndarray[Any, Any]:
    """Return the weights of `size` pixels in each of `out` pixels, as TensorFlow interpolates."""
    factor = (size - 1) / (out - 1) if aligned and out > 1 else size / out
    position = (np.arange(out) + 0.5) * factor - 0.5 if centred else np.arange(out) * factor
    floor = np.floor(position)
    lower_pixel = np.clip(floor, 0, size - 1).astype(int)
    upper_pixel = np.clip(np.ceil(position), 0, size - 1).astype(int)
    weights = np.zeros((out, size))
    np.add.at(weights, (np.arange(out), lower_pixel), 1 - (position - floor))
    np.add.at(weights, (np.arange(out), upper_pixel), position - floor)
    return weights
