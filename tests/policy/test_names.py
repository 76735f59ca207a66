"""The values that a scaled file names."""

from __future__ import annotations

import dataclasses
import json

import onnx
import pytest

import graphscale as gs
from graphscale.passes import AddTelemetry
from graphscale.policy.dynamic_rule import ScaleState
from graphscale.policy.names import COUNTERS, RESULTS, STATES, Kind, ScaledValue
from tests.passes.cases import sgd

pytestmark = pytest.mark.static


def test_the_state_of_a_rule_is_named() -> None:
    named = [value for value in ScaledValue if value.kind is Kind.SCALE]
    assert [field.name for field in dataclasses.fields(ScaleState)] == named


def test_a_member_is_its_role() -> None:
    assert {ScaledValue.GOOD_STEPS: 1} == {"good_steps": 1}
    assert json.dumps({ScaledValue.STUCK: 1}) == '{"stuck": 1}'
    assert f"{ScaledValue.STUCK} {ScaledValue.STUCK!r} {ScaledValue.LAST_SKIP_STEP.words}" == (
        "stuck 'stuck' last skip step"
    )


def test_groups() -> None:
    assert set(COUNTERS) < set(STATES) and set(STATES).isdisjoint(RESULTS)
    assert set(ScaledValue) - {*STATES, *RESULTS} == {ScaledValue.LOSS, ScaledValue.WINDOW_FINITE}
    assert all(value.text for value in (*STATES, *RESULTS))


@pytest.mark.parametrize("target", ["onnx", "ort-training"])
def test_a_file_has_the_names_types_and_first_values(target: str) -> None:
    policy = gs.DynamicLossScale(8, hysteresis=2, on_stuck="flag", max_consecutive_skips=3)
    model = gs.scale(sgd(), policy, target=target, telemetry=AddTelemetry(ranges=True, activations=True)).model
    names = json.loads({entry.key: entry.value for entry in model.metadata_props}["graphscale.names"])
    assert set(names) == set(ScaledValue) - {ScaledValue.WINDOW_FINITE}
    states = {tensor.name: tensor for tensor in model.graph.initializer}
    results = {value.name: value.type.tensor_type.elem_type for value in model.graph.output}
    for role in ScaledValue:
        if role in STATES:
            array = onnx.numpy_helper.to_array(states[role.wanted])
            assert array.dtype == role.dtype(in_place=target == "ort-training"), role
            assert role.default is None or not (array != role.default).any(), role
        if role in RESULTS:
            assert onnx.helper.tensor_dtype_to_np_dtype(results[role.wanted]) == role.dtype(), role
    assert all(names[role] == role.wanted for role in (*STATES, *RESULTS))
