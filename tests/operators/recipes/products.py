"""Matrix products and convolutions."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.operators.recipes.draw import Call, Draw, recipe
from tests.operators.values import Data


@recipe("MatMul")
def draw_matmul(draw: Draw) -> Call:
    batch, (m, k, n) = draw.shape(0, 2), (draw.size(), draw.size(0 if draw.chance(10) else 1), draw.size())
    one = (k,) if draw.chance(20) else (*draw.broadcast(batch), m, k)
    two = (k,) if draw.chance(20) else (*batch, k, n)
    return Call([draw.floats(one), draw.floats(two)])


@recipe("Einsum")
def draw_einsum(draw: Draw) -> Call:
    sizes = {letter: draw.size(1, 3) for letter in "bijk"}
    text = draw.word("ij,jk->ik", "bij,bjk->bik", "i,j->ij", "ij->ji", "ii->i", "ij->", "ij,ij,ij->i", "i,i")
    if draw.chance(15):
        text = draw.word("...ij,...jk->...ik", "...i->...")
        lead = draw.shape(0, 1, empty=False)
        terms = text.partition("->")[0].split(",")
        shapes = [(*lead, *(sizes[letter] for letter in term.replace("...", ""))) for term in terms]
    else:
        shapes = [tuple(sizes[letter] for letter in term) for term in text.partition("->")[0].split(",")]
    return Call([draw.floats(shape) for shape in shapes], {"equation": text})


recipe("Gemm")(lambda draw: gemm_call(draw, draw.options(alpha=(0.5, 1.0, 0.0), beta=(0.0, 0.5, 1.0))))


def gemm_call(draw: Draw, attributes: dict[str, Any], optional: int = 11) -> Call:
    """Draw the operands of a product with an addend, which is optional since an opset."""
    m, k, n = (draw.size() for _ in range(3))
    attributes |= draw.options(transA=(0, 1), transB=(0, 1))
    one = draw.floats((k, m) if attributes.get("transA") else (m, k))
    two = draw.floats((n, k) if attributes.get("transB") else (k, n))
    bias = draw.floats(draw.broadcast((m, n))) if draw.opset < optional or draw.chance(70) else None
    return Call([one, two, bias], attributes)


def window(draw: Draw, spatial: int, kernel: list[int], *, auto: bool = True) -> dict[str, Any]:
    """Choose strides, dilations and paddings."""
    attributes: dict[str, Any] = draw.options(
        strides=([draw.size(1, 2) for _ in range(spatial)],), kernel_shape=(kernel,)
    )
    if auto and draw.chance(40):
        return {**attributes, "auto_pad": draw.word("SAME_UPPER", "SAME_LOWER", "VALID", "NOTSET")}
    return {
        **attributes,
        **draw.options(pads=([draw.size(0, 1) for _ in range(2 * spatial)],)),
        **draw.options(dilations=([draw.size(1, 2) for _ in range(spatial)],)),
    }


def convolution_call(draw: Draw, *, transposed: bool = False, auto: bool = True, spatial: int | None = None) -> Call:
    """Draw the operands and attributes of a convolution."""
    # float32 alone has kernels in ONNX Runtime; the reference evaluator takes its time.
    spatial = spatial or (draw.pick(1, 2, 2, 3) if draw.dtype == np.float32 else 1)
    group, each, out = draw.pick(1, 1, 2), draw.size(1, 2), draw.size(1, 2)
    kernel = [draw.size(1, 3) for _ in range(spatial)]
    x = draw.floats((draw.size(1, 2), group * each, *(draw.size(5, 6) for _ in range(spatial))))
    w = draw.floats((group * each, out, *kernel) if transposed else (group * out, each, *kernel))
    bias = draw.floats((group * out,)) if draw.chance() else None
    attributes = window(draw, spatial, kernel, auto=auto)
    if transposed:
        attributes |= draw.options(output_padding=([0] * spatial,))
    return Call([x, w, bias], {**attributes, **({"group": group} if group > 1 or draw.chance() else {})})


recipe("Conv")(convolution_call)
recipe("ConvTranspose")(lambda draw: convolution_call(draw, transposed=True))


def convolution_shape(call: Call) -> tuple[int, ...]:
    """Return the shape of the result of a convolution whose padding is given in numbers."""
    x, w, *_ = call.operands
    spatial = x.ndim - 2
    strides, dilations = (call.attributes.get(name, [1] * spatial) for name in ("strides", "dilations"))
    pads = call.attributes.get("pads", [0] * 2 * spatial)
    sizes = (
        (x.shape[i + 2] + pads[i] + pads[i + spatial] - dilations[i] * (w.shape[i + 2] - 1) - 1) // strides[i] + 1
        for i in range(spatial)
    )
    return (x.shape[0], w.shape[0], *sizes)


@recipe("DeformConv")
def draw_deform(draw: Draw) -> Call:
    kernel, group = [draw.size(1, 2), draw.size(1, 2)], draw.pick(1, 2)
    n, each, out, h, w = draw.size(1, 2), draw.size(1, 2), 1, 2, draw.size(2, 3)
    oh, ow = h - kernel[0] + 1, w - kernel[1] + 1
    offsets = draw.pick(1, group)
    places = offsets * kernel[0] * kernel[1]
    offset = np.asarray(draw.floats((n, 2 * places, oh, ow)) / 8, draw.dtype)
    bias = draw.floats((group * out,)) if draw.chance() else None
    mask = draw.floats((n, places, oh, ow)) if draw.chance() else None
    operands = [draw.floats((n, group * each, h, w)), draw.floats((group * out, each, *kernel)), offset, bias, mask]
    return Call(operands, {"kernel_shape": kernel, "pads": [0] * 4, "group": group, "offset_group": offsets})


@recipe("Col2Im")
def draw_col2im(draw: Draw) -> Call:
    block = [draw.size(1, 2), draw.size(1, 2)]
    image = [draw.size(2, 4), draw.size(2, 4)]
    count = (image[0] - block[0] + 1) * (image[1] - block[1] + 1)
    x = draw.floats((draw.size(1, 2), draw.size(1, 2) * block[0] * block[1], count))
    return Call([x, np.asarray(image, np.int64), np.asarray(block, np.int64)])


@recipe("CausalConvWithState")
def draw_causal_convolution(draw: Draw) -> Call:
    n, channels, length, size = draw.size(1, 2), draw.size(1, 3), draw.size(1, 4), draw.size(1, 3)
    operands: list[Data | None] = [draw.floats((n, channels, length)), draw.floats((channels, 1, size))]
    operands.append(draw.floats((channels,)) if draw.chance() else None)
    operands.append(draw.floats((n, channels, size - 1)) if draw.chance() else None)
    return Call(operands, draw.options(activation=("none", "none", "silu", "swish")), outputs=2)


@recipe("LinearAttention")
def draw_linear_attention(draw: Draw) -> Call:
    n, length, heads, shared = draw.size(1, 2), draw.size(1, 3), draw.size(1, 2), draw.size(1, 2)
    keys, values = draw.size(1, 3), draw.size(1, 3)
    rule = draw.word("linear", "gated", "delta", "gated_delta")
    operands: list[Data | None] = [
        draw.floats((n, length, heads * shared * keys)),
        draw.floats((n, length, heads * keys)),
        draw.floats((n, length, heads * values)),
        draw.floats((n, heads, keys, values)) if draw.chance() else None,
        # A factor of at most 1.
        -draw.floats((n, length, heads * draw.pick(1, keys)), positive=True) if "gated" in rule else None,
        draw.floats((n, length, draw.pick(1, heads))) if "delta" in rule else None,
    ]
    attributes = {"q_num_heads": heads * shared, "kv_num_heads": heads, "update_rule": rule}
    return Call(operands, {**attributes, **draw.options(scale=(0.0, 0.5))}, outputs=2)
