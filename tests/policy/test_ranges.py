"""The range of each field of a dynamic scale's state."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from graphscale.policy.dynamic_rule import DynamicRule
from graphscale.policy.eager import next_state

pytestmark = pytest.mark.static

RULE = DynamicRule(min_loss_scale=0.5, max_loss_scale=2.0**20, hysteresis=3, increment_period=10)


@pytest.mark.parametrize(
    ("field", "inside", "outside"),
    [
        ("loss_scale", [0.5, 2.0**20], [0.25, 2.0**21, np.nan, np.inf, -1.0, 0.0]),
        ("good_steps", [0, 9], [-1, 10, -100_000]),
        ("hysteresis_left", [1, 3], [0, 4, -5]),
        ("bad_steps", [0, 10_000], [-1]),
    ],
)
def test_ends(field: str, inside: list[Any], outside: list[Any]) -> None:
    for number in inside:
        assert RULE.find_fault(dataclasses.replace(RULE.initial_state(), **{field: number})) is None
    for number in outside:
        fault = RULE.find_fault(dataclasses.replace(RULE.initial_state(), **{field: number}))
        assert fault is not None and field.replace("_", " ") in fault


def test_a_scale_without_a_floor_is_above_zero() -> None:
    rule = DynamicRule(min_loss_scale=0.0)
    assert rule.find_fault(dataclasses.replace(rule.initial_state(), loss_scale=np.float32(0))) is not None


def test_every_state_that_a_rule_reaches_is_inside() -> None:
    state, random = RULE.initial_state(), np.random.default_rng(0)
    for finite in random.uniform(size=500) < 0.8:
        state, _ = next_state(RULE, state, bool(finite))
        assert RULE.find_fault(state) is None
