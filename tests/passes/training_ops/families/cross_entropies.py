"""Recipes of the cross entropies of the last axis, and of their derivatives."""

from __future__ import annotations

import numpy as np

from tests.passes.training_ops.cases import Case
from tests.passes.training_ops.drawing import Draw, recipe


@recipe("SoftmaxCrossEntropy SoftmaxCrossEntropyGrad")
def draw_dense(draw: Draw) -> Case:
    shape = draw.shape(1, empty=False)
    attributes = draw.options(reduction=("mean", "sum"))
    scores, labels = draw.floats(shape) * np.float32(draw.pick(1, 20)), draw.floats(shape, positive=True)
    if draw.op == "SoftmaxCrossEntropy":
        return draw.case(scores, labels, attributes=attributes, outputs=2)
    return draw.case(_draw_upstream(draw), _log_prob(scores), labels, attributes=attributes)


@recipe("SparseSoftmaxCrossEntropy SparseSoftmaxCrossEntropyGrad", domain="")
def draw_sparse(draw: Draw) -> Case:
    shape = draw.shape(2, empty=False)
    # The kernels treat every other reduction as a sum.
    attributes = draw.options(reduction=("mean", "sum", "none"))
    spread = draw.pick(1, 20)
    scores = draw.floats(shape) * np.float32(spread)
    # Of a class that is nearly certain, the gradient is all rounding.
    operands = [draw.integers(0, shape[-1], shape[:-1]) if spread == 1 else scores.argmin(-1)]
    if draw.chance():
        operands.append(draw.floats(shape[:-1], positive=True))
    if draw.op == "SparseSoftmaxCrossEntropy":
        return draw.case(scores, *operands, attributes=attributes, outputs=2)
    return draw.case(_draw_upstream(draw), _log_prob(scores), *operands, attributes=attributes)


def _draw_upstream(draw: Draw) -> np.ndarray:
    return draw.floats(draw.pick((), (1,)))


def _log_prob(scores: np.ndarray) -> np.ndarray:
    wide = scores.astype(np.float64)
    return np.asarray(wide - np.log(np.exp(wide).sum(-1, keepdims=True)), np.float32)
