"""Recipes of products, quotients and roundings, element by element."""

from __future__ import annotations

import numpy as np

from graphscale.operators import MICROSOFT
from tests.operators.values import Data
from tests.passes.training_ops.cases import REFERENCES, Case
from tests.passes.training_ops.drawing import Draw, recipe


@recipe("Scale")
def draw_scale(draw: Draw) -> Case:
    dtype = draw.pick(np.float32, np.float64, np.int64, np.int32)
    factor = np.asarray(draw.pick(1, 3, 70_000), dtype)
    x = draw.floats(draw.shape(), dtype=draw.pick(np.float32, np.float64))
    attributes = draw.options(scale_down=(0, 1))
    constants = (1,) if draw.chance() else ()
    return draw.case(x, factor.reshape(draw.pick((), (1,))), attributes=attributes, constants=constants)


def _scales(count: int, draw: Draw) -> dict[str, float]:
    return {f"scale_{i}": draw.pick(0.5, 1.0, 1 / 3) for i in range(count)}


def add_up(case: Case) -> list[Data]:
    return [sum((np.float32(case.attributes[f"scale_{i}"]) * x for i, x in enumerate(case.inputs)), np.float32(0))]


@recipe("ScaledSum")
def draw_scaled_sum(draw: Draw) -> Case:
    shape, count = draw.shape(), draw.size(2, 3)
    return draw.case(*(draw.floats(shape) for _ in range(count)), attributes=_scales(count, draw))


@recipe("BatchScale")
def draw_batch_scale(draw: Draw) -> Case:
    count = draw.size(2, 3)
    return draw.case(draw.floats(draw.shape()), attributes=_scales(count, draw), outputs=count)


@recipe("DivGrad")
def draw_quotient(draw: Draw) -> Case:
    shape = draw.shape(empty=False)
    shapes = [shape, draw.broadcast(shape)]
    if draw.chance(30):
        # Both are repeated.
        shapes[0] = tuple(1 if draw.chance(30) else dim for dim in shape)
        shape = np.broadcast_shapes(*shapes)
    draw.choices.shuffle(shapes)
    # Sums of positive numbers: where they cancel, the order of the terms shows.
    dy, a, b = (draw.floats(sizes, positive=True) for sizes in (shape, *shapes))
    options = {"outputs": 2, "unnamed": draw.pick((), (), (0,)), "ranked": draw.opset < 13 or draw.chance(80)}
    return draw.case(dy, a, (b + np.float32(0.5)) * np.float32(draw.pick(-1, 1)), **options)


@recipe("FakeQuant", opsets=(11, 12, 13, 17, 18, 21))
def draw_rounding(draw: Draw) -> Case:
    scale = np.float32(draw.pick(0.25, 0.1, 1.5))
    x = draw.floats(draw.shape()) * 100
    if draw.chance(30):
        # Ties.
        x = (np.round(x) + np.float32(0.5)) * scale
    zero = np.float32(draw.pick(0, 3, -100, 128))
    shape = draw.pick((), (1,))
    attributes = draw.pick({}, {"quant_min": -128, "quant_max": 127}, {"quant_min": 0, "quant_max": 15})
    x = np.asarray(x, np.float32)
    return draw.case(x, np.full(shape, scale), np.full(shape, zero), attributes=attributes, outputs=2)


@recipe("FakeQuantGrad")
def draw_rounding_gradient(draw: Draw) -> Case:
    shape = draw.shape()
    return draw.case(draw.floats(shape), draw.booleans(shape))


@recipe("ZeroGradient")
def draw_zeros(draw: Draw) -> Case:
    return draw.case(_infinite(draw), draw.floats((1,)))


def _infinite(draw: Draw) -> np.ndarray:
    x = draw.floats(draw.shape())
    x[draw.booleans(x.shape)] = np.inf
    return x


REFERENCES[MICROSOFT, "ScaledSum"] = add_up
REFERENCES[MICROSOFT, "BatchScale"] = lambda case: [np.float32(s) * case.inputs[0] for s in case.attributes.values()]
