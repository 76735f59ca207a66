"""Graphs that graphscale scaled, damaged in one place: lint names the damage, with and without their metadata."""

from __future__ import annotations

import json

import onnx_ir as ir
import pytest

import graphscale as gs
from benchmarks.mutation import KINDS
from benchmarks.mutation.damaged import Damaged
from tests.checks.linting.test_models import forget, scaled
from tests.ort.artifacts.training_session import FOLDERS

pytestmark = pytest.mark.static

NAMES = ("pytorch/attention_adamw_clip", "pytorch/clip_by_value", "jax/mlp_adam", "jax/conv", "ort/transformer")
# Of the kinds of damage in benchmarks/mutation/, those that lint names: by what the graph does alone, too.
DAMAGE = {
    "drop an unscaling": {"GS201", "GS205"},
    "unscale twice": {"GS202"},
    "multiply instead of unscaling": {"GS103"},
    "unscale after clipping": {"GS205"},
    "divide by the next scale": {"GS204"},
    "scale twice": {"GS103", "GS201", "GS205"},
    "scale the loss output": {"GS105"},
    "leave a gradient out of the check": {"GS301"},
    "check by ReduceMax of Abs": {"GS302"},
    "check after clipping": {"GS303"},
    "check one element": {"GS301"},
    "check for NaN alone": {"GS303"},
    "invert the check": {"GS305"},
    "unguard a weight": {"GS401"},
    "unguard a moment": {"GS401"},
    "unguard a counter": {"GS404"},
    "swap the branches of a guard": {"GS403", "GS401"},
    "guard by a constant": {"GS402", "GS401"},
    "guard by the negated flag": {"GS403", "GS401"},
    "guard by the flag of the step before": {"GS402", "GS401"},
    "unguard an accumulator": {"GS401"},
    "grow on overflow": {"GS305"},
    "do not carry the scale on": {"GS305"},
}
BY_NAME = {kind.name: kind for kind in KINDS}


@pytest.mark.full
@pytest.mark.parametrize("kind", DAMAGE)
@pytest.mark.parametrize("name", NAMES)
def test_damage_is_named(name: str, kind: str) -> None:
    """In this graph, or where it has no place for such damage, in the first one that has."""
    # A training build keeps its accumulators.
    options = {"target": "ort-training"} if "accumulator" in kind else {}
    graphs = (Damaged(scaled(each, "dynamic", options)) for each in (name, *NAMES))
    damaged = next(each for each in graphs if any(BY_NAME[kind].sites(each)))
    assert gs.lint(damaged.model).clean
    BY_NAME[kind].damage(damaged, list(BY_NAME[kind].sites(damaged))[-1])
    damaged.tidy()
    for _ in range(2):
        found = gs.lint(damaged.model)
        assert DAMAGE[kind] & {finding.code for finding in found.findings}, found.findings
        assert found.loss_scale == "current_loss_scale" and found.check is not None
        forget(damaged.model)


def test_the_scale_is_no_input() -> None:
    model = scaled("pytorch/mlp_momentum", "dynamic", {})
    model.graph.inputs.remove(next(v for v in model.graph.inputs if v.name == "current_loss_scale"))
    assert "GS501" in {finding.code for finding in gs.lint(model).findings}


@pytest.mark.full
def test_damage_in_place() -> None:
    model = scaled("ort/transformer", "dynamic", {"target": "ort-training"})
    node = next(n for n in model.graph if n.op_type == "Where" and "guard-updates" in n.metadata_props.values())
    node.replace_input_with(2, node.inputs[1])
    assert "GS401" in {finding.code for finding in gs.lint(model).findings}


@pytest.mark.full
def test_an_unordered_write() -> None:
    step = gs.fuse(FOLDERS / "conv_adamw")
    model = gs.scale(step.model, updates=step.updates, target="ort-training").model
    assert isinstance(model, ir.Model)
    (wait,) = (n for n in model.graph if n.op_type == "Where" and "order-writes" in n.metadata_props.values())
    written = wait.inputs[2]
    assert written is not None
    wait.outputs[0].replace_all_uses_with(written)
    assert {finding.code for finding in gs.lint(model).findings} == {"GS502"}


def test_a_lost_output() -> None:
    model = scaled("pytorch/mlp_momentum", "dynamic", {})
    gone = model.graph.outputs.pop(1)
    found = gs.lint(model).findings
    assert [(finding.code, gone.name in finding.message) for finding in found] == [("GS503", True)]


@pytest.mark.parametrize("gone", ["current_loss_scale", "good_steps", 2])
def test_a_forgotten_state(gone: str | int) -> None:
    model = scaled("pytorch/mlp_momentum", "dynamic", {})
    state = json.loads(model.metadata_props["graphscale.state"])
    name = gone if isinstance(gone, str) else list(state)[gone]
    del state[name]
    model.metadata_props["graphscale.state"] = json.dumps(state)
    assert ("GS503", name) in [(finding.code, finding.value) for finding in gs.lint(model).findings]
