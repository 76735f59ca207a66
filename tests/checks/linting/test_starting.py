"""The values with which the loss scale and its counts begin, damaged one at a time."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

import graphscale as gs
from graphscale.policy import presets
from tests.checks.linting.test_models import EMULATED, scaled

pytestmark = pytest.mark.static

HALF = {"autocast": EMULATED["float16"]}
LIMITED = gs.DynamicLossScale(
    1024, 100, max_loss_scale=2.0**20, min_loss_scale=2.0, hysteresis=2, on_stuck="flag", max_consecutive_skips=5
)
FIRST = gs.DynamicLossScale(growth_delay="first")
LOW = gs.DynamicLossScale(0.5, min_loss_scale=0.0)
NAN, INF = math.nan, math.inf
# The policy, the role, the number in place of the policy's, and the codes.
CASES: list[tuple[Any, str, float, list[str]]] = [
    *(("dynamic", "loss_scale", number, ["GS107"]) for number in (NAN, INF, -INF, 0.0, -0.0, -1.0, 0.5, 1e-45)),
    *(("dynamic", "loss_scale", number, ["GS505"]) for number in (1.0, 2.0**14, 2.0**120, 2.0**15 + 1)),
    (LIMITED, "loss_scale", 2.0**21, ["GS107"]),
    (LIMITED, "loss_scale", 1.0, ["GS107"]),
    (LIMITED, "loss_scale", 2.0**20, ["GS505"]),
    (LOW, "loss_scale", 0.5, []),
    (LOW, "loss_scale", 0.0, ["GS107"]),
    (1024.0, "loss_scale", 512.0, ["GS505"]),
    (1024.0, "loss_scale", NAN, ["GS107"]),
    *(("dynamic", "good_steps", number, ["GS504"]) for number in (-100000, -1, 2000, 2.0**30)),
    *(("dynamic", "good_steps", number, ["GS505"]) for number in (1, 1999)),
    (FIRST, "good_steps", -1, []),
    (FIRST, "good_steps", 0, ["GS505"]),
    (FIRST, "good_steps", -2, ["GS504"]),
    *((LIMITED, "hysteresis_left", number, ["GS504"]) for number in (-5, 0, 3)),
    (LIMITED, "hysteresis_left", 1, ["GS505"]),
    (LIMITED, "bad_steps", -1, ["GS504"]),
    (LIMITED, "bad_steps", 4, ["GS505"]),
    *(("dynamic", role, -1, ["GS504"]) for role in ("steps", "skipped_steps", "consecutive_skips", "last_skip_step")),
    *(("dynamic", role, 1, ["GS504"]) for role in ("consecutive_skips", "last_skip_step")),
    ("dynamic", "skipped_steps", 1, ["GS504"]),
    ("dynamic", "steps", 1, []),
]
# Numbers that a float32 count of an in-place target can hold.
IN_PLACE: list[tuple[Any, str, float, list[str]]] = [
    *(("dynamic", "good_steps", number, ["GS504"]) for number in (0.5, NAN, INF, -INF)),
    *((LIMITED, "hysteresis_left", number, ["GS504"]) for number in (1.5, NAN)),
    *(("dynamic", "steps", number, ["GS504"]) for number in (0.5, NAN, INF)),
]


def begin(model: ir.Model, policy: Any, role: str, number: float) -> list[str]:
    """Return the codes found after a number has been stored."""
    (value,) = (v for v in model.graph.initializers.values() if v.name in (role, f"current_{role}"))
    assert value.const_value is not None and gs.lint(model).findings == (), (policy, role)
    array = np.asarray(number).astype(value.const_value.dtype.numpy())
    value.const_value = ir.tensor(array, name=value.name)
    return [finding.code for finding in gs.lint(model).findings]


@pytest.mark.sample(4)
@pytest.mark.parametrize("target", ["onnx", "ort-training"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_number(case: tuple[Any, str, float, list[str]], target: str) -> None:
    policy, role, number, codes = case
    options = {"target": target, "telemetry": policy != 1024.0}
    assert begin(scaled("pytorch/mlp_momentum", policy, options), policy, role, number) == codes


@pytest.mark.parametrize("case", IN_PLACE, ids=str)
def test_a_number_in_place(case: tuple[Any, str, float, list[str]]) -> None:
    policy, role, number, codes = case
    model = scaled("pytorch/mlp_momentum", policy, {"target": "ort-training", "telemetry": True})
    assert begin(model, policy, role, number) == codes


@pytest.mark.parametrize(("number", "code"), [(2.0**41, "GS107"), (2.0**40, "GS505")])
def test_a_scale_that_float16_does_not_survive(number: float, code: str) -> None:
    assert begin(scaled("pytorch/mlp_momentum", "dynamic", HALF), "dynamic", "loss_scale", number) == [code]


@pytest.mark.parametrize("name", presets.NAMES)
def test_presets_begin_as_they_do(name: str) -> None:
    assert gs.lint(scaled("pytorch/mlp_momentum", getattr(presets, name)(), {})).findings == ()
