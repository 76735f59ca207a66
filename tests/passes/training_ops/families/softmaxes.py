"""Recipes of the derivatives of Softmax and LogSoftmax."""

from __future__ import annotations

import numpy as np

from tests.passes.training_ops.cases import Case
from tests.passes.training_ops.drawing import Draw, recipe


@recipe("SoftmaxGrad SoftmaxGrad_13 LogSoftmaxGrad LogSoftmaxGrad_13")
def draw_softmax(draw: Draw) -> Case:
    is_13 = draw.op.endswith("_13")
    # Along an axis within, the kernels crash on empty tensors.
    shape = draw.shape(1 if is_13 else 2, empty=not is_13)
    axis = draw.axis(len(shape))
    attributes = {"axis": axis} if draw.chance(75) else {}
    axis = attributes.get("axis", -1 if is_13 else 1) % len(shape)
    axes = axis if is_13 else tuple(range(axis, len(shape)))
    scores = draw.floats(shape, dtype=np.float64) * draw.pick(1, 3)
    log_y = scores - np.log(np.maximum(np.exp(scores).sum(axes, keepdims=True), 1e-9))
    y = log_y if draw.op.startswith("Log") else np.exp(log_y)
    return draw.case(draw.floats(shape), y.astype(np.float32), attributes=attributes)
