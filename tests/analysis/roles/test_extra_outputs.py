"""Outputs with inner values of a step, which may look like next values, and lead to questions."""

from __future__ import annotations

import pytest

from tests.analysis.roles.steps import MOMENTUM, SGD, roles_of, states, update_step
from tests.build import linear_step, numbers, ramp
from tests.expressions import nodes

pytestmark = pytest.mark.static

SHOWN = "float[4,3] shown"
RAMP = f"float[4,3] table = {ramp(12)}"
FTRL = "z_next = z + dw - w * sigma; n_next = n + dw * dw; w_next = z_next / Sqrt(n_next)\n"
SHRUNK = "raw = w - dw * rate; w_next = raw * Max(one - rate / Sqrt(ReduceSum(raw * raw, axes)), nought)\n"
STEPS = {
    "a moment times a constant": (
        update_step("shown = m_next * table", "float[4,3] m", SHOWN, RAMP, update=MOMENTUM),
        {**states("w", "m"), "shown": "metric"},
    ),
    "the weight ahead of its projection": (
        update_step("shown = Identity(raw)", "", SHOWN, "float nought = {0}", update=SHRUNK),
        {**states("w?"), "shown": "metric?"},
    ),
    "a projected weight": (update_step(constants="float nought = {0}", update=SHRUNK), states("w")),
    "a part of a sum": (
        update_step("shown = z + dw", "float[4,3] z, float[4,3] n, float sigma", SHOWN, update=FTRL),
        {**states("w?", "z?", "n"), "shown": "metric?"},
    ),
    "the sum by itself": (
        update_step("", "float[4,3] z, float[4,3] n, float sigma", update=FTRL),
        states("w", "z", "n"),
    ),
    "the next weight under a mask": (
        update_step("shown = w_next * mask", "float[4,3] mask", SHOWN),
        {**states("w"), "shown": "metric?"},
    ),
    "a gradient less the one before": (
        update_step("shown = dw + dw - before", "float[4,3] before", f"float[4,3] dw, {SHOWN}"),
        {**states("w"), "dw": "gradient", "shown": "metric?"},
    ),
    "an error on other data": (
        update_step("shown = target - (other @ w)", "float[5,4] other, float[5,3] target", "float[5,3] shown"),
        {**states("w"), "shown": "metric?"},
    ),
    "the weight and the one before": (
        update_step("v_next = v * beta + dw * dw; shown = w_next + w_next * rate", "float[4,3] v", SHOWN),
        {**states("w?", "v"), "shown": "metric?"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", STEPS)
def test_roles(name: str) -> None:
    model, expected = STEPS[name]
    assert roles_of(model) == expected


@pytest.mark.parametrize(
    ("loss", "role"),
    [
        pytest.param("loss = ReduceMean(masked, keepdims=0)", "metric", id="its mean"),
        pytest.param("loss = ReduceMean(masked * nought_too, keepdims=0)", "metric?", id="the mean of a product"),
        pytest.param("e = masked * masked; loss = ReduceMean(e, keepdims=0)", "metric?", id="of its square"),
    ],
)
def test_a_masked_error(loss: str, role: str) -> None:
    model = linear_step(
        nodes("w_next = w - dw * rate"),
        outputs="float[4,3] w_next, float[8,3] masked",
        constants=f"float[8,3] nought = {numbers(24)}, bool[8,1] mask = {numbers(8, '1')}, float rate = {{0.1}}, "
        f"float[3] nought_too = {numbers(3, '2')}",
        forward=nodes(f"y = x @ w; kept = Max(y, nought); d = kept - t; masked = Where(mask, d * d, nought); {loss}"),
        backward=nodes("dy = Where(mask, d * two_over_n, nought); dw = x.T @ Where(Greater(y, nought), dy, nought)"),
    )
    assert roles_of(model) == {**states("w"), "masked": role}


@pytest.mark.parametrize(
    ("text", "role"),
    [("shown = x + y @ back", "metric?"), ("shown = Tanh(x)", "metric?"), ("shown = y @ back", "metric?")],
)
def test_a_prediction_of_the_shape_of_the_batch(text: str, role: str) -> None:
    model = update_step(text, outputs="float[8,4] shown", constants=f"float[3,4] back = {ramp(12)}", update=SGD)
    assert roles_of(model) == {**states("w"), "shown": role}
