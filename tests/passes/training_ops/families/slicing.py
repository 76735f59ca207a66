"""The recipe of the derivative of Slice."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from graphscale.operators import MICROSOFT
from tests.operators.values import Data
from tests.passes.training_ops.cases import REFERENCES, Case, run_kernel
from tests.passes.training_ops.drawing import Draw, recipe

_FAR = 2**31 - 1


def places_of(shape: Sequence[int], *slices: Iterable[int]) -> list[range]:
    """Return the places along each axis that a Slice takes, by ONNX's definition: starts, ends, axes, steps."""
    places = [range(size) for size in shape]
    for start, end, axis, step in zip(*slices, strict=True):
        size = int(shape[axis])
        low, high = (0, size) if step > 0 else (-1, size - 1)
        start, end = (int(bound + size if bound < 0 else bound) for bound in (start, end))
        places[axis] = range(min(max(start, 0), high), min(max(end, low), high), int(step))
    return places


def put_back(case: Case) -> list[Data]:
    """Give what the kernel gives; it fails where a step is negative."""
    dy, shape, starts, ends, axes, steps = (*case.inputs, None, None)[:6]
    if steps is None or min(steps) > 0:
        return run_kernel(case)
    result = np.zeros(tuple(shape), dy.dtype)
    result[np.ix_(*places_of(shape, starts, ends, range(len(starts)) if axes is None else axes, steps))] = dy
    return [result]


@recipe("SliceGrad")
def draw_slice_gradient(draw: Draw) -> Case:
    shape = draw.shape(1, empty=False)
    axes = draw.axes(len(shape))
    if draw.chance(20):
        draw.choices.shuffle(axes)
    steps = [draw.pick(1, 1, 2, -1, -2) if draw.chance(60) else 1 for _ in axes]
    starts, ends = ([draw.size(-shape[axis] - 1, shape[axis] + 1) for axis in axes] for _ in range(2))
    ends = [end if draw.chance() else _FAR if step > 0 else -_FAR for end, step in zip(ends, steps, strict=True)]
    kind = draw.pick(np.int64, np.int32)
    operands = [np.asarray(values, kind) for values in (starts, ends, axes, steps)]
    if set(steps) == {1} and draw.chance():
        operands.pop()
    if [axis % len(shape) for axis in axes] == list(range(len(axes))) and draw.chance():
        operands[2:] = [None, *operands[3:]] if len(operands) == 4 else []
    dy = draw.floats(map(len, places_of(shape, starts, ends, axes, steps)))
    inputs = [dy, np.asarray(shape, np.int64), *operands]
    constants = draw.pick((), range(2, 6), range(1, 6))
    return draw.case(*inputs, constants=tuple(i for i in constants if i < len(inputs) and inputs[i] is not None))


REFERENCES[MICROSOFT, "SliceGrad"] = put_back
