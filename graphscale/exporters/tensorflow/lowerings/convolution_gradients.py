"""Gradients of convolutions in one to three dimensions, with groups, strides and dilations; channels last."""

from __future__ import annotations

from typing import Any

from graphscale.exporters.tensorflow.lowerings.lowering_writer import NodeWriter, lower, static_numbers

__all__ = ["find_pads"]


def find_pads(node: Any, size: list[int], window: list[int], stride: list[int], out: list[int]) -> list[int]:
    """Return the pads of each axis, begins and then ends, as TensorFlow computes them.

    Args:
        node: an operator with an attribute `padding`.
        size: sizes of the image.
        window: sizes of the window, dilations included.
        stride: steps of the window.
        out: sizes of the result.
    """
    mode = _text(node.get_attr_value("padding"))
    if mode == "VALID":
        return [0] * (2 * len(size))
    if mode == "EXPLICIT":
        pairs = list(node.get_attr_value("explicit_paddings"))[2:-2]
        return pairs[::2] + pairs[1::2]
    total = [max((o - 1) * s + k - n, 0) for n, k, s, o in zip(size, window, stride, out, strict=True)]
    return [each // 2 for each in total] + [each - each // 2 for each in total]


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _steps(node: Any, name: str, rank: int) -> list[int]:
    """Return an attribute with a number for each axis of the images."""
    layout = node.get_attr_value("data_format")
    if layout is not None and _text(layout) not in ("NHWC", "NDHWC"):
        raise NotImplementedError("channels first")
    return list(node.get_attr_value(name) or [1] * rank)[1:-1]


def _window(kernel: list[int], dilation: list[int]) -> list[int]:
    return [(size - 1) * step + 1 for size, step in zip(kernel, dilation, strict=True)]


@lower("Conv2DBackpropFilter", "Conv3DBackpropFilterV2")
def filter_gradient(write: NodeWriter, node: Any) -> str:
    """Convolve the images with the gradient, channels as batch: strides become dilations, and dilations strides."""
    kernel = static_numbers(write, node, 1)
    rank, channels = len(kernel), write.shape(node.input[0])[-1]
    result = _correlate(write, node, kernel[:-2], groups=channels // kernel[-2])
    return write.op("Transpose", result, perm=[*range(2, rank), 0, 1])


@lower("DepthwiseConv2dNativeBackpropFilter")
def depthwise_filter_gradient(write: NodeWriter, node: Any) -> str:
    """Convolve each channel on its own; the result is [1, channels * multiplier, height, width]."""
    *kernel, channels, multiplier = static_numbers(write, node, 1)
    result = _correlate(write, node, kernel, groups=channels)
    moved = write.op("Transpose", result, perm=[2, 3, 0, 1])
    return write.reshape(moved, [*kernel, channels, multiplier])


def _correlate(write: NodeWriter, node: Any, kernel: list[int], groups: int) -> str:
    """Return the gradient of a kernel as [channels in a group, channels of the result, *kernel]."""
    x, dy = node.input[0], node.input[2]
    shape, rank = write.shape(x), len(kernel) + 2
    stride, dilation = _steps(node, "strides", rank), _steps(node, "dilations", rank)
    size, out = write.known(shape[1:-1], "images"), write.known(write.shape(dy)[1:-1], "images")
    pads = find_pads(node, size, _window(kernel, dilation), stride, out)
    axes = list(range(1, rank - 1))
    if groups == 1:
        images = write.op("Transpose", x, perm=[rank - 1, 0, *axes])
    else:
        split = write.reshape(x, [*shape[:-1], groups, shape[-1] // groups])
        moved = write.op("Transpose", split, perm=[rank, rank - 1, 0, *axes])
        images = write.reshape(moved, [shape[-1] // groups, -1, *size])
    filters = write.op("Transpose", dy, perm=[rank - 1, 0, *axes])
    full = write.op("Conv", images, filters, dilations=stride, strides=dilation, pads=pads, group=groups)
    # Rows and columns that the stride did not reach give more than the kernel.
    starts, spatial = write.integers([0] * len(kernel)), write.integers(range(2, rank))
    return write.op("Slice", full, starts, write.integers(kernel), spatial)


@lower("Conv2DBackpropInput", "Conv3DBackpropInputV2")
def image_gradient(write: NodeWriter, node: Any) -> str:
    """Transpose the convolution: the gradient of its images, and the layer of this name."""
    *kernel, per_group, _ = write.shape(node.input[1])
    size = _image_sizes(write, node)
    rank = len(kernel) + 2
    filters = write.op("Transpose", node.input[1], perm=[rank - 1, rank - 2, *range(rank - 2)])
    return _transpose_convolution(write, node, filters, kernel, size[:-1], size[-1] // per_group)


@lower("DepthwiseConv2dNativeBackpropInput")
def depthwise_image_gradient(write: NodeWriter, node: Any) -> str:
    *kernel, channels, multiplier = write.shape(node.input[1])
    flat = write.reshape(node.input[1], [*kernel, channels * multiplier, 1])
    filters = write.op("Transpose", flat, perm=[2, 3, 0, 1])
    return _transpose_convolution(write, node, filters, kernel, _image_sizes(write, node)[:-1], channels)


def _image_sizes(write: NodeWriter, node: Any) -> list[int]:
    """Return the sizes of the images to compute, without the batch."""
    shape = write.ctx.get_shape(node.output[0])
    if shape is None or -1 in shape[1:]:
        shape = static_numbers(write, node, 0)
    return write.known(shape[1:], "images")


def _transpose_convolution(
    write: NodeWriter, node: Any, filters: str, kernel: list[int], size: list[int], groups: int
) -> str:
    dy, rank = node.input[2], len(kernel) + 2
    stride, dilation = _steps(node, "strides", rank), _steps(node, "dilations", rank)
    out = write.known(write.shape(dy)[1:-1], "images")
    window = _window(kernel, dilation)
    pads = find_pads(node, size, window, stride, out)
    total = [pads[axis] + pads[axis + len(size)] for axis in range(len(size))]
    # Pixels at the end that no window reached.
    rest = [n - ((o - 1) * s + w - p) for n, o, s, w, p in zip(size, out, stride, window, total, strict=True)]
    images = write.channels_first(dy)
    result = write.op(
        "ConvTranspose",
        images,
        filters,
        strides=stride,
        dilations=dilation,
        pads=pads,
        output_padding=[max(each, 0) for each in rest],
        group=groups,
    )
    return write.channels_last(result, rank)
