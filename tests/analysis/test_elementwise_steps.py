"""Steps with numbers as weights, and a backward pass without contractions and gradient operators."""

from __future__ import annotations

import onnx
import pytest

import graphscale as gs
from tests.build import assert_same_step, listed, parse
from tests.expressions import nodes

pytestmark = pytest.mark.static

SGD = "w_next = w - dw * rate"
AVERAGE = "m_next = m * beta + dw * rate"
# The states beside the weight, and the update.
UPDATES = {
    "sgd": ("", SGD),
    "momentum": ("m", f"{AVERAGE}; w_next = w - m_next * rate"),
    "nesterov": ("m", f"{AVERAGE}; w_next = w - (m_next * beta + dw) * rate"),
    "a carried rate": ("r", "w_next = w - dw * r; r_next = r * beta"),
    "a product of rates": ("r", "w_next = w - dw * r * (rate * one); r_next = r * beta"),
    "a carried divisor": ("r", "w_next = w - dw / r; r_next = r + one"),
    "a carried rate of an average": ("m r", f"{AVERAGE}; w_next = w - m_next * r; r_next = r * beta"),
    "the square first": ("v", "v_next = v * beta + Pow(dw, two) * rate; w_next = w - dw * rate / Sqrt(v_next)"),
    "a first power": ("m", "m_next = m * beta + Pow(dw, one) * rate; w_next = w - m_next * rate"),
    "a sign": ("m", f"u = Sign(m * beta + dw); {AVERAGE}; w_next = w - u * rate"),
    "a share of the weight": ("", "w_next = (w - w * rate * rate) - dw * rate"),
    "slow weights": ("s", f"{SGD}; s_next = s + (w_next - s) * rate"),
}


def number_step(states: str, update: str, stored: bool = False) -> onnx.ModelProto:
    """A line through the origin; its slope `w` and further states are inputs, or stored numbers."""
    names = ["w", *states.split()]
    inputs = () if stored else [f"float {name}" for name in names]
    values = [f"{name} = {{0.5}}" for name in names] if stored else []
    constants = ["share = {0.25}", "rate = {0.1}", "beta = {0.9}", "one = {1}", "two = {2}", *values]
    forward = "d = x * w - t; loss = ReduceMean(d * d, keepdims=0)"
    backward = "c = d * share; dw = ReduceSum(c * x, keepdims=0)"
    text = nodes(f"{forward}; {backward}; {update}")
    outputs = listed("float loss", *(f"float {name}_next" for name in names))
    model = parse(f"""
        <ir_version: 10, opset_import: ["" : 20]>
        line ({listed("float[8] x, float[8] t", *inputs)}) => ({outputs})
        <{listed(*(f"float {constant}" for constant in constants))}>
        {{ {text} }}
    """)
    return onnx.shape_inference.infer_shapes(model)  # as exporters write them


@pytest.mark.parametrize(("states", "update"), UPDATES.values(), ids=UPDATES.keys())
def test_the_scale_enters_at_the_seed_and_comes_out_at_the_gradient(states: str, update: str) -> None:
    report = assert_same_step(number_step(states, update))
    assert [place.value for place in report.places] == ["share"]
    assert [gradient.value for gradient in report.gradients] == ["dw"]
    found = {state.input: state.output for state in report.state}
    assert {name: f"{name}_next" for name in ("w", *states.split())}.items() <= found.items()


def test_stored_numbers_are_weights_and_moments() -> None:
    report = gs.inspect(number_step(*UPDATES["momentum"], stored=True))
    assert [place.value for place in report.places] == ["share"]
    assert [gradient.value for gradient in report.gradients] == ["dw"]
    assert all(
        str(entry).startswith(f"next value of {name}") for entry, name in zip(report.roles[-2:], "wm", strict=True)
    )


def test_a_gradient_that_is_a_constant() -> None:
    assert gs.inspect(number_step("", "w_next = w - one * rate")).places
