"""Convolutions and poolings: sizes that only the runtime knows, and forms that are refused."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from graphscale.errors import UnsupportedModelError
from graphscale.passes import LowerTrainingOps
from tests.build import parse
from tests.conftest import run_once

POOLED = """<ir_version: 8, opset_import: ["" : OPSET]>
pooled (float[n,c,h,w] x, float[n,c,p,q] dy) => (float[n,c,h,w] dx) {
    y, index = MaxPool<kernel_shape = [2, 2], strides = [1, 1]>(x)
    dx = MaxPoolGrad<kernel_shape = [2, 2], strides = [1, 1]>(dy, index)
}"""
X = np.float32([[[[1, 2, 0], [0, 3, 0], [0, 0, 0]], [[9, 0, 0], [0, 0, 0], [0, 0, 9]]]])
DY = np.float32([[[[1, 2], [3, 4]], [[5, 6], [7, 8]]]])
# All windows of the first channel have the 3; those of the second the first 9, twice the first zero, the last 9.
DX = np.float32([[[[0, 0, 0], [0, 10, 0], [0, 0, 0]], [[5, 6, 0], [7, 0, 0], [0, 0, 8]]]])


@pytest.mark.parametrize("opset", [11, 15, 16, 21])
def test_sizes_of_the_input_of_max_pool(opset: int) -> None:
    model = ir.from_proto(parse(POOLED.replace("OPSET", str(opset))))
    LowerTrainingOps()(model)
    lowered = ir.to_proto(model)
    onnx.checker.check_model(lowered, full_check=True)
    outputs, _ = run_once(lowered, {"x": X, "dy": DY})
    np.testing.assert_array_equal(outputs["dx"], DX)


IMAGES = "float[n,2,h,w] dy, float[n,2,h,w] x"
CONVOLVED = f"({IMAGES}, float[2,2,3,3] k) => (float[n,2,h,w] dx) {{ dx = com.microsoft."
REFUSED = {
    "overlapping windows of unknown sizes at opset 10": (
        10,
        "(float[n,c,p,q] dy, int64[n,c,p,q] i) => (float[n,c,9,9] dx) {"
        " dx = MaxPoolGrad<kernel_shape = [2, 2], strides = [1, 1]>(dy, i) }",
        "opset 10",
    ),
    "storage_order": (
        17,
        "(float[1,1,2] dy, int64[1,1,2] i) => (float[1,1,4] dx) {"
        " dx = MaxPoolGrad<kernel_shape = [2], strides = [2], storage_order = 1>(dy, i) }",
        "storage_order",
    ),
    "an average over an image of unknown sizes": (
        17,
        "(float[1,1,p] dy) => (float[1,1,h] dx) { dx = AveragePoolGrad<kernel_shape = [2]>(dy) }",
        "sizes of 'dx'",
    ),
    "an average over windows that reach behind the padding": (
        17,
        "(float[1,1,3] dy) => (float[1,1,6] dx) {"
        " dx = AveragePoolGrad<kernel_shape = [3], strides = [2], ceil_mode = 1, count_include_pad = 1>(dy) }",
        "count_include_pad",
    ),
    "a weight of unknown shape": (
        17,
        f"({IMAGES}, float[2,2,p,q] k) => (float[n,2,h,w] dx) {{ dx = com.microsoft.ConvGrad(dy, x, k) }}",
        "the weight 'k'",
    ),
    "padding by unknown sizes": (
        17,
        CONVOLVED + 'ConvGrad<auto_pad = "SAME_UPPER", strides = [2, 2]>(dy, x, k) }',
        "auto_pad",
    ),
    "padding of a transposed convolution": (
        17,
        CONVOLVED + 'ConvTransposeGrad<auto_pad = "SAME_UPPER">(dy, x, k) }',
        "auto_pad and output_shape",
    ),
    "output_padding": (17, CONVOLVED + "ConvTransposeGrad<output_padding = [1, 1]>(dy, x, k) }", "output_padding"),
}


@pytest.mark.static
@pytest.mark.parametrize("case", REFUSED)
def test_refusals(case: str) -> None:
    opset, text, words = REFUSED[case]
    header = f'<ir_version: 8, opset_import: ["" : {opset}, "com.microsoft" : 1]> refused '
    model = ir.from_proto(parse(header + text))
    with pytest.raises(UnsupportedModelError, match=f"^[^\n]+has no standard form: [^\n]*{words}[^\n]*$"):
        LowerTrainingOps()(model)
