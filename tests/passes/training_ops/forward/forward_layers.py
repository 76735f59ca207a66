"""Products, convolutions, pooling, normalizations, losses and recurrences."""

from __future__ import annotations

import functools

import numpy as np

from tests.passes.training_ops.forward.node import KNOWN, UNKNOWN, floats, forward, integers, microsoft


def spatial(t, kind, x, *operands, **options):
    """Call the function of PyTorch for as many spatial axes as a value has."""
    return getattr(t.nn.functional, f"{kind}{x.ndim - 2}d")(x, *operands, **options)


def lose(t, x, labels, weights=None, index=-1, *, reduction):
    """Compute PyTorch's cross-entropy, of all labels but one."""
    return t.nn.functional.cross_entropy(x, labels, weights, ignore_index=int(index), reduction=reduction)


LABELS = integers(1, 3, 0, 1, 2)

# Known sizes need operators of ONNX and stock ONNX Runtime alone.
for name, a, b in (("", (3, 4), (4, 5)), ("rows", (2, 3, 4), (4, 5)), ("broadcast", (2, 3, 4), (1, 4, 5))):
    forward("MatMul", floats(*a), floats(*b), name=name)
for transposed in (0, 1):
    shapes = ((4, 3), (5, 4)) if transposed else ((3, 4), (4, 5))
    options = {"transA": transposed, "transB": transposed}
    forward("Gemm", *(floats(*shape) for shape in shapes), floats(5), name=f"transposed {transposed}", **options)
for opset in (12, 17):
    options = {"name": f"{UNKNOWN}, opset {opset}", "shapes": UNKNOWN, "opset": opset}
    forward("MatMul", floats(2, 3, 4), floats(1, 4, 5), torch=lambda t, a, b: a @ b, **options)
    forward("Gemm", floats(3, 4), floats(4, 5), floats(5), torch=lambda t, a, b, c: a @ b + 2 * c, beta=2.0, **options)

CONVOLUTIONS = {
    "1 axis": ((2, 3, 7), (4, 3, 3), {"pads": [1, 1], "strides": [2]}, {"padding": 1, "stride": 2}),
    "2 axes": ((2, 3, 6, 5), (4, 3, 3, 2), {"pads": [1, 0, 1, 0]}, {"padding": (1, 0)}),
    "dilated": (
        (2, 3, 7, 6),
        (4, 3, 3, 2),
        {"dilations": [2, 1], "strides": [1, 2]},
        {"dilation": (2, 1), "stride": (1, 2)},
    ),
    "groups": ((2, 4, 5, 5), (6, 2, 3, 3), {"group": 2}, {"groups": 2}),
    "depthwise": ((2, 4, 5, 5), (4, 1, 3, 3), {"group": 4, "pads": [1, 1, 1, 1]}, {"groups": 4, "padding": 1}),
    "3 axes": ((1, 2, 4, 4, 3), (3, 2, 2, 2, 2), {}, {}),
}
for name, (image, window, attributes, options) in CONVOLUTIONS.items():
    forward(
        "Conv",
        *(floats(*image), floats(*window), floats(window[0])),
        name=name,
        torch=lambda t, x, w, b, options=options: spatial(t, "conv", x, w, b, **options),
        kernel_shape=[*window[2:]],
        **attributes,
    )
forward(
    "Conv",
    floats(2, 3, 5, 5),
    floats(4, 3, 3, 3),
    name="no bias",
    varied=(1,),
    torch=lambda t, x, w: t.nn.functional.conv2d(x, w),
)
TRANSPOSED = {
    "1 axis": ((2, 3, 4), (3, 2, 3), {"strides": [2], "pads": [1, 1]}, {"stride": 2, "padding": 1}),
    "2 axes": (
        (2, 3, 4, 3),
        (3, 2, 3, 2),
        {"strides": [2, 1], "output_padding": [1, 0]},
        {"stride": (2, 1), "output_padding": (1, 0)},
    ),
    "groups": ((2, 4, 3, 3), (4, 1, 2, 2), {"group": 2, "dilations": [2, 1]}, {"groups": 2, "dilation": (2, 1)}),
}
for name, (image, window, attributes, options) in TRANSPOSED.items():
    forward(
        "ConvTranspose",
        *(floats(*image), floats(*window), floats(window[1] * attributes.get("group", 1))),
        name=name,
        torch=lambda t, x, w, b, options=options: spatial(t, "conv_transpose", x, w, b, **options),
        kernel_shape=[*window[2:]],
        **attributes,
    )

POOLS = {
    "1 axis": ((2, 2, 8), [3], {"strides": [2]}),
    "2 axes": ((2, 2, 6, 6), [2, 3], {"strides": [2, 1], "pads": [1, 1, 1, 1]}),
    "3 axes": ((1, 2, 4, 4, 4), [2, 2, 2], {"strides": [2, 2, 2]}),
}
for name, (image, window, attributes) in POOLS.items():
    half = {"stride": attributes["strides"], "padding": attributes.get("pads", [0] * 6)[: len(window)]}
    for outputs in (1, 2):
        forward(
            "MaxPool",
            floats(*image),
            name=f"{name}, {outputs} results",
            torch=lambda t, x, w=window, half=half: spatial(t, "max_pool", x, w, **half),
            outputs=outputs,
            kernel_shape=window,
            **attributes,
        )
    for counted in (0, 1):
        forward(
            "AveragePool",
            floats(*image),
            name=f"{name}, count_include_pad {counted}",
            torch=lambda t, x, w=window, half={**half, "count_include_pad": bool(counted)}: spatial(
                t, "avg_pool", x, w, **half
            ),
            kernel_shape=window,
            count_include_pad=counted,
            **attributes,
        )
for shapes in (KNOWN, UNKNOWN):
    forward(
        "GlobalAveragePool",
        floats(2, 3, 4, 5),
        name=shapes,
        shapes=shapes,
        torch=lambda t, x: x.mean((2, 3), keepdim=True),
    )
for mode in ("align_corners", "half_pixel"):
    forward(
        "Resize",
        *(floats(1, 2, 3, 4), None, np.float32([1, 1, 2, 2.5])),
        name=mode,
        constants=(2,),
        torch=lambda t, x, _, scales, mode=mode: t.nn.functional.interpolate(
            x, size=(6, 10), mode="bilinear", align_corners=mode == "align_corners"
        ),
        mode="linear",
        coordinate_transformation_mode=mode,
    )
forward("Resize", floats(1, 2, 3, 4), None, np.float32([1, 1, 2, 2]), name="nearest", constants=(2,), mode="nearest")

forward(
    "LayerNormalization",
    *(floats(2, 3, 4), floats(4), floats(4)),
    outputs=3,
    torch=lambda t, x, w, b: t.nn.functional.layer_norm(x, (4,), w, b),
)
forward(
    "LayerNormalization",
    *(floats(2, 3, 4), floats(3, 4), floats(3, 4)),
    name="two axes",
    outputs=3,
    torch=lambda t, x, w, b: t.nn.functional.layer_norm(x, (3, 4), w, b, 0.1),
    axis=1,
    epsilon=0.1,
)
forward(
    "SimplifiedLayerNormalization",
    *(floats(2, 3, 4), floats(4)),
    outputs=2,
    torch=lambda t, x, w: t.nn.functional.rms_norm(x, (4,), w, 1e-5),
)
for opset in (14, 15):
    forward(
        "BatchNormalization",
        *(floats(3, 2, 4, 4), floats(2), floats(2), floats(2), floats(2, low=0.5)),
        name=f"opset {opset}",
        outputs=3,
        varied=(0, 1, 2),
        opset=opset,
        torch=lambda t, x, w, b, *_: t.nn.functional.batch_norm(x, None, None, w, b, training=True),
        training_mode=1,
    )

for reduction in ("mean", "sum", "none"):
    for weights in (None, floats(4, low=0.5)):
        extra = () if weights is None else (weights,)
        weighted = "" if weights is None else ", weights"
        cross_entropy = functools.partial(lose, reduction=reduction)
        forward(
            "SoftmaxCrossEntropyLoss",
            *(floats(5, 4), LABELS, *extra),
            name=reduction + weighted,
            outputs=2,
            varied=(0,),
            torch=functools.partial(cross_entropy, index=0),
            reduction=reduction,
            ignore_index=0,
        )
        microsoft(
            "SoftmaxCrossEntropyLossInternal",
            # Its builder ends the process where an operand is left out before another one.
            *(floats(5, 4), LABELS, *extra, *([] if weights is None else [np.int64(0)])),
            name=reduction + weighted,
            outputs=2,
            varied=(0,),
            constants=() if weights is None else (3,),
            torch=cross_entropy,
            reduction=reduction,
        )
    if reduction != "none":
        shares = np.eye(4, dtype=np.float32)[LABELS] * np.float32(0.5) + np.float32(0.125)
        cases = ((microsoft, "SoftmaxCrossEntropy", shares), (forward, "SparseSoftmaxCrossEntropy", LABELS))
        for add, operator, targets in cases:
            add(
                operator,
                *(floats(5, 4), targets),
                name=reduction,
                outputs=2,
                varied=(0,),
                torch=functools.partial(lose, reduction=reduction),
                reduction=reduction,
            )
forward(
    "SparseSoftmaxCrossEntropy",
    *(floats(5, 4), LABELS, floats(5, low=0.5)),
    name="weights of rows",
    outputs=2,
    varied=(0,),
    torch=lambda t, x, y, w: (t.nn.functional.cross_entropy(x, y, reduction="none") * w).sum() / w.sum(),
)


def recur(t, kind, gates, x, w, r, b, start, cells=None):
    """Run a recurrence of PyTorch with weights in the order of its gates."""
    names = ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0")
    weights = {}
    for name, value in zip(names, (w[0], r[0], *b[0].chunk(2)), strict=True):
        parts = value.chunk(len(gates))
        weights[name] = t.cat([parts[i] for i in gates])
    unit = getattr(t.nn, kind)(x.shape[-1], r.shape[-1], dtype=x.dtype)
    state = start if cells is None else (start, cells)
    return t.func.functional_call(unit, weights, (x, state))[0].unsqueeze(1)


STATE = floats(1, 3, 5)
forward(
    "LSTM",
    *(floats(4, 3, 2), floats(1, 20, 2), floats(1, 20, 5), floats(1, 40), None, STATE, floats(1, 3, 5)),
    # ONNX: input, output, forget, cell; PyTorch: input, forget, cell, output.
    torch=lambda t, x, w, r, b, _, h, c: recur(t, "LSTM", (0, 2, 3, 1), x, w, r, b, h, c),
    outputs=3,
    hidden_size=5,
)
forward(
    "GRU",
    *(floats(4, 3, 2), floats(1, 15, 2), floats(1, 15, 5), floats(1, 30), None, STATE),
    # ONNX: update, reset, hidden; PyTorch: reset, update, hidden.
    torch=lambda t, x, w, r, b, _, h: recur(t, "GRU", (1, 0, 2), x, w, r, b, h),
    outputs=2,
    hidden_size=5,
    linear_before_reset=1,
)
