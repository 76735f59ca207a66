"""Operators that an attribute, or a type, keeps from being linear: their gradients are unscaled first."""

from __future__ import annotations

import pytest

from tests.build import assert_same_step, linear_step

_IMAGE = "image = Reshape(dw, nchw)"
_NCHW = "int64[4] nchw = {1, 1, 4, 3}"

# Each computes `out` from the gradient `dw` of shape [4, 3]: its nodes, the shape of `out`, constants, and the opset.
CASES = {
    "Clip below opset 11": ("out = Clip<min = -0.01, max = 0.02>(dw)", "float[4,3]", "", 10),
    "Clip by a maximum alone": ("out = Clip<max = 0.02>(dw)", "float[4,3]", "", 10),
    "Pad below opset 11": ("out = Pad<pads = [0, 0, 1, 0], value = 0.5>(dw)", "float[5,3]", "", 10),
    "ScatterND by a product": (
        'row = Gather(dw, first)\n out = ScatterND<reduction = "mul">(dw, place, row)',
        "float[4,3]",
        "int64[1] first = {0}, int64[1,1] place = {2}",
        20,
    ),
    "ScatterElements by a product": (
        'row = Gather(dw, first)\n out = ScatterElements<reduction = "mul">(dw, places, row)',
        "float[4,3]",
        "int64[1] first = {0}, int64[1,3] places = {2, 1, 2}",
        20,
    ),
    "Cast to an integer": ("whole = Cast<to = 6>(dw)\n out = Cast<to = 1>(whole)", "float[4,3]", "", 20),
    "Cast to a flag": ("some = Cast<to = 9>(dw)\n out = Cast<to = 1>(some)", "float[4,3]", "", 20),
    "Cast that saturates": ("small = Cast<to = 17>(dw)\n out = Cast<to = 1>(small)", "float[4,3]", "", 20),
    "CastLike an integer": (
        "whole = CastLike(dw, like)\n out = Cast<to = 1>(whole)",
        "float[4,3]",
        "int32[1] like = {1}",
        20,
    ),
    "Resize that fills": (
        'image = Reshape(dw, nchw)\n out = Resize<coordinate_transformation_mode = "tf_crop_and_resize", '
        'mode = "linear", extrapolation_value = 0.5>(image, roi, "", sizes)',
        "float[1,1,8,6]",
        f"{_NCHW}, float[8] roi = {{0, 0, -0.5, -0.5, 1, 1, 1.5, 1.5}}, int64[4] sizes = {{1, 1, 8, 6}}",
        20,
    ),
    "FusedGemm with an activation": (
        'out = com.microsoft.FusedGemm<activation = "Tanh", transA = 1>(dw, dw, none)',
        "float[3,3]",
        "float[3] none = {0, 0, 0}",
        20,
    ),
    "FusedConv with an activation": (
        f'{_IMAGE}\n out = com.microsoft.FusedConv<activation = "Tanh", kernel_shape = [1, 1]>(image, kernel)',
        "float[1,1,4,3]",
        f"{_NCHW}, float[1,1,1,1] kernel = {{1}}",
        20,
    ),
    "FusedConv with a second addend": (
        f"{_IMAGE}\n out = com.microsoft.FusedConv<kernel_shape = [1, 1]>(image, kernel, bias, more)",
        "float[1,1,4,3]",
        f"{_NCHW}, float[1,1,1,1] kernel = {{1}}, float[1] bias = {{0}}, "
        "float[1,1,4,3] more = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1}",
        20,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_gradient_is_unscaled_first(case: str) -> None:
    nodes, shape, constants, opset = CASES[case]
    domains = ["com.microsoft"] if "com.microsoft" in nodes else []
    assert_same_step(linear_step(nodes, outputs=f"{shape} out", constants=constants, opset=opset, domains=domains))


@pytest.mark.training
def test_scale_that_divides() -> None:
    nodes = "size = ReduceSum<keepdims = 0>(dw)\n out = com.microsoft.Scale<scale_down = 1>(x, size)"
    assert_same_step(linear_step(nodes, outputs="float[8,4] out", domains=["com.microsoft"]))
