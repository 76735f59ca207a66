"""Recipes of operators that move data, or compute with shapes."""

from __future__ import annotations

import numpy as np

from graphscale.operators import MICROSOFT
from tests.operators.values import Data
from tests.passes.training_ops.cases import REFERENCES, Case
from tests.passes.training_ops.drawing import Draw, recipe


@recipe("ConcatTraining")
def draw_concat(draw: Draw) -> Case:
    shape = list(draw.shape(1, empty=False))
    axis, parts = draw.axis(len(shape)), []
    for part in range(draw.size(1, 4)):
        # The kernel gives no second result where the first one is empty.
        shape[axis] = draw.size(0 if part else 1, 3)
        parts.append(draw.floats(shape))
    return draw.case(*parts, attributes={"axis": axis}, outputs=draw.size(1, 2))


@recipe("SplitTraining")
def draw_split(draw: Draw) -> Case:
    shape, sizes = list(draw.shape(1)), [draw.size(0, 3) for _ in range(draw.size(1, 4))]
    axis = draw.axis(len(shape))
    shape[axis] = sum(sizes)
    attributes = {"axis": axis} if axis or draw.chance() else {}
    constants = (1,) if draw.chance() else ()
    x = draw.floats(shape)
    return draw.case(x, np.asarray(sizes, np.int64), attributes=attributes, outputs=len(sizes), constants=constants)


def view(case: Case) -> list[Data]:
    x, *shapes = case.inputs
    ends = np.cumsum([int(np.prod(shape)) for shape in shapes])
    return [part.reshape(shape) for part, shape in zip(np.split(x.ravel(), ends[:-1]), shapes, strict=True)]


@recipe("View")
def draw_view(draw: Draw) -> Case:
    shapes = [draw.shape(1, 3, empty=draw.opset >= 14) for _ in range(draw.size(1, 3))]
    x = draw.floats((sum(int(np.prod(shape)) for shape in shapes),))
    constants = tuple(range(1, len(shapes) + 1)) if draw.chance() else ()
    shapes = [np.asarray(shape, np.int64) for shape in shapes]
    return draw.case(x, *shapes, outputs=len(shapes), constants=constants, static=True)


@recipe("BroadcastGradientArgs")
def draw_broadcast(draw: Draw) -> Case:
    shape = draw.shape()
    shapes = [np.asarray(sizes, np.int64) for sizes in (draw.broadcast(shape), shape)]
    draw.choices.shuffle(shapes)
    unnamed = draw.pick((), (), (0,), (1,))
    constants = draw.pick((), (0,), (0, 1))
    # Before opset 11 the number of axes must be known: as the size of a vector.
    options = {"static": draw.opset < 11 or draw.chance()}
    return draw.case(*shapes, outputs=2, unnamed=unnamed, constants=constants, **options)


@recipe("Group")
def draw_group(draw: Draw) -> Case:
    return draw.case(*(draw.floats(draw.shape()) for _ in range(draw.size(1, 3))), static=True)


@recipe("PassThrough")
def draw_pass_through(draw: Draw) -> Case:
    # The kernel wants its results to be its operands' memory, and no model of one node has that.
    inputs = [draw.floats(draw.shape()) for _ in range(draw.size(1, 3))]
    return draw.case(*inputs, outputs=len(inputs))


REFERENCES[MICROSOFT, "View"] = view
REFERENCES[MICROSOFT, "PassThrough"] = lambda case: list(case.inputs)
