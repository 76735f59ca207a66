"""Recipes of optimizers and accumulators. Their states are inputs of the graph, and the next states its outputs."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.passes.training_ops.cases import Case
from tests.passes.training_ops.drawing import OPSETS, Draw, recipe

# A Loop carries sequences from opset 13 on.
_LOOPS = tuple(opset for opset in OPSETS if opset >= 13)


def _rate(draw: Draw) -> np.ndarray:
    return np.asarray(draw.pick(0.0, 1e-3, 0.1, 2.0), np.float32).reshape(draw.pick((), (1,)))


def _signal(draw: Draw) -> np.ndarray | None:
    return draw.booleans(draw.pick((), (1,))) if draw.chance(60) else None


@recipe("SGDOptimizer")
def draw_sgd(draw: Draw) -> Case:
    shape = draw.shape()
    operands = [_rate(draw), draw.floats(shape), draw.floats(shape)]
    return draw.case(*operands, outputs=2, unnamed=draw.pick((), (0,), (1,)))


@recipe("AdamOptimizer")
def draw_adam(draw: Draw) -> Case:
    shape = draw.shape()
    count = draw.integers(0, draw.pick(3, 5000), draw.pick((), (1,)))
    tensors = [draw.floats(shape), draw.floats(shape), draw.floats(shape), draw.floats(shape, positive=True)]
    attributes = draw.options(
        alpha=(0.0, 0.5), beta=(0.5, 0.99), epsilon=(1e-6, 0.1), do_bias_correction=(0, 1), weight_decay_mode=(0, 1)
    )
    attributes |= draw.options(**{"lambda": (0.0, 0.01, 0.5)})
    return draw.case(_rate(draw), count, *tensors, attributes=attributes, outputs=5, unnamed=draw.pick((), (4,), (3,)))


@recipe("InPlaceAccumulator InPlaceAccumulatorV2")
def draw_accumulator(draw: Draw) -> Case:
    shape = draw.shape()
    operands = [draw.floats(shape), draw.floats(shape), _signal(draw)]
    return draw.case(*operands, outputs=2 if draw.op.endswith("V2") else 1)


def _sequences(draw: Draw, count: int, **options: Any) -> list[list[np.ndarray]]:
    shapes = [draw.shape(empty=False) for _ in range(draw.size(1, 4))]
    return [[draw.floats(shape, **options) for shape in shapes] for _ in range(count)]


@recipe("SGDOptimizerV2", opsets=_LOOPS)
def draw_sgd_v2(draw: Draw) -> Case:
    return draw.case(_rate(draw), *_sequences(draw, 2), _signal(draw), outputs=2)


@recipe("AdamWOptimizer", opsets=_LOOPS)
def draw_adamw(draw: Draw) -> Case:
    *sequences, squares = _sequences(draw, 4)
    sequences.append([np.abs(array) for array in squares])
    count = draw.integers(1, draw.pick(3, 5000), draw.pick((), (1,)))
    mode = draw.pick(0, 1)
    attributes = {"adam_mode": mode, "correct_bias": 1 if mode == 0 else draw.pick(0, 1)}
    attributes |= draw.options(alpha=(0.0, 0.5), beta=(0.5, 0.99), epsilon=(1e-6, 0.1), weight_decay=(0.0, 0.5))
    return draw.case(_rate(draw), count, *sequences, _signal(draw), attributes=attributes, outputs=4)


@recipe("InplaceClipGradNorm", opsets=_LOOPS)
def draw_clip(draw: Draw) -> Case:
    attributes = draw.options(max_norm=(1e-3, 1.0, 100.0), norm_type=("fro",))
    return draw.case(*_sequences(draw, 1), attributes=attributes)
