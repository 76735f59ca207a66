"""Activations, arithmetic and reductions."""

from __future__ import annotations

import functools

import numpy as np

from tests.passes.training_ops.forward.node import SYMBOLS, UNKNOWN, floats, forward, integers, microsoft

X = (3, 4)
NARROW = (4,)

# Their gradients are of operators of ONNX.
for op_type in ("Abs", "Cos", "Erf", "Exp", "Identity", "Neg", "Sin"):
    forward(op_type, floats(*X))
for op_type in ("Log", "Reciprocal", "Sqrt"):
    forward(op_type, floats(*X, low=0.5))
forward("Cast", floats(*X), to=1)
forward("Clip", floats(*X), np.float32(-0.7), np.float32(0.9), constants=(1, 2))
forward("Pow", floats(*X, low=0.5), np.float32(2.5), constants=(1,))
forward("Where", np.tile([True, False], (3, 2)), floats(*X), floats(*X))

forward("Relu", floats(*X), torch=lambda t, x: t.relu(x))
forward("LeakyRelu", floats(*X), torch=lambda t, x: t.nn.functional.leaky_relu(x, 0.2), alpha=0.2)
forward("Sigmoid", floats(*X), torch=lambda t, x: t.sigmoid(x))
forward("Tanh", floats(*X), torch=lambda t, x: t.tanh(x))
forward("Gelu", floats(*X), opset=20, torch=lambda t, x: t.nn.functional.gelu(x))
# The builder takes its derivative for that of the exact form.
forward("Gelu", floats(*X), name="of tanh", opset=20, approximate="tanh")
microsoft("Gelu", floats(*X), name="of ONNX Runtime", torch=lambda t, x: t.nn.functional.gelu(x))
microsoft("FastGelu", floats(*X), torch=lambda t, x: t.nn.functional.gelu(x, approximate="tanh"))
microsoft("QuickGelu", floats(*X), torch=lambda t, x: x * t.sigmoid(1.5 * x), alpha=1.5)
microsoft("BiasGelu", floats(*X), floats(*NARROW), torch=lambda t, x, b: t.nn.functional.gelu(x + b))
microsoft(
    "FastGelu",
    *(floats(*X), floats(*NARROW)),
    name="biased",
    torch=lambda t, x, b: t.nn.functional.gelu(x + b, approximate="tanh"),
)


def along(t, x, function, axis):
    """Apply a softmax along an axis."""
    return getattr(t, function)(x, axis)


def along_rest(t, x, function, axis):
    """Apply a softmax along all axes from one on together, as before opset 13."""
    return along(t, x.flatten(axis), function, axis).view(x.shape)


for opset, apply, axes in ((12, along_rest, (1, 2)), (17, along, (1, -1))):
    for op_type, function in (("Softmax", "softmax"), ("LogSoftmax", "log_softmax")):
        for axis in axes:
            torch = functools.partial(apply, function=function, axis=axis)
            forward(op_type, floats(2, 3, 4), name=f"axis {axis}, opset {opset}", opset=opset, torch=torch, axis=axis)

forward("Dropout", floats(*X), np.float32(0.4), np.bool_(True), outputs=2, constants=(1, 2))
forward("Dropout", floats(*X), name="opset 11", outputs=2, opset=11, ratio=0.4)
microsoft(
    "FakeQuant",
    *(floats(*X), np.float32(0.25), np.float32(3)),
    outputs=2,
    constants=(1, 2),
    torch=lambda t, x, *_: t.fake_quantize_per_tensor_affine(x, 0.25, 3, 0, 8),
    quant_min=0,
    quant_max=8,
)
for name, scales in (("", (0.5, 2.0)), ("alike", (2.0, 2.0))):
    microsoft(
        "ScaledSum",
        *(floats(*X), floats(*X)),
        name=name,
        torch=lambda t, x, y, scales=scales: scales[0] * x + scales[1] * y,
        scale_0=scales[0],
        scale_1=scales[1],
    )

BINARY = {
    "Add": lambda t, a, b: a + b,
    "Sub": lambda t, a, b: a - b,
    "Mul": lambda t, a, b: a * b,
    "Div": lambda t, a, b: a / b,
    "Min": lambda t, a, b: t.minimum(a, b),
    "Max": lambda t, a, b: t.maximum(a, b),
}
for op_type, function in BINARY.items():
    forward(op_type, floats(*X), floats(*NARROW, low=0.5), torch=function)
    # Of a symbol and a number the builder cannot say which one is repeated, and gives up for sums.
    forward(op_type, floats(*X), floats(*NARROW, low=0.5), name=SYMBOLS, shapes=SYMBOLS, torch=function)
    for opset in (12, 17):
        name = f"{UNKNOWN}, opset {opset}"
        forward(op_type, floats(*X), floats(*NARROW, low=0.5), name=name, torch=function, shapes=UNKNOWN, opset=opset)
forward("Div", floats(*NARROW), floats(*X, low=0.5), name="first alone", varied=(0,))
forward("Div", floats(*X), floats(*X, low=0.5), name="second alone", varied=(1,), torch=BINARY["Div"])

for keepdims in (0, 1):
    name = f"keepdims {keepdims}"
    mean = functools.partial(lambda t, x, _=None, kept=False: x.mean((0, 2), keepdim=kept), kept=bool(keepdims))
    for op_type in ("ReduceMean", "ReduceLogSumExp", "ReduceL2"):
        torch = mean if op_type == "ReduceMean" else None
        for opset in (12, 17):
            options = {"torch": torch, "opset": opset, "axes": [0, 2], "keepdims": keepdims}
            forward(op_type, floats(2, 3, 4), name=f"{name}, opset {opset}", **options)
        options = {"torch": torch, "opset": 18, "constants": (1,), "keepdims": keepdims}
        forward(op_type, floats(2, 3, 4), integers(0, 2), name=f"{name}, opset 18", **options)
    forward("ReduceSum", floats(2, 3, 4), integers(0, 2), name=name, constants=(1,), keepdims=keepdims)
    forward("ReduceSum", floats(2, 3, 4), name=f"{name}, opset 12", opset=12, axes=[0, 2], keepdims=keepdims)
