"""The step of a scaled file: the one that the passes have made of its original."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import onnx
import onnx_ir as ir
import pytest

import graphscale as gs
from graphscale.analysis.hints import Hints
from graphscale.checks.patterns import skip_ordering
from graphscale.errors import ModelFileError
from graphscale.graph.values import uses_of
from graphscale.passes import AddTelemetry, ScaleLoss, replace_training_ops, run_rewrite
from graphscale.passes.preparation import prepare
from graphscale.policy import presets
from graphscale.policy.names import ScaledValue
from graphscale.step.scaled_step import read
from graphscale.step.training_step import Step
from graphscale.targets import get_target
from tests.conftest import MODELS
from tests.passes.cases import sgd

pytestmark = pytest.mark.static

POLICIES: dict[str, Any] = {
    "dynamic": "dynamic",
    "fixed": 256,
    "hysteresis": gs.DynamicLossScale(1024, 3, hysteresis=2, max_consecutive_skips=9, on_stuck="flag"),
    "torch": presets.torch(),
}
TARGETS = ("onnx", "ort-cuda", "ort-training")
GRAPHS = ("pytorch/mlp_momentum", "jax/mlp_adam", "ort/indexing")


def names_of(values: Iterable[ir.Value | None]) -> list[str | None]:
    """The names; of a value whose write waits, the name of the value itself."""
    return [None if value is None else skip_ordering(value).name for value in values]


def facts_of(step: Step) -> dict[str, Any]:
    """All that a scaled file has of a step."""
    (scale,) = step.scales
    by_role: dict[str, Mapping[ScaledValue, ir.Value]]
    by_role = {"states": scale.states, "next": scale.next, "telemetry": step.telemetry}
    return {
        **{key: dict(zip(values, names_of(values.values()), strict=True)) for key, values in by_role.items()},
        "policy": json.loads(scale.policy.to_json()),
        "target": scale.target,
        "one by one": names_of((step.loss, scale.value, scale.stuck, step.all_finite, step.guard)),
        "carried": {
            (*names_of((each.input, each.next)), each.in_place, each.how, each.guarded) for each in step.carried
        },
        "accumulators": [node.name for node in step.accumulators],
        "quotients": sorted(each.value.name or "" for each in step.quotients),
        "named": {role: value.name for role, value in step.named.items()},
    }


@pytest.mark.sample(6)
@pytest.mark.parametrize("telemetry", [False, True, "ranges,activations"])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", GRAPHS)
def test_the_step_that_the_passes_made(name: str, target: str, policy: str, telemetry: bool | str) -> None:
    if (telemetry and policy == "fixed") or (isinstance(telemetry, str) and target == "ort-cuda"):
        pytest.skip("telemetry needs a check, and ranges need branches")
    path, counting = MODELS / f"{name}.onnx", AddTelemetry.of(telemetry)
    model = ir.load(path)
    prepare(model, Hints())
    replace_training_ops(model, get_target(target))
    passes = [] if counting is None else [counting]
    made = run_rewrite(model, Hints(), ScaleLoss(POLICIES[policy], target=target), *passes)
    scaled = gs.scale(ir.load(path), POLICIES[policy], target=target, telemetry=telemetry).model
    assert isinstance(scaled, ir.Model)
    assert facts_of(read(scaled)) == facts_of(made)


def test_original_names_of_gradients() -> None:
    scaled = gs.scale(ir.from_proto(sgd(weight_decay=True)))
    assert isinstance(scaled.model, ir.Model)
    names = [gradient.value for gradient in scaled.report.gradients]
    assert [each.name for each in read(scaled.model).quotients] == names


def test_the_guard_of_a_lowered_file_waits() -> None:
    """The last node that can fail comes before the decision."""
    scaled = gs.scale(ir.load(MODELS / "pytorch" / "mlp_momentum.onnx"), target="ort-cpu").model
    assert isinstance(scaled, ir.Model)
    step = read(scaled)
    assert step.all_finite is not None and step.guard is not None and step.guard is not step.all_finite
    assert step.guard.producer() in [use.node for use in uses_of(step.all_finite)]


def without(model: onnx.ModelProto, output: str) -> ir.Model:
    """The model, as another tool would leave it that drops an output."""
    kept = [value for value in model.graph.output if value.name != output]
    del model.graph.output[:]
    model.graph.output.extend(kept)
    return ir.from_proto(model)


def test_values_that_the_graph_lacks() -> None:
    scaled = gs.scale(sgd()).model
    assert isinstance(scaled, onnx.ModelProto)
    step = read(without(scaled, "w_next"))
    assert "w" not in names_of(each.input for each in step.carried)
    assert ScaledValue.GOOD_STEPS in step.scale.next
    properties = {entry.key: entry for entry in scaled.metadata_props}
    names = json.loads(properties["graphscale.names"].value)
    properties["graphscale.names"].value = json.dumps({**names, "loss_scale": "nowhere", "loss": "nothing"})
    step = read(ir.from_proto(scaled))
    assert (step.scale.value.name, step.scale.value.graph) == ("nowhere", None)
    assert set(step.named) == {"good_steps", "all_finite"}


@pytest.mark.parametrize(
    "policy",
    [
        {"class_name": "Another", "config": {}},
        {"class_name": "DynamicLossScale", "config": {"multiplier": 0.5}},
        {"class_name": "DynamicLossScale", "config": {"unknown": 1}},
        {"class_name": "FixedLossScale", "config": {"loss_scale_value": []}},
    ],
)
def test_a_damaged_policy(policy: dict[str, Any]) -> None:
    """Every reader refuses it with the same sentence."""
    scaled = gs.scale(sgd()).model
    assert isinstance(scaled, onnx.ModelProto)
    next(each for each in scaled.metadata_props if each.key == "graphscale.policy").value = json.dumps(policy)
    calls = [
        lambda: gs.lint(scaled),
        lambda: gs.verify(sgd(), scaled),
        lambda: gs.Session(scaled),
        lambda: gs.split(scaled),
    ]
    for call in calls:
        with pytest.raises(ModelFileError, match="damaged graphscale metadata: its policy: ") as raised:
            call()
        assert "\n" not in str(raised.value)
