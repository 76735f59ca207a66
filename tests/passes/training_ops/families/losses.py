"""Recipes of the losses of class numbers along axis 1, and of their derivatives."""

from __future__ import annotations

import numpy as np

from tests.passes.training_ops.cases import Case
from tests.passes.training_ops.drawing import Draw, recipe

_IGNORED = (-1, -100, 0, 1)


@recipe("SoftmaxCrossEntropyLossInternal")
def draw_loss(draw: Draw) -> Case:
    scores, labels, weights, ignored = _draw_rows(draw)
    index = np.int64(ignored).reshape(draw.pick((), (1,))) if ignored != -1 or draw.chance() else None
    attributes = draw.options(reduction=("mean", "sum", "none"), output_type=(1,))
    return draw.case(scores, labels, weights, index, attributes=attributes, outputs=2)


@recipe("SoftmaxCrossEntropyLossInternalGrad")
def draw_internal_gradient(draw: Draw) -> Case:
    log_prob, labels, weights, ignored = _draw_rows(draw)
    attributes = draw.options(reduction=("mean", "sum", "none"), output_type=(1,))
    index = np.int64(ignored).reshape(draw.pick((), (1,))) if ignored != -1 or draw.chance() else None
    operands = [_draw_upstream(draw, labels, attributes), log_prob, labels, weights, index]
    if draw.chance():
        bias = draw.floats(log_prob.shape)
        operands.append(bias.reshape(-1) if draw.chance(30) else bias)
    return draw.case(*operands, attributes=attributes)


@recipe("SoftmaxCrossEntropyLossGrad")
def draw_gradient(draw: Draw) -> Case:
    log_prob, labels, weights, ignored = _draw_rows(draw)
    attributes = draw.options(reduction=("mean", "sum", "none"))
    if ignored != -1 or draw.chance():
        attributes["ignore_index"] = ignored
    return draw.case(_draw_upstream(draw, labels, attributes), log_prob, labels, weights, attributes=attributes)


# Their functions are written for opset 12, and for opset 13.
@recipe("NegativeLogLikelihoodLossInternal", opsets=(12,))
@recipe("NegativeLogLikelihoodLossInternal2", opsets=(13, 17, 18, 21))
def draw_likelihood(draw: Draw) -> Case:
    log_prob, labels, weights, ignored = _draw_rows(draw)
    attributes = draw.options(reduction=("mean", "sum", "none"))
    if draw.chance(30):
        return draw.case(log_prob, np.maximum(labels, 0), weights, attributes=attributes)
    return draw.case(log_prob, labels, weights, np.int64(ignored).reshape(draw.pick((), (1,))), attributes=attributes)


def _draw_rows(draw: Draw) -> tuple[np.ndarray, np.ndarray, np.ndarray | None, int]:
    """Draw logarithms of probabilities, labels, weights of classes, and the label that is ignored."""
    # The kernels divide by the number of labels.
    n, c, *more = draw.size(), draw.size(1, 6), *draw.shape(0, 2, empty=False)
    spread, ignored = draw.pick(1, 20), draw.pick(*_IGNORED)
    scores = draw.floats((n, c, *more), dtype=np.float64) * spread
    log_prob = scores - np.log(np.exp(scores).sum(1, keepdims=True))
    # Of a class that is nearly certain, the gradient is all rounding.
    labels = draw.integers(0, c, (n, *more)) if spread == 1 else scores.argmin(1)
    is_ignored = np.asarray(draw.booleans(labels.shape) if draw.chance(90) else True)
    labels = np.where(is_ignored, ignored, labels).astype(draw.pick(np.int64, np.int32))
    weights = draw.floats((c,), positive=True) if draw.chance() else None
    return log_prob.astype(np.float32), np.minimum(labels, c - 1), weights, ignored


def _draw_upstream(draw: Draw, labels: np.ndarray, attributes: dict[str, object]) -> np.ndarray:
    """Draw the gradient of the loss, of the shape that the loss has."""
    return draw.floats(labels.shape if attributes.get("reduction") == "none" else draw.pick((), (1,)))
