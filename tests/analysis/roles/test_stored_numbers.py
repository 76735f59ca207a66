"""Outputs that may be the next values of stored numbers: counts, scales, rates, filled sums, NaN."""

from __future__ import annotations

import pytest

from tests.analysis.roles.steps import roles_of, states, update_step
from tests.build import numbers, ramp

pytestmark = pytest.mark.static

GROWN = "ok = Less(ReduceL2(dw, keepdims=0), high); k_next = Where(ok, Where(often, k * two, k), k * half)"
SCALES = "float k = {8}, float high = {100}, float half = {0.5}, bool often = {1}, float two = {2}"
COUNTED = "n_next = n + unit; late = Greater(n_next, period)"
RATES = "float k = {0.5}, float low = {0.1}"
PERIOD = "int64 n = {12}, int64 period = {20}"
FILLED = f"float[4,3] v = {numbers(12, '0.1')}"
ADAGRAD = "v_next = v + dw * dw; w_next = w - dw / Sqrt(v_next) * rate"
AVERAGE = "n_next = n + unit; m = Cast(n_next, to=1); part = Min(most, (one + m) / (ten + m)); e_next = "
AVERAGED = f"{AVERAGE}e * part + w_next * (one - part)"
AVERAGES = f"float[4,3] e = {ramp(12)}, int64 n = {{4}}, float most = {{0.99}}, float ten = {{10}}, float part"
NOTHING = "float[4] none = {nan, nan, nan, nan}"

STEPS = {
    # --- counts
    "a count that goes on": (
        update_step("n_next = n + unit", constants="int64 n = {12}", stored=True),
        states("w", "n?"),
    ),
    "a count that goes on, of ones": (
        update_step("n_next = n + other", constants="int64 n = {1}, int64 other = {1}", stored=True),
        states("w", "n?"),
    ),
    "a count that goes on beside a fed weight": (
        update_step("n_next = n + unit", constants="int64 n = {12}"),
        states("w", "n?"),
    ),
    "a count that begins anew": (
        update_step(
            "ok = Less(ReduceL2(dw, keepdims=0), one); n_next = Where(ok, n + unit, none)",
            constants="int64 n = {12}, int64 none = {0}",
            stored=True,
        ),
        states("w", "n?"),
    ),
    # --- numbers that are chosen
    "a scale that grows and shrinks": (update_step(GROWN, constants=SCALES, stored=True), states("w", "k?")),
    "a scale that is read": (
        update_step(f"{GROWN}; size = k_next * loss", "", "float size", SCALES, stored=True),
        {**states("w", "k?"), "size": "metric"},
    ),
    "a rate that a count chooses": (
        update_step(f"{COUNTED}; now = Where(late, k * low, k)", "", "float now", f"{PERIOD}, {RATES}", stored=True),
        {**states("w", "n?"), "now": "metric?"},
    ),
    # --- sums and averages beside stored weights
    "a filled sum of squares": (update_step(constants=FILLED, update=ADAGRAD, stored=True), states("w", "v")),
    "a filled sum of squares beside a fed weight": (update_step(constants=FILLED, update=ADAGRAD), states("w", "v")),
    "an average with a scheduled share": (
        update_step(AVERAGED, constants=AVERAGES, stored=True),
        states("w", "e", "n"),
    ),
    "an average with a scheduled share beside a fed weight": (
        update_step(AVERAGED, constants=AVERAGES), states("w", "e?", "n?"),
    ),
    "the share of an average": (
        update_step(AVERAGED, "", "float part", AVERAGES.removesuffix(", float part"), stored=True),
        {**states("w", "e", "n"), "part": "metric"},
    ),
    # --- NaN
    "a value for nothing": (
        update_step(
            "now = ReduceMean(x, axes, keepdims=0); chosen = Where(flag, now, none); size = chosen * chosen",
            "bool flag", "float[4] size", NOTHING, stored=True,
        ),
        {**states("w"), "size": "metric?"},
    ),
    "values so far": (
        update_step(
            "now = ReduceMean(x, axes, keepdims=0); none_next = Where(flag, now, none)", "bool[4] flag", "", NOTHING,
            stored=True,
        ),
        states("w", "none"),
    ),
    "values so far, in another form": (
        update_step(
            "now = ReduceMean(x, axes, keepdims=0); none_next = Squeeze(Where(flag, now, Unsqueeze(none, axes)), axes)",
            "bool[1,4] flag", "", NOTHING, stored=True,
        ),
        states("w", "none"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", STEPS)
def test_roles(name: str) -> None:
    model, expected = STEPS[name]
    assert roles_of(model) == expected
