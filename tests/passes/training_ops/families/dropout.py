"""The recipe of the derivative of Dropout."""

from __future__ import annotations

import numpy as np

from tests.passes.training_ops.cases import Case
from tests.passes.training_ops.drawing import Draw, recipe


@recipe("DropoutGrad")
def draw_dropout(draw: Draw) -> Case:
    shape, inputs = draw.shape(), []
    keeps_all = False
    if draw.chance(75):
        ratio = draw.pick(0.0, 0.1, 0.5, 0.9)
        # With ratio 0, Dropout keeps all, and the kernel does not look at the mask.
        keeps_all = ratio == 0
        inputs.append(np.asarray(ratio, draw.pick(np.float32, np.float16, np.float64)).reshape(draw.pick((), (1,))))
        if draw.chance():
            inputs.append(np.asarray(draw.chance()))
    mask = np.ones(shape, np.bool_) if keeps_all else draw.booleans(shape)
    dy = draw.floats(shape, dtype=draw.pick(np.float32, np.float64))
    constants = (2,) if inputs and draw.chance() else ()
    return draw.case(dy, mask, *inputs, attributes=draw.options(seed=(0, 7), ratio=(0.1,)), constants=constants)
