"""Lowerings of TensorFlow's gradient operators, which tf2onnx does not know: standard operators for each."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from onnx import TensorProto
from tf2onnx import utils

Lowering = Callable[["Builder", Any], str | tuple[str, ...]]
LOWERINGS: dict[str, Lowering] = {}
# All axes of images but the last.
CHANNELWISE = (0, 1, 2)


class Builder:
    """Operators beside a node of a tf2onnx graph; values are names."""

    def __init__(self, ctx: Any, node: Any):
        self.ctx = ctx
        self.dtype = utils.map_onnx_to_numpy_type(ctx.get_dtype(node.output[0]))

    def op(self, kind: str, *inputs: str, **attributes: Any) -> str:
        """Add a node; return its output."""
        return self.ctx.make_node(kind, list(inputs), attr=attributes).output[0]

    def number(self, value: float) -> str:
        """Return a scalar of the node's type."""
        return self.ctx.make_const(utils.make_name("number"), np.array(value, self.dtype)).output[0]

    def integers(self, values: Sequence[int]) -> str:
        """Return an int64 vector."""
        return self.ctx.make_const(utils.make_name("integers"), np.array(values, np.int64)).output[0]

    def shape(self, value: str) -> list[int]:
        """Return the static shape of a value."""
        shape = self.ctx.get_shape(value)
        if shape is None or -1 in shape:
            raise ValueError(f"{value} has no static shape")
        return shape

    def mean(self, value: str, axes: Sequence[int], count: int) -> str:
        """Return the mean over axes of so many numbers; the form of ReduceMean depends on the opset."""
        total = self.op("ReduceSum", value, self.integers(axes), keepdims=0)
        return self.op("Div", total, self.number(count))

    def multiply(self, *factors: str) -> str:
        """Multiply from the left."""
        product, *rest = factors
        for factor in rest:
            product = self.op("Mul", product, factor)
        return product

    def where_positive(self, tested: str, then: str, otherwise: str) -> str:
        """Choose by the sign of a value."""
        return self.op("Where", self.op("Greater", tested, self.number(0)), then, otherwise)

    def constant(self, node: Any, index: int) -> list[int]:
        """Return the numbers of a constant input."""
        return [int(each) for each in np.ravel(node.inputs[index].get_tensor_value(as_list=False))]

    def one_hot(self, index: str, count: int) -> str:
        """Return indices as ones among zeros."""
        values = self.ctx.make_const(utils.make_name("off_on"), np.array([0, 1], self.dtype)).output[0]
        depth = self.ctx.make_const(utils.make_name("depth"), np.array(count, np.int64)).output[0]
        # ONNX Runtime has no OneHot of int32.
        return self.op("OneHot", self.op("Cast", index, to=TensorProto.INT64), depth, values)

    def repeat(self, value: str, shape: Sequence[int], times: Sequence[int]) -> str:
        """Repeat each element of an array of that shape, axis by axis."""
        split = [size for pair in zip(shape, [1] * len(shape), strict=True) for size in pair]
        wide = [size for pair in zip(shape, times, strict=True) for size in pair]
        spread = self.op("Expand", self.op("Reshape", value, self.integers(split)), self.integers(wide))
        return self.op("Reshape", spread, self.integers([a * b for a, b in zip(shape, times, strict=True)]))


def lower(*names: str) -> Callable[[Lowering], Lowering]:
    """Register the lowering of operators."""

    def register(lowering: Lowering) -> Lowering:
        LOWERINGS.update(dict.fromkeys(names, lowering))
        return lowering

    return register


def handlers() -> dict[str, tuple[Callable, list]]:
    """Return the lowerings as tf2onnx takes them."""

    def handler(lowering: Lowering) -> Callable:
        def handle(ctx: Any, node: Any, _name: str, _args: list) -> None:
            results = lowering(Builder(ctx, node), node)
            results = results if isinstance(results, tuple) else (results,)
            outputs, shapes, dtypes = node.output, node.output_shapes, node.output_dtypes
            ctx.remove_node(node.name)
            for result, output, shape, dtype in zip(results, outputs, shapes, dtypes, strict=False):
                ctx.make_node("Identity", [result], outputs=[output], shapes=[shape], dtypes=[dtype])

        return handle

    return {name: (handler(lowering), []) for name, lowering in LOWERINGS.items()}


@lower("TanhGrad")
def tanh(build: Builder, node: Any) -> str:
    y, dy = node.input
    return build.op("Mul", dy, build.op("Sub", build.number(1), build.op("Mul", y, y)))


@lower("SigmoidGrad")
def sigmoid(build: Builder, node: Any) -> str:
    y, dy = node.input
    return build.multiply(dy, y, build.op("Sub", build.number(1), y))


@lower("ReluGrad")
def relu(build: Builder, node: Any) -> str:
    dy, x = node.input
    return build.where_positive(x, dy, build.number(0))


@lower("Relu6Grad")
def relu6(build: Builder, node: Any) -> str:
    dy, x = node.input
    inner = build.op("And", build.op("Greater", x, build.number(0)), build.op("Less", x, build.number(6)))
    return build.op("Where", inner, dy, build.number(0))


@lower("LeakyReluGrad")
def leaky_relu(build: Builder, node: Any) -> str:
    dy, x = node.input
    return build.where_positive(x, dy, build.op("Mul", dy, build.number(node.get_attr_value("alpha"))))


@lower("EluGrad")
def elu(build: Builder, node: Any) -> str:
    dy, y = node.input
    return build.where_positive(y, dy, build.op("Mul", dy, build.op("Add", y, build.number(1))))


@lower("SeluGrad")
def selu(build: Builder, node: Any) -> str:
    dy, y = node.input
    scale, alpha = 1.0507009873554805, 1.6732632423543772
    below = build.op("Mul", dy, build.op("Add", y, build.number(scale * alpha)))
    return build.where_positive(y, build.op("Mul", dy, build.number(scale)), below)


@lower("SoftplusGrad")
def softplus(build: Builder, node: Any) -> str:
    dy, x = node.input
    return build.op("Mul", dy, build.op("Sigmoid", x))


@lower("SoftsignGrad")
def softsign(build: Builder, node: Any) -> str:
    dy, x = node.input
    beside = build.op("Add", build.number(1), build.op("Abs", x))
    return build.op("Div", dy, build.op("Mul", beside, beside))


@lower("SqrtGrad")
def sqrt(build: Builder, node: Any) -> str:
    y, dy = node.input
    return build.op("Div", build.op("Mul", dy, build.number(0.5)), y)


@lower("RsqrtGrad")
def rsqrt(build: Builder, node: Any) -> str:
    y, dy = node.input
    return build.multiply(build.number(-0.5), dy, y, y, y)


@lower("ReciprocalGrad", "InvGrad")
def reciprocal(build: Builder, node: Any) -> str:
    y, dy = node.input
    return build.multiply(build.op("Neg", dy), y, y)


@lower("BiasAddGrad")
def bias_add(build: Builder, node: Any) -> str:
    rank = len(build.ctx.get_shape(node.input[0]))
    return build.op("ReduceSum", node.input[0], build.integers(range(rank - 1)), keepdims=0)


@lower("StridedSliceGrad")
def strided_slice(build: Builder, node: Any) -> str:
    """Pad the gradient to the shape of the whole, for steps of 1 without new axes or an ellipsis."""
    shape, begin, end, strides = (build.constant(node, index) for index in range(4))
    masks = {
        key: node.get_attr_value(f"{key}_mask") or 0 for key in ("begin", "end", "shrink_axis", "new_axis", "ellipsis")
    }
    if any(stride != 1 for stride in strides) or masks["new_axis"] or masks["ellipsis"]:
        raise NotImplementedError("a slice with steps, new axes or an ellipsis")
    before, size = [0] * len(shape), list(shape)
    for axis in range(len(begin)):
        if not masks["begin"] >> axis & 1:
            before[axis] = begin[axis] % shape[axis]
        stop = shape[axis] if masks["end"] >> axis & 1 else min(end[axis], shape[axis])
        stop = stop + shape[axis] if stop < 0 else stop
        size[axis] = 1 if masks["shrink_axis"] >> axis & 1 else stop - before[axis]
    after = [whole - start - own for whole, start, own in zip(shape, before, size, strict=True)]
    full = build.op("Reshape", node.input[4], build.integers(size))
    return build.op("Pad", full, build.integers(before + after))


def padding(node: Any, size: list[int], kernel: list[int], stride: list[int], out: list[int]) -> list[int]:
    """Return the pads of two axes, begins and then ends, as TensorFlow computes them."""
    if node.get_attr_value("padding") in (b"VALID", "VALID"):
        return [0, 0, 0, 0]
    total = [max((o - 1) * s + k - n, 0) for n, k, s, o in zip(size, kernel, stride, out, strict=True)]
    return [each // 2 for each in total] + [each - each // 2 for each in total]


@lower("Conv2DBackpropFilter")
def conv_filter(build: Builder, node: Any) -> str:
    """Convolve the input with the gradient, channels as batch: strides become dilations."""
    x, dy = node.input[0], node.input[2]
    height, width, _, _ = kernel = build.shape(node.output[0])
    stride = list(node.get_attr_value("strides"))[1:3]
    size, out = build.shape(x)[1:3], build.shape(dy)[1:3]
    pads = padding(node, size, kernel[:2], stride, out)
    images = build.op("Transpose", x, perm=[3, 0, 1, 2])
    filters = build.op("Transpose", dy, perm=[3, 0, 1, 2])
    full = build.op("Conv", images, filters, dilations=stride, pads=pads)
    # Rows and columns that the stride did not reach give more than the kernel.
    cut = build.op("Slice", full, build.integers([0, 0]), build.integers([height, width]), build.integers([2, 3]))
    return build.op("Transpose", cut, perm=[2, 3, 0, 1])


@lower("MaxPoolGrad")
def max_pool(build: Builder, node: Any) -> str:
    """Add each gradient to the first largest number of its window: MaxPool gives its index."""
    x, y, dy = node.input
    batch, *size, channels = build.shape(x)
    window, stride = (list(node.get_attr_value(name))[1:3] for name in ("ksize", "strides"))
    pads = padding(node, size, window, stride, build.shape(y)[1:3])
    images = build.op("Transpose", x, perm=[0, 3, 1, 2])
    pooled = build.ctx.make_node(
        "MaxPool", [images], attr={"kernel_shape": window, "strides": stride, "pads": pads}, output_count=2
    )
    index = build.op("Reshape", pooled.output[1], build.integers([-1]))
    flat = build.op("Reshape", build.op("Transpose", dy, perm=[0, 3, 1, 2]), build.integers([-1]))
    zeros = build.op("Expand", build.number(0), build.integers([batch * channels * size[0] * size[1]]))
    summed = build.op("ScatterElements", zeros, index, flat, axis=0, reduction="add")
    images = build.op("Reshape", summed, build.integers([batch, channels, *size]))
    return build.op("Transpose", images, perm=[0, 2, 3, 1])


@lower("AvgPoolGrad")
def average_pool(build: Builder, node: Any) -> str:
    """Repeat each gradient over its window, for windows that do not overlap."""
    window, stride = list(node.get_attr_value("ksize")), list(node.get_attr_value("strides"))
    if window != stride:
        raise NotImplementedError("windows that overlap")
    shape = build.shape(node.input[1])
    return build.op("Div", build.repeat(node.input[1], shape, window), build.number(float(np.prod(window))))


def standardize(build: Builder, node: Any, x: str, mean: str, variance: str) -> tuple[str, str]:
    """Return the standardized images, and one over the standard deviation of each channel."""
    if node.get_attr_value("data_format") not in (b"NHWC", "NHWC"):
        raise NotImplementedError("batch normalization with channels first")
    epsilon = build.number(node.get_attr_value("epsilon"))
    inverse = build.op("Reciprocal", build.op("Sqrt", build.op("Add", variance, epsilon)))
    return build.op("Mul", build.op("Sub", x, mean), inverse), inverse


@lower("FusedBatchNormV3")
def batch_norm(build: Builder, node: Any) -> tuple[str, ...]:
    """Return the normalized images, the mean, the variance over N - 1; for the gradient the mean and that over N."""
    x, scale, offset, mean, variance = node.input[:5]
    unbiased = variance
    if node.get_attr_value("is_training"):
        if (node.get_attr_value("exponential_avg_factor") or 1.0) != 1.0:
            raise NotImplementedError("batch normalization that averages by itself")
        count = int(np.prod(build.shape(x)[:3]))
        mean = build.mean(x, CHANNELWISE, count)
        centred = build.op("Sub", x, mean)
        variance = build.mean(build.op("Mul", centred, centred), CHANNELWISE, count)
        unbiased = build.op("Mul", variance, build.number(count / max(count - 1, 1)))
    standard, _ = standardize(build, node, x, mean, variance)
    return build.op("Add", build.op("Mul", standard, scale), offset), mean, unbiased, mean, variance


@lower("FusedBatchNormGradV3")
def batch_norm_gradient(build: Builder, node: Any) -> tuple[str, str, str]:
    """Return the gradients of the images, the scale and the offset.

    Formula, s the standardized images, d their standard deviation, means over all but the channels:
    dx = scale / d * (dy - mean(dy) - s * mean(dy * s)) in training, scale / d * dy otherwise.
    """
    dy, x, scale, mean, variance = node.input[:5]
    standard, inverse = standardize(build, node, x, mean, variance)
    product = build.op("Mul", dy, standard)
    axes = build.integers(CHANNELWISE)
    dscale, doffset = (build.op("ReduceSum", each, axes, keepdims=0) for each in (product, dy))
    dx = dy
    if node.get_attr_value("is_training"):
        count = build.number(np.prod(build.shape(x)[:3]))
        mean_product, mean_dy = (build.op("Div", total, count) for total in (dscale, doffset))
        dx = build.op("Sub", build.op("Sub", dy, mean_dy), build.op("Mul", standard, mean_product))
    return build.multiply(dx, build.op("Mul", scale, inverse)), dscale, doffset


@lower("SparseSoftmaxCrossEntropyWithLogits")
def sparse_cross_entropy(build: Builder, node: Any) -> tuple[str, str]:
    """Return the loss of each row, and softmax - one-hot, which TensorFlow computes beside it."""
    logits, label = node.input
    return cross_entropy_of(build, logits, build.one_hot(label, build.shape(logits)[-1]))


@lower("SoftmaxCrossEntropyWithLogits")
def cross_entropy(build: Builder, node: Any) -> tuple[str, str]:
    return cross_entropy_of(build, *node.input)


def cross_entropy_of(build: Builder, logits: str, target: str) -> tuple[str, str]:
    """Return the cross-entropy of each row, and its gradient."""
    product = build.op("Mul", target, build.op("LogSoftmax", logits, axis=-1))
    loss = build.op("Neg", build.op("ReduceSum", product, build.integers([-1]), keepdims=0))
    return loss, build.op("Sub", build.op("Softmax", logits, axis=-1), target)


@lower("UnsortedSegmentSum")
def segment_sum(build: Builder, node: Any) -> str:
    """Multiply by the one-hot indices: the gradient of an embedding."""
    data, index = node.input[:2]
    count = build.shape(node.output[0])[0]
    rows = build.op("Reshape", data, build.integers([-1, build.shape(data)[-1]]))
    one_hot = build.one_hot(build.op("Reshape", index, build.integers([-1])), count)
    return build.op("MatMul", build.op("Transpose", one_hot, perm=[1, 0]), rows)


@lower("ResizeNearestNeighborGrad")
def resize_nearest(build: Builder, node: Any) -> str:
    """Sum over the pixels that repeat one, for whole factors."""
    batch, height, width, channels = build.shape(node.input[0])
    _, rows, columns, _ = build.shape(node.output[0])
    if height % rows or width % columns:
        raise NotImplementedError("a factor that is no whole number")
    split = build.integers([batch, rows, height // rows, columns, width // columns, channels])
    return build.op("ReduceSum", build.op("Reshape", node.input[0], split), build.integers([2, 4]), keepdims=0)


@lower("L2Loss")
def l2_loss(build: Builder, node: Any) -> str:
    squares = build.op("ReduceSumSquare", node.input[0], keepdims=0)
    return build.op("Mul", squares, build.number(0.5))


@lower("Log1p")
def log1p(build: Builder, node: Any) -> str:
    return build.op("Log", build.op("Add", build.number(1), node.input[0]))


@lower("Expm1")
def expm1(build: Builder, node: Any) -> str:
    return build.op("Sub", build.op("Exp", node.input[0]), build.number(1))


@lower("ShapeN")
def shapes(build: Builder, node: Any) -> tuple[str, ...]:
    """Return static shapes."""
    known = [np.array(build.shape(value), build.dtype) for value in node.input]
    return tuple(build.ctx.make_const(utils.make_name("shape"), shape).output[0] for shape in known)


@lower("Erfc")
def erfc(build: Builder, node: Any) -> str:
    return build.op("Sub", build.number(1), build.op("Erf", node.input[0]))
