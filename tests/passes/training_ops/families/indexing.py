"""Recipes of the derivatives of gathering."""

from __future__ import annotations

import numpy as np

from graphscale.operators import MICROSOFT
from tests.operators.values import Data
from tests.passes.training_ops.cases import REFERENCES, Case
from tests.passes.training_ops.drawing import Draw, recipe

# All sums are of positive numbers: where they cancel, the order of the terms shows.


@recipe("GatherGrad")
def draw_gather_gradient(draw: Draw) -> Case:
    # The kernel divides by the size of what follows the axis.
    shape = draw.shape(1, 3, empty=False)
    axis = draw.axis(len(shape))
    many = draw.shape(0, 2)
    if draw.chance(20):
        # More rows than a matrix of zeros and ones is used for, in dX or in dY, or in both.
        shape, axis = draw.pick(((270,), 0), ((2, 270), 1), ((3,), 0))
        many = (draw.pick(3, 280),)
    indices = draw.integers(-shape[axis] if draw.chance() else 0, shape[axis], many, draw.pick(np.int64, np.int32))
    place = axis % len(shape)
    sizes = (*shape[:place], *many, *shape[place + 1 :])
    dy = draw.floats(sizes, positive=True, dtype=draw.pick(np.float32, np.float64))
    attributes = {"axis": axis} if axis or draw.chance() else {}
    constants = (0,) if draw.chance() else ()
    return draw.case(np.asarray(shape, np.int64), indices, dy, attributes=attributes, constants=constants)


@recipe("GatherElementsGrad")
def draw_gather_elements_gradient(draw: Draw) -> Case:
    shape = draw.shape(1, empty=False)
    axis = draw.axis(len(shape))
    places = [draw.size(0 if draw.chance(10) else 1, dim) for dim in shape]
    places[axis] = draw.size(1, 6)
    # Before opset 11 indices count from the front alone.
    low = -shape[axis] if draw.opset >= 11 and draw.chance() else 0
    indices = draw.integers(low, shape[axis], places, draw.pick(np.int64, np.int32))
    attributes = {"axis": axis} if axis or draw.chance() else {}
    inputs = [draw.floats(places, positive=True), np.asarray(shape, np.int64), indices]
    return draw.case(*inputs, attributes=attributes, constants=(1,) if draw.chance() else ())


@recipe("GatherNDGrad")
def draw_gather_nd_gradient(draw: Draw) -> Case:
    shape = draw.shape(1, empty=False)
    if draw.chance(15):
        shape = (draw.pick(100, 280), *shape[1:2])
    batches = draw.size(0, min(2, len(shape) - 1))
    depth = draw.size(1, len(shape) - batches)
    lead = (*shape[:batches], *draw.shape(0, 2, empty=False))
    picked = shape[batches : batches + depth]
    places = [draw.integers(-size if draw.chance() else 0, size, lead) for size in picked]
    inputs = [
        np.asarray(shape, np.int64),
        np.stack(places, -1),
        draw.floats((*lead, *shape[batches + depth :]), positive=True),
    ]
    attributes = {"batch_dims": batches} if batches or draw.chance() else {}
    # The model says the size of the last axis of the indices.
    return draw.case(*inputs, attributes=attributes, constants=(0,) if draw.chance() else (), static=True)


@recipe("ShrunkenGather")
def draw_shrunken_gather(draw: Draw) -> Case:
    shape = draw.shape(1, empty=False)
    axis = draw.axis(len(shape))
    # The kernel takes a vector of at most as many indices as there are rows.
    indices = draw.integers(-shape[axis], shape[axis], (draw.size(1, shape[axis]),), draw.pick(np.int64, np.int32))
    return draw.case(draw.floats(shape), indices, attributes={"axis": axis})


def pad(case: Case) -> list[Data]:
    x, places, sizes = case.inputs
    rows = np.zeros((int(np.prod(sizes)), *x.shape[1:]), x.dtype)
    rows[places] = x
    return [rows.reshape((*sizes, *x.shape[1:]))]


@recipe("PadAndUnflatten", opsets=(11, 12, 13, 17, 18, 21))
def draw_padding(draw: Draw) -> Case:
    sizes, row = (draw.size(), draw.size()), draw.shape(0, 2, empty=draw.opset >= 14)
    places = draw.choices.sample(range(sizes[0] * sizes[1]), draw.size(1, sizes[0] * sizes[1]))
    operands = (draw.floats((len(places), *row)), np.asarray(places, np.int64), np.asarray(sizes, np.int64))
    return draw.case(*operands, ranked=draw.chance(80))


def unpad(case: Case) -> list[Data]:
    x, places = case.inputs
    return [x.reshape((-1, *x.shape[2:]))[places], np.asarray(x.shape[:2], np.int64)]


@recipe("FlattenAndUnpad")
def draw_unpadding(draw: Draw) -> Case:
    shape = draw.shape(2, empty=False)
    places = draw.choices.sample(range(shape[0] * shape[1]), draw.size(1, shape[0] * shape[1]))
    return draw.case(draw.floats(shape), np.asarray(places, np.int64), outputs=2, ranked=draw.chance(80))


REFERENCES[MICROSOFT, "PadAndUnflatten"] = pad
REFERENCES[MICROSOFT, "FlattenAndUnpad"] = unpad
