"""Outputs that are constants, and may be the next values of inputs, flags or stored tensors."""

from __future__ import annotations

import pytest

from tests.analysis.roles.steps import WEIGHT_DECAY, roles_of, states, update_step
from tests.build import linear_step, numbers, ramp
from tests.expressions import nodes

pytestmark = pytest.mark.static

FIRST = "u = dw * rate; w_next = Where(first, w - u - u, w - u)\n"
STEPS = {
    "a stored flag of the first step": (
        update_step("first_next = Identity(no)", constants="bool first = {1}, bool no = {0}", update=FIRST),
        states("w", "first?"),
    ),
    "a number beside a stored flag": (
        update_step("version = Identity(beta)", "", "float version", "bool first = {1}", update=FIRST),
        {**states("w"), "version": "constant"},
    ),
    "a stored flag that nothing reads": (
        update_step("k_next = Identity(no)", constants="bool k = {1}, bool no = {0}"),
        states("w", "k?"),
    ),
    "a product of stored numbers": (
        update_step("k_next = k * nought", constants="float[1] k = {2}, float[1] nought = {0}"),
        {**states("w"), "k_next": "constant"},
    ),
    "a stored value itself": (
        update_step(outputs="float[2] k", constants="float[2] k = {1, 2}"),
        {**states("w"), "k": "constant"},
    ),
    "a stored value itself, which the step reads": (
        update_step("s = Tanh(dy @ w.T) * k", outputs="float[8,4] s, float[1] k", constants="float[1] k = {2}"),
        {**states("w"), "s": "metric?", "k": "constant"},
    ),
    "an input itself, beside a map of its gradient": (
        update_step("s = Tanh(dy @ w.T)", outputs="float[8,4] s, float[8,4] x"),
        {**states("w"), "s": "metric?", "x": "constant"},
    ),
    "zeros that the update reads": (
        update_step(
            update="w_next = w - (dw + m) * rate; m_next = Identity(m)", constants=f"float[4,3] m = {numbers(12)}"
        ),
        {**states("w"), "m_next": "constant"},
    ),
    # --- gradients
    "zeros that a gradient is added to": (
        linear_step(
            nodes("g = dw + zeros; c = Identity(zeros)"),
            outputs="float[4,3] g, float[4,3] c",
            constants=f"float[4,3] zeros = {numbers(12)}",
        ),
        {"g": "gradient", "c": "constant"},
    ),
    "the mask of a gradient": (
        linear_step(
            nodes("g = dw * mask; c = Identity(mask)"),
            outputs="float[4,3] g, float[4,3] c",
            constants=f"float[4,3] mask = {ramp(12)}",
        ),
        {"g": "gradient", "c": "constant"},
    ),
    "a share of a weight in another type": (
        linear_step(
            nodes("shown = Cast(b * twice, to=10)"),
            inputs="float[4,3] w, float[5] b",
            outputs="float[4,3] dw, float16[5] shown",
            constants="float share = {0.01}, float twice = {0.02}",
            forward=WEIGHT_DECAY,
        ),
        {"dw": "gradient", "shown": "metric"},
    ),
}


@pytest.mark.parametrize("name", STEPS)
def test_roles(name: str) -> None:
    model, expected = STEPS[name]
    assert roles_of(model) == expected
