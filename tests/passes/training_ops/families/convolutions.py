"""Recipes of the derivatives of convolutions."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from graphscale.operators import MICROSOFT
from tests.operators.values import Data
from tests.passes.training_ops.cases import REFERENCES, Case, run_kernel
from tests.passes.training_ops.drawing import Draw, recipe


@recipe("ConvGrad")
def draw_convolution_slope(draw: Draw) -> Case:
    rank, group = draw.pick(1, 2, 2, 3), draw.pick(1, 1, 2, 3)
    kernel, attributes = draw_window(draw, rank, ("NOTSET", "VALID", "SAME_UPPER", "SAME_LOWER"))
    image, rows = [draw.size(5, 6 if rank > 2 else 8) for _ in kernel], draw.pick(1, 2, 6)
    if rank < 3 and draw.chance(15):
        # Large windows at few places.
        kernel, image, rows, attributes = [5] * rank, [draw.size(5, 6) for _ in kernel], 12, {"strides": [2] * rank}
    x = draw.floats((draw.size(1, 2), draw.pick(1, 2) * group, *image))
    w = draw.floats((rows * group, x.shape[1] // group, *kernel))
    return _slope(draw, "Conv", x, w, {**attributes, "group": group})


@recipe("ConvTransposeGrad", opsets=(11, 13, 17, 21))
def draw_transposed_slope(draw: Draw) -> Case:
    rank, group = draw.pick(1, 2, 2), draw.pick(1, 1, 2)
    kernel, attributes = draw_window(draw, rank, ("NOTSET", "VALID"))
    if "strides" in attributes and draw.chance():
        attributes["output_padding"] = [draw.size(0, stride - 1) for stride in attributes["strides"]]
    x = draw.floats((draw.size(1, 3), draw.pick(1, 2) * group, *(draw.size(4, 6) for _ in kernel))) + np.float32(0.5)
    w = draw.floats((x.shape[1], draw.pick(1, 2, 3), *kernel))
    return _slope(draw, "ConvTranspose", x, w, {**attributes, "group": group})


def draw_window(draw: Draw, rank: int, words: tuple[str, ...]) -> tuple[list[int], dict[str, Any]]:
    """Draw the sizes of a window of at most 5 x 5 x 5, and its attributes."""
    kernel = [draw.size(1, 3) for _ in range(rank)]
    attributes: dict[str, Any] = {}
    if draw.chance(60):
        attributes["strides"] = [draw.size(1, 3) for _ in kernel]
    if draw.chance(40):
        attributes["auto_pad"] = draw.word(*words)
    # No runtime has dilations together with padding by itself.
    if draw.chance(40) and not attributes.get("auto_pad", "").startswith("SAME"):
        attributes["dilations"] = [draw.size(1, 2) for _ in kernel]
    if draw.chance(60) and attributes.get("auto_pad", "NOTSET") == "NOTSET":
        reach = [(k - 1) * d for k, d in zip(kernel, attributes.get("dilations", [1] * rank), strict=True)]
        attributes["pads"] = [draw.size(0, min(size, 2)) for size in reach * 2]
    if draw.chance():
        attributes["kernel_shape"] = kernel
    return kernel, attributes


def _slope(draw: Draw, forward: str, x: np.ndarray, w: np.ndarray, attributes: dict[str, Any]) -> Case:
    case = Case(forward, (x, w), attributes, domain="", opset=draw.opset)
    # The sum over a single channel must not cancel.
    dy = draw.floats(np.shape(run_kernel(case)[0])) + np.float32(0.5)
    outputs = draw.size(1, 3)
    unnamed = tuple(i for i in range(outputs - 1) if draw.chance(30))
    options: dict[str, Any] = {"attributes": attributes, "outputs": outputs, "unnamed": unnamed, "constants": (2,)}
    if attributes.get("auto_pad", "").startswith("SAME"):
        options["static"] = True
    return draw.case(dy, x, w, **options)


def _convolution_slopes(case: Case) -> list[Data]:
    """Run the kernel, with the padding that auto_pad means: it does as if there was none."""
    auto = case.attributes.get("auto_pad", "")
    if not auto.startswith("SAME"):
        return run_kernel(case)
    sizes, kernel = np.shape(case.inputs[1])[2:], np.shape(case.inputs[2])[2:]
    strides = case.attributes.get("strides", [1] * len(kernel))
    steps = zip(sizes, kernel, strides, strict=True)
    totals = np.asarray([max((-(-size // stride) - 1) * stride + k - size, 0) for size, k, stride in steps])
    halves = (totals // 2, totals - totals // 2)
    pads = np.concatenate(halves if auto == "SAME_UPPER" else halves[::-1])
    attributes = {name: value for name, value in case.attributes.items() if name != "auto_pad"}
    return run_kernel(dataclasses.replace(case, attributes={**attributes, "pads": pads.tolist()}))


def _transposed_slopes(case: Case) -> list[Data]:
    """Multiply the gradient with the results of ConvTranspose for each unit of X, and for each unit of W."""
    dy, x, w = (np.asarray(value) for value in case.inputs)

    def forward(x: np.ndarray, w: np.ndarray) -> np.ndarray:
        return np.asarray(run_kernel(Case("ConvTranspose", (x, w), case.attributes, domain="", opset=case.opset))[0])

    units = np.eye(x[0].size, dtype=np.float32).reshape(-1, *x.shape[1:])
    dx = np.tensordot(dy.reshape(len(x), -1), forward(units, w).reshape(len(units), -1), (1, 1)).reshape(x.shape)
    units = np.eye(w.size, dtype=np.float32).reshape(-1, *w.shape)
    dw = np.asarray([np.sum(dy * forward(x, unit)) for unit in units], np.float32).reshape(w.shape)
    results: list[Data] = [dx, dw, dy.sum((0, *range(2, dy.ndim)))]
    return [results[i] for i in range(case.outputs) if i not in case.unnamed]


REFERENCES[MICROSOFT, "ConvGrad"] = _convolution_slopes
REFERENCES[MICROSOFT, "ConvTransposeGrad"] = _transposed_slopes
