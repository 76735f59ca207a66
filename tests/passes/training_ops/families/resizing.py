"""The recipe of the derivative of Resize."""

from __future__ import annotations

import itertools

import numpy as np

from graphscale.operators import MICROSOFT
from tests.operators.values import Data
from tests.passes.training_ops.cases import REFERENCES, Case
from tests.passes.training_ops.drawing import Draw, recipe


def spread(case: Case) -> list[Data]:
    """Give each number of dY to its four neighbours in X, as the kernel for CUDA does."""
    dy, x, _, scales = (*case.inputs, None, None)[:4]
    if x.shape == dy.shape:
        return [dy]
    is_aligned = case.attributes.get("coordinate_transformation_mode") == "align_corners"
    result = np.zeros(x.shape)

    def neighbours(axis: int, place: int) -> list[tuple[int, float]]:
        size, length = x.shape[axis], dy.shape[axis]
        if is_aligned:
            at = place * (size - 1) / (length - 1) if length > 1 else 0.0
        else:
            at = (place + 0.5) * (size / length if scales is None else 1 / scales[axis]) - 0.5
        at = min(max(at, 0.0), size - 1)
        low = int(at)
        return [(low, 1 - (at - low)), (min(low + 1, size - 1), at - low)]

    for row, column in itertools.product(range(dy.shape[2]), range(dy.shape[3])):
        for (i, one), (j, other) in itertools.product(neighbours(2, row), neighbours(3, column)):
            result[:, :, i, j] += one * other * dy[:, :, row, column]
    return [result.astype(dy.dtype)]


@recipe("ResizeGrad")
def draw_resize_gradient(draw: Draw) -> Case:
    shape = (draw.size(1, 2), draw.size(1, 3), draw.size(1, 6), draw.size(1, 6))
    scales = np.asarray([1, 1, *(draw.pick(0.5, 0.75, 1, 1.2, 2, 2.5) for _ in range(2))], np.float32)
    result = [max(int(np.floor(size * scale)), 1) for size, scale in zip(shape, scales, strict=True)]
    modes = ("half_pixel", "align_corners")
    attributes = {"mode": "linear", **draw.options(coordinate_transformation_mode=modes)}
    inputs = [draw.floats(result), draw.floats(shape)]
    # Where Resize has sizes, it has no scales.
    if draw.chance(70):
        inputs += [None, scales]
    return draw.case(*inputs, attributes=attributes)


REFERENCES[MICROSOFT, "ResizeGrad"] = spread
