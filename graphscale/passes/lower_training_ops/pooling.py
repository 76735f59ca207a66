"""The derivatives of poolings: operators of ONNX Runtime in ONNX's domain."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import numpy as np
import onnx_ir as ir

from graphscale.graph.types import dtype_of
from graphscale.passes.lower_training_ops.image_windows import Window, spatial
from graphscale.passes.lower_training_ops.writer import Formula, Writer

__all__ = ["FORMULAS"]


def _max_pool(f: Writer) -> list[ir.Value | None]:
    """Add each element of dY to the element of dX at its index, counted in the whole tensor; source: the kernel.

    The kernel reads the shape of dX from the model. The standard form uses the shape of MaxPool's input, if the graph
    has MaxPool.
    """
    index, kind = f.data(1), dtype_of(f.data(0))
    # The kernel of ScatterElements for the CPU adds no float16.
    wide = ir.DataType.FLOAT if kind.itemsize == 2 else kind
    dy = f.cast(f.data(0), wide)
    if f.attribute("storage_order", 0):
        raise f.refusal("the kernel misreads indices of storage_order 1; export the model with 0")
    image = _image_shape(f)
    flat = f.reshape(f("ConstantOfShape", image, value=ir.tensor(np.zeros(1, wide.numpy()))), [-1])
    if f.opset >= 16:
        operands = (flat, _flat_index(f, index), f.reshape(dy, [-1]))
        parts = [f("ScatterElements", *operands, reduction="add")]
    else:
        name = "Scatter" if f.opset < 11 else "ScatterElements"
        pairs = _disjoint(f, dy, index)
        parts = [f(name, flat, _flat_index(f, some), f.reshape(some_dy, [-1])) for some_dy, some in pairs]
    return [f.cast(f.reshape(f("Sum", *parts) if len(parts) > 1 else parts[0], image), kind)]


def _flat_index(f: Writer, index: ir.Value) -> ir.Value:
    # Models do not always declare the type of MaxPool's second result.
    return f("Reshape", index, f.integers(-1), dtype=ir.DataType.INT64, shape=[None])


def _disjoint(f: Writer, *values: ir.Value) -> Iterator[tuple[ir.Value, ...]]:
    """Yield parts of values with one element per window, so that the windows of a part do not overlap."""
    kernel = f.attribute("kernel_shape")
    window = Window.of(f, kernel, [1] * len(kernel))
    apart = [-(-reach // stride) for reach, stride in zip(window.reach, window.strides, strict=True)]
    if max(apart) == 1:
        yield values
        return
    if f.opset < 11 and None in spatial(f, values[0], len(apart)):
        raise f.refusal("shape inference of Slice is wrong at opset 10; declare all shapes, or convert the model")
    axes = f.integers(*range(2, 2 + len(apart)))
    far = f.integers(*[np.iinfo(np.int64).max] * len(apart))
    for start in itertools.product(*map(range, apart)):
        yield tuple(f("Slice", value, f.integers(*start), far, axes, f.integers(*apart)) for value in values)


def _average_pool(f: Writer) -> list[ir.Value | None]:
    """Give each element of a window the same share of the window's element of dY.

    The share is `1 / size of the window` with count_include_pad, else `1 / number of its elements inside the image`.
    Source: the kernel, and the schema of AveragePool where the kernel is wrong: with three spatial axes it does not
    add up the shares of overlapping windows, and it ignores dilations and auto_pad.
    """
    dy, kernel = f.data(0), f.attribute("kernel_shape")
    image = _declared(f)
    window = Window.of(f, kernel, image)
    places, size = spatial(f, dy, len(kernel)), math.prod(kernel)
    counts_pads, is_cut = f.attribute("count_include_pad", 0), _is_cut(f, window, image)
    if counts_pads and is_cut:
        raise f.refusal(
            "releases of ONNX Runtime differ on ceil_mode with count_include_pad; export it with one of them"
        )
    if counts_pads or not (is_cut or any(window.options["pads"])):
        shares = f("Mul", dy, 1 / size)
    else:
        shares = f("Mul", dy, _inside(f, window, image))
    fits = [n is not None and n * k == x for n, k, x in zip(places, kernel, image, strict=True)]
    if all(fits) and window.strides == window.reach == window.kernel and f.opset >= 13:
        scales = f.constant(np.asarray([1, 1, *kernel], np.float32))
        options = {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
        return [f("Resize", shares, None, scales, mode="nearest", **options)]
    single = f.reshape(shares, [-1, 1, *[0] * len(kernel)])
    ones = f.constant(np.ones((1, 1, *kernel), dtype_of(dy).numpy()))
    whole = window.scatter(f, single, ones, image, f.integers(1, 1, *image), group=1)
    return [f.reshape(whole, _image_shape(f))]


def _is_cut(f: Writer, window: Window, image: list[int]) -> bool:
    """Return whether the last windows extend beyond the padding."""
    steps = zip(image, window.begin, window.end, window.reach, window.strides, strict=True)
    return bool(f.attribute("ceil_mode", 0)) and any((x + b + e - reach) % s for x, b, e, reach, s in steps)


def _inside(f: Writer, window: Window, image: list[int]) -> ir.Value:
    """Return `1 / number of elements inside the image` for each place of a window."""
    steps = zip(image, window.kernel, window.strides, window.dilations, window.begin, window.end, strict=True)
    counts = np.ones(())
    for size, k, stride, dilation, begin, end in steps:
        places = np.arange(max(size + begin + end, 1))[::stride] - begin
        positions = places[:, None] + dilation * np.arange(k)
        counts = np.multiply.outer(counts, ((positions >= 0) & (positions < size)).sum(1))
    shares = f.constant((1 / np.maximum(counts, 1))[None, None].astype(dtype_of(f.data(0)).numpy()))
    axes = range(2, 2 + len(image))
    sizes = f("Slice", f.shape_of(f.data(0)), f.integers(2), f.integers(2 + len(image)))
    return f("Slice", shares, f.integers(*[0] * len(image)), sizes, f.integers(*axes))


def _image_shape(f: Writer) -> ir.Value:
    """Return the shape of dX as a value."""
    maker = f.data(1).producer() if len(f.node.inputs) > 1 else None
    if maker is not None and maker.op_type == "MaxPool" and not maker.domain and maker.inputs[0] is not None:
        return f.shape_of(maker.inputs[0])
    dy, sizes = f.data(0), _declared(f)
    lead = (f.shape(dy) or ())[:2]
    if None not in lead:
        return f.integers(*(size for size in lead if size is not None), *sizes)
    return f("Concat", f("Slice", f("Shape", dy), f.integers(0), f.integers(2)), f.integers(*sizes), axis=0)


def _declared(f: Writer) -> list[int]:
    """Return the declared sizes of the spatial axes of dX, which the kernel reads."""
    result = f.node.outputs[0]
    sizes = [size for size in (f.shape(result) or ())[2:] if size is not None]
    if result.shape is None or len(sizes) != len(f.attribute("kernel_shape")):
        raise f.refusal(f"the model does not declare the sizes of {result.name!r}")
    return sizes


FORMULAS: dict[tuple[str, str], Formula] = {
    ("", "MaxPoolGrad"): _max_pool,
    ("", "AveragePoolGrad"): _average_pool,
}
