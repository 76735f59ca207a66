"""Heads with their own outputs, outside the loss: no part of the backward pass."""

from __future__ import annotations

import pytest

import graphscale as gs
from tests.analysis.roles.steps import roles_of
from tests.build import assert_same_step, linear_step, numbers, ramp, step
from tests.expressions import nodes

pytestmark = pytest.mark.static

HEADS = {
    "a product with an activation": "p = y @ back",
    "a function of one": "p = Tanh(y @ back)",
    "a product with a function of one": "p = Tanh(y) @ back",
    "two products": "p = Tanh(y @ back) @ deeper",
    "a product with a residual": "p = d @ back",
}


@pytest.mark.parametrize("name", HEADS)
def test_a_head_gets_no_scale(name: str) -> None:
    """The result has the shape of the batch, which is no proof that it is a gradient of it."""
    model = linear_step(
        nodes(HEADS[name]),
        outputs="float[4,3] dw, float[8,4] p",
        constants=f"float[3,4] back = {ramp(12)}, float[4,4] deeper = {ramp(16)}",
    )
    report = gs.inspect(model)
    assert [place.value for place in report.places] == ["two_over_n"]
    assert [gradient.value for gradient in report.gradients] == ["dw"]
    assert roles_of(model)["p"] != "gradient"


def test_a_mean_over_a_head_is_no_loss() -> None:
    model = linear_step(
        nodes("mean = ReduceMean(Tanh(y @ back), keepdims=0)"),
        outputs="float[4,3] dw, float mean",
        constants=f"float[3,4] back = {ramp(12)}",
    )
    report = gs.inspect(model)
    assert (report.loss, [place.value for place in report.places]) == ("loss", ["two_over_n"])


@pytest.mark.parametrize(
    ("backward", "places"),
    [
        pytest.param("dy = d * two_over_n; dw = x.T @ dy; db = ones @ dy", ["two_over_n"], id="a sum as a product"),
        pytest.param("dw = x.T @ d; db = ones @ d", ["d", "ones"], id="a sum of residuals as a product"),
    ],
)
def test_a_product_with_ones_is_backward(backward: str, places: list[str]) -> None:
    model = linear_step(
        inputs="float[4,3] w, float[1,3] b",
        forward=nodes("y = x @ w + b; d = y - t; square = d * d; loss = ReduceMean(square, keepdims=0)"),
        backward=nodes(backward),
        outputs="float[4,3] dw, float[1,3] db",
        constants="float[1,8] ones = {1, 1, 1, 1, 1, 1, 1, 1}",
    )
    report = assert_same_step(model)
    assert {gradient.value for gradient in report.gradients} == {"dw", "db"}
    assert sorted({place.value for place in report.places}) == places


def test_the_constant_cotangent_of_a_linear_loss() -> None:
    """The mean of predictions, beside a head: no cotangent depends on a prediction."""
    model = linear_step(
        forward=nodes("y = x @ w; loss = ReduceMean(y, keepdims=0)"),
        backward=nodes("dw = x.T @ seed; p = y @ back"),
        outputs="float[4,3] dw, float[8,4] p",
        constants=f"float[8,3] seed = {numbers(24, '0.041666668')}, float[3,4] back = {ramp(12)}",
    )
    assert [place.value for place in gs.inspect(model).places] == ["seed"]


def test_a_head_that_reads_a_layer() -> None:
    """The activation is an operand of the forward pass, but the weights of the head depend on no result of it."""
    model = step(
        nodes("p = a @ head"), outputs="float[4,5] dw1, float[5,3] dw2, float[8,5] p",
        inputs="float[5,5] head, float[8,5] alike",
    )  # fmt: skip
    report = gs.inspect(model)
    assert {gradient.value for gradient in report.gradients} == {"dw1", "dw2"}


def test_a_head_beside_a_layer_that_reads_a_view_of_the_batch() -> None:
    model = linear_step(
        forward=nodes("v = Reshape(x, same); y = v @ w; d = y - t; loss = ReduceMean(d * d, keepdims=0)"),
        backward=nodes("dy = d * two_over_n; dw = v.T @ dy; p = y @ back"),
        outputs="float[4,3] dw, float[8,4] p",
        constants=f"float[3,4] back = {ramp(12)}, int64[2] same = {{8, 4}}",
    )
    report = gs.inspect(model)
    assert [place.value for place in report.places] == ["two_over_n"]
    assert [gradient.value for gradient in report.gradients] == ["dw"]


def test_the_forward_pass_of_a_validation_loss() -> None:
    """Its second product reads a weight of the first pass, and its result has the shape of a batch."""
    model = step(
        nodes("e = (Tanh(other @ w1) @ w2) - target; shown = e * e; validation = ReduceMean(shown, keepdims=0)"),
        inputs="float[6,4] other, float[6,3] target",
        outputs="float[4,5] dw1, float[5,3] dw2, float[6,3] shown, float validation",
    )
    report = gs.inspect(model)
    assert (report.loss, [place.value for place in report.places]) == ("loss", ["two_over_n"])
    assert {entry.name for entry in report.roles if not entry.certain and entry.kind == "output"} == {"shown"}


def test_the_gradient_of_a_lookup_as_a_product() -> None:
    """No forward product reads the hot rows; the product behind theirs differentiates one."""
    model = linear_step(
        inputs="float[4,3] w, int64[4] rows",
        forward=nodes("y = Gather(x @ w, rows, axis=0); d = y - near; loss = ReduceMean(d * d, keepdims=0)"),
        backward=nodes("dw = x.T @ (OneHot(rows, eight, off_on, axis=0) @ (d * two_over_n))"),
        constants=f"int64[1] eight = {{8}}, float[2] off_on = {{0, 1}}, float[4,3] near = {numbers(12)}",
    )
    report = gs.inspect(model)
    assert (report.contractions, report.missed, [each.value for each in report.gradients]) == (2, (), ["dw"])
