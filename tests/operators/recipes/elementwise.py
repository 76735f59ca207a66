"""Operators that work element by element."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from tests.operators.recipes.draw import Call, Draw, onnx_type, recipe

recipe(
    "Identity Neg Relu Abs Sign IsNaN Exp Log Sqrt Reciprocal Floor Ceil Round Sin Cos Tan Asin Acos Atan "
    "Sinh Cosh Tanh Asinh Acosh Atanh Erf Sigmoid HardSwish Softplus Softsign Mish Size NonZero "
    "Optional OptionalGetElement"
)(lambda draw: Call([draw.floats(draw.shape())]))
recipe("PRelu")(lambda draw: Call([draw.floats(x := draw.shape()), draw.floats(draw.broadcast(x))]))
recipe("IsInf")(
    lambda draw: Call([draw.floats(draw.shape())], draw.options(detect_negative=(0, 1), detect_positive=(0, 1)))
)
recipe("Softmax LogSoftmax Hardmax")(
    lambda draw: Call([draw.floats(x := draw.shape(1))], draw.options(axis=(draw.axis(len(x)),)))
)
recipe("Mod")(lambda draw: Call(draw_binary(draw).operands, {"fmod": draw.pick(0, 1) if draw.opset >= 28 else 1}))
recipe("SwiGLU")(
    lambda draw: Call([draw.floats(x := draw.shape()), draw.floats(x)], draw.options(alpha=(0.0, 0.5, 1.0)))
)


@recipe("LeakyRelu Elu Celu Selu ThresholdedRelu HardSigmoid Swish Gelu Shrink")
def draw_activation(draw: Draw) -> Call:
    attributes = {
        "LeakyRelu": {"alpha": (0.0, 0.125, 1.0, -0.5, 2.0)},
        "Elu": {"alpha": (0.0, 0.5, 1.0)},
        "Celu": {"alpha": (0.5, 1.0)},
        "Selu": {"alpha": (0.5, 1.5), "gamma": (0.5, 1.0)},
        "ThresholdedRelu": {"alpha": (0.0, 1.0)},
        "HardSigmoid": {"alpha": (0.25, 0.5), "beta": (0.0, 0.5)},
        "Swish": {"alpha": (0.5, 1.0)},
        "Gelu": {"approximate": ("none", "tanh")},
        "Shrink": {"bias": (0.0, 1.0), "lambd": (0.0, 0.5)},
    }
    return Call([draw.floats(draw.shape())], draw.options(**attributes[draw.op]))


@recipe("Shape")
def draw_shape(draw: Draw) -> Call:
    x = draw.floats(draw.shape())
    return Call([x], draw.options(start=(0, 1, -1), end=(1, 2, -1)) if draw.opset >= 15 else {})


@recipe("Cast CastLike")
def draw_cast(draw: Draw) -> Call:
    x = draw.floats(draw.shape())
    types = [np.float32, np.float64, np.float16, np.int64, np.int32, np.bool_]
    if draw.opset >= 13:
        types.append(ml_dtypes.bfloat16)
    if draw.opset >= 19:
        types += [ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2]
    if draw.opset >= 21:
        types += [ml_dtypes.int4, ml_dtypes.uint4]
    to = draw.pick(*types)
    attributes = draw.options(saturate=(0, 1)) if draw.opset >= 19 else {}
    if draw.op == "Cast":
        return Call([x], {**attributes, "to": onnx_type(to)})
    return Call([x, np.ones(draw.pick((), (2,)), to)], attributes)


@recipe("Add Sub Mul Div Equal Greater GreaterOrEqual Less LessOrEqual Pow")
def draw_binary(draw: Draw) -> Call:
    shape = draw.shape()
    shapes = [shape, draw.broadcast(shape)]
    draw.choices.shuffle(shapes)
    return Call([draw.floats(shapes[0]), draw.floats(shapes[1])])


@recipe("Sum Max Min Mean")
def draw_variadic(draw: Draw) -> Call:
    shape = draw.shape()
    return Call([draw.floats(shape), *(draw.floats(draw.broadcast(shape)) for _ in range(draw.size(0, 3)))])


@recipe("Clip")
def draw_clip(draw: Draw) -> Call:
    x = draw.floats(draw.shape())
    low, high = draw.pick(-2.5, -1.0, 0.0, 0.5), draw.pick(0.0, 0.75, 1.5, 3.0)
    if draw.opset < 11:
        return Call([x], draw.options(min=(low,), max=(high,)))
    bounds = [np.asarray(bound, draw.dtype) if draw.chance(75) else None for bound in (low, high)]
    return Call([x, *bounds])


@recipe("Where")
def draw_where(draw: Draw) -> Call:
    shape = draw.shape()
    return Call([draw.booleans(draw.broadcast(shape)), draw.floats(shape), draw.floats(draw.broadcast(shape))])


@recipe("Dropout")
def draw_dropout(draw: Draw) -> Call:
    x, outputs = draw.floats(draw.shape()), draw.size(1, 2)
    if draw.opset < 12:
        return Call([x], draw.options(ratio=(0.0, 0.5)), outputs)
    ratio = np.asarray(draw.pick(0.0, 0.5), draw.pick(np.float32, draw.dtype)) if draw.chance() else None
    mode = np.asarray(draw.chance(70)) if draw.chance(80) else None
    return Call([x, ratio, mode], draw.options(seed=(0, 7)), outputs)


@recipe("CumSum CumProd")
def draw_cumulative(draw: Draw) -> Call:
    shape = draw.shape(1)
    axis = np.asarray(draw.axis(len(shape)), draw.pick(np.int64, np.int32))
    return Call([draw.floats(shape), axis], draw.options(exclusive=(0, 1), reverse=(0, 1)))
