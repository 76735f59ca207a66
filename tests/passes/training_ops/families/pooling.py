"""Recipes of the derivatives of poolings."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.operators.values import Data
from tests.passes.training_ops.cases import REFERENCES, Case, run_kernel
from tests.passes.training_ops.drawing import Draw, recipe
from tests.passes.training_ops.families.convolutions import draw_window


@recipe("MaxPoolGrad", domain="")
def draw_max_pool_slope(draw: Draw) -> Case:
    attributes, x = _pool(draw, has_dilations=True)
    y, index = run_kernel(Case("MaxPool", (x,), attributes, 2, domain="", opset=draw.opset))
    dy = draw.floats(np.shape(y))
    # The form of opset 10 for overlapping windows needs to know the sizes.
    options = {"static": True} if draw.opset < 11 else {}
    return draw.case(dy, index, attributes=attributes, shapes=(x.shape,), **options)


@recipe("AveragePoolGrad", domain="")
def draw_average_pool_slope(draw: Draw) -> Case:
    attributes, x = _pool(draw, has_dilations=draw.opset >= 19)
    # Releases of ONNX Runtime differ on the two together.
    if "ceil_mode" not in attributes:
        attributes |= draw.options(count_include_pad=(0, 1))
    y = run_kernel(Case("AveragePool", (x,), attributes, domain="", opset=draw.opset))[0]
    return draw.case(draw.floats(np.shape(y)), attributes=attributes, shapes=(x.shape,))


def _pool(draw: Draw, *, has_dilations: bool) -> tuple[dict[str, Any], np.ndarray]:
    rank = draw.pick(1, 2, 2, 3)
    kernel, attributes = draw_window(draw, rank, ("NOTSET", "VALID", "SAME_UPPER", "SAME_LOWER"))
    attributes["kernel_shape"] = kernel
    if draw.chance(30):
        attributes = {"kernel_shape": kernel, "strides": kernel}
    if not has_dilations:
        attributes.pop("dilations", None)
    # Runtimes refuse a padding that is not less than the window.
    if "pads" in attributes:
        attributes["pads"] = [min(pad, k - 1) for pad, k in zip(attributes["pads"], kernel * 2, strict=True)]
    strides, ends = attributes.get("strides", [1] * rank), attributes.get("pads", [0] * 2 * rank)[rank:]
    reach = [(k - 1) * d + 1 for k, d in zip(kernel, attributes.get("dilations", [1] * rank), strict=True)]
    # The last window must not be outside the image.
    if all(stride + end <= size for stride, end, size in zip(strides, ends, reach, strict=True)) and draw.chance():
        attributes["ceil_mode"] = 1
    sizes = [k * draw.size(2, 3) if draw.chance() else draw.size(5, 8) for k in kernel]
    return attributes, draw.floats((draw.size(1, 2), draw.size(1, 3), *(max(size, 5) for size in sizes)))


def _average_pool_slopes(case: Case) -> list[Data]:
    """Run the kernel, or differentiate AveragePool where the kernel is wrong.

    It is for three spatial axes and overlapping windows, and ignores dilations and auto_pad.
    """
    dy, shape = np.asarray(case.inputs[0]), case.shapes[0]
    is_right = len(shape) < 5 and not {"dilations", "auto_pad"} & set(case.attributes)
    if is_right:
        return run_kernel(case)
    units = np.eye(int(np.prod(shape[2:])), dtype=np.float32).reshape(-1, 1, *shape[2:])
    slopes = np.asarray(run_kernel(Case("AveragePool", (units,), case.attributes, domain="", opset=case.opset))[0])
    columns = dy.reshape(shape[0] * shape[1], -1) @ slopes.reshape(len(units), -1).T
    return [columns.reshape(shape)]


REFERENCES["", "AveragePoolGrad"] = _average_pool_slopes
