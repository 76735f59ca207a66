"""Recipes of sums and tests over whole values."""

from __future__ import annotations

import numpy as np

from graphscale.operators import MICROSOFT
from tests.operators.values import Data
from tests.passes.training_ops.cases import REFERENCES, Case
from tests.passes.training_ops.drawing import Draw, recipe


@recipe("ReduceSumTraining")
def draw_reduce_sum(draw: Draw) -> Case:
    # The kernel keeps an empty axis empty, where it should give zeros. Positive numbers do not cancel.
    x = draw.floats(
        draw.shape(1, empty=False), positive=True, dtype=draw.pick(np.float32, np.float64, np.int32, np.int64)
    )
    axes = draw.axes(x.ndim, 0)
    attributes = draw.options(keepdims=(0, 1), noop_with_empty_axes=(0, 1))
    constants = (1,) if draw.chance() else ()
    if draw.opset < 13 and not constants:
        attributes = {"keepdims": 1, "noop_with_empty_axes": 1}
    return draw.case(x, np.asarray(axes, np.int64), attributes=attributes, constants=constants)


@recipe("ReduceAllL2")
def draw_norm(draw: Draw) -> Case:
    inputs = [draw.floats(draw.shape(empty=False)) for _ in range(draw.size(1, 4))]
    return draw.case(*inputs, shapes=((),))


def _with_a_few(draw: Draw, *numbers: float) -> np.ndarray:
    x = draw.floats(draw.shape())
    for number in numbers:
        x[draw.booleans(x.shape) & draw.booleans(x.shape)] = number
    return x


@recipe("IsFinite")
def draw_is_finite(draw: Draw) -> Case:
    return draw.case(_with_a_few(draw, np.nan, np.inf, -np.inf, 1e38))


@recipe("IsAllFinite")
def draw_is_all_finite(draw: Draw) -> Case:
    numbers = (1e38, draw.pick(np.nan, np.inf, -np.inf)) if draw.chance(50) else (1e38, -1e38)
    attributes = draw.pick({}, {"isinf_only": 1}, {"isnan_only": 1})
    return draw.case(*(_with_a_few(draw, *numbers) for _ in range(draw.size(1, 4))), attributes=attributes)


@recipe("All")
def draw_all(draw: Draw) -> Case:
    shape = draw.shape()
    return draw.case(draw.booleans(shape) if draw.chance() else np.ones(shape, np.bool_))


def are_all_finite(case: Case) -> list[Data]:
    failing = {(): lambda x: ~np.isfinite(x), ("isinf_only",): np.isinf, ("isnan_only",): np.isnan}[*case.attributes,]
    return [np.asarray(not any(failing(x).any() for x in case.inputs))]


REFERENCES[MICROSOFT, "IsFinite"] = lambda case: [np.asarray(np.isfinite(case.inputs[0]))]
REFERENCES[MICROSOFT, "IsAllFinite"] = are_all_finite
REFERENCES[MICROSOFT, "All"] = lambda case: [np.asarray(case.inputs[0].all())]
