"""Recipes of batch normalization, and of the derivatives of layer and batch normalization."""

from __future__ import annotations

import numpy as np

from tests.passes.training_ops.cases import Case
from tests.passes.training_ops.drawing import Draw, recipe


@recipe("LayerNormalizationGrad SimplifiedLayerNormalizationGrad InvertibleLayerNormalizationGrad")
def draw_layer_slope(draw: Draw) -> Case:
    shape = draw.shape(1)
    axis = draw.size(0, len(shape) - 1)
    # The kernels refuse rows of one element.
    shape = (*shape[:axis], *(max(size, 1) for size in shape[axis:-1]), max(shape[-1], 1) + 1)
    # The kernels take float64 for LayerNormalizationGrad alone, by a function of the opsets 13 to 17.
    is_wide = draw.op[0] == "L" and 13 <= draw.opset < 18 and draw.chance(30)
    if is_wide:
        draw.dtype = np.float64
    dy, x, scale = draw.floats(shape), draw.floats(shape), draw.floats(shape[axis:])
    rows = shape[:axis] if draw.chance(10) else (*shape[:axis], *[1] * (len(shape) - axis))
    mean, spread = draw.floats(rows, dtype=np.float32), draw.floats(rows, positive=True, dtype=np.float32)
    spread += np.float32(0.5)
    attributes = {"axis": axis - draw.pick(0, 0 if is_wide else len(shape))}
    if attributes["axis"] == -1 and draw.chance():
        attributes = {}
    if draw.op[0] == "L":
        return draw.case(dy, x, scale, mean, spread, attributes=attributes, outputs=3)
    if draw.op[0] == "S":
        return draw.case(dy, x, scale, spread, attributes=attributes, outputs=2)
    scale = np.where(np.abs(scale) < 0.1, np.float32(0.5), scale)
    operands = (dy, x, scale, draw.floats(shape[axis:]), spread)
    return draw.case(*operands, attributes=attributes, outputs=3, shapes=(shape, scale.shape, scale.shape))


@recipe("BatchNormInternal")
def draw_batch(draw: Draw) -> Case:
    shape = draw.image(draw.pick(0, 1, 2, 3))
    scale, bias, mean = (draw.floats(shape[1:2]) for _ in range(3))
    variance = draw.floats(shape[1:2], positive=True) + np.float32(0.1)
    attributes = draw.options(epsilon=(1e-5, 0.5), momentum=(0.9, 0.25, 1.0), training_mode=(0, 1))
    outputs = 5 if attributes.get("training_mode", 1) else 1
    operands = (draw.floats(shape) + np.float32(draw.pick(0, 4)), scale, bias, mean, variance)
    return draw.case(*operands, attributes=attributes, outputs=outputs)


@recipe("BatchNormalizationGrad")
def draw_batch_slope(draw: Draw) -> Case:
    shape = draw.image(draw.pick(0, 1, 2, 3))
    scale, mean = draw.floats(shape[1:2]), draw.floats(shape[1:2])
    spread = draw.floats(shape[1:2], positive=True) + np.float32(0.1)
    # The sum over a single channel must not cancel.
    operands = (draw.floats(shape) + np.float32(1), draw.floats(shape), scale, mean, spread)
    return draw.case(*operands, attributes={"epsilon": 1e-5}, outputs=3)
