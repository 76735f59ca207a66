"""verify on steps with telemetry of ranges and activations: by nodes, and by numbers alone."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import graphscale as gs
from graphscale.passes import AddTelemetry
from tests.checks.verification.test_models import PORTABLE
from tests.conftest import HAS_TRAINING, MODEL_NAMES, load_example

pytestmark = pytest.mark.sample(1)

EXAMPLE = "pytorch/mlp_momentum"


def giving(model: onnx.ModelProto, output: str) -> onnx.NodeProto:
    return next(node for node in model.graph.node if output in node.output)


def exchange_branches(model: onnx.ModelProto) -> None:
    for attribute in giving(model, "gradient_ranges.next").attribute:
        attribute.name = {"then_branch": "else_branch", "else_branch": "then_branch"}[attribute.name]


def inner(op_type: str, change: Callable[[onnx.NodeProto], None]) -> Callable[[onnx.ModelProto], None]:
    def edit(model: onnx.ModelProto) -> None:
        node = giving(model, "gradient_ranges.next")
        (branch,) = (each.g for each in node.attribute if each.name == "then_branch")
        change(next(node for node in branch.node if node.op_type == op_type))

    return edit


def rename(op_type: str) -> Callable[[onnx.NodeProto], None]:
    return lambda node: setattr(node, "op_type", op_type)


def forget_overflow(node: onnx.NodeProto) -> None:
    """An infinity is counted, a NaN is not."""
    node.op_type = "IsInf"


def another_period(model: onnx.ModelProto) -> None:
    (tensor,) = (each for each in model.graph.initializer if each.name == "graphscale/telemetry.3")
    tensor.CopyFrom(numpy_helper.from_array(np.asarray(2, np.int64), tensor.name))


def another_fraction(model: onnx.ModelProto) -> None:
    """The fraction of the first gradient, not of all."""
    giving(model, "zero_fraction").input[1] = "graphscale/telemetry.0"


def searching(change: Callable[[onnx.GraphProto], None]) -> Callable[[onnx.ModelProto], None]:
    def edit(model: onnx.ModelProto) -> None:
        node = giving(model, "first_activation")
        (branch,) = (each.g for each in node.attribute if each.name == "else_branch")
        change(branch)

    return edit


def never_find(branch: onnx.GraphProto) -> None:
    [node for node in branch.node if node.op_type == "Max"][-1].op_type = "Min"


def always_find(branch: onnx.GraphProto) -> None:
    """Give the last position in place of -1, of a step without a fault."""
    last = next(node for node in branch.node if branch.output[2].name in node.output)
    last.input[2] = last.input[1]


DAMAGE = {
    "no activation ever": searching(never_find),
    "an activation in every skipped step": searching(always_find),
    "exchanged branches": exchange_branches,
    "another period": another_period,
    "the zero fraction of one gradient": another_fraction,
    "the smallest magnitude": inner("ReduceMax", rename("ReduceMin")),
    "a sign that stays": inner("Abs", rename("Identity")),
    "NaN that is not counted": inner("IsNaN", forget_overflow),
    "zeros that are not counted": inner("Sub", rename("Max")),
}


@pytest.mark.parametrize("name", DAMAGE)
@pytest.mark.parametrize("numeric", [False, True], ids=["by nodes", "by numbers"])
def test_damage_is_found(name: str, numeric: bool) -> None:
    example = load_example(EXAMPLE)
    scaled = onnx.ModelProto()
    told = AddTelemetry(ranges=True, every=3, activations=True)
    scaled.CopyFrom(gs.scale(example.model(), telemetry=told).model)
    DAMAGE[name](scaled)
    report = gs.verify(example.model(), scaled, runs=1, numeric=numeric)
    assert not report.ok
    details = " ".join(check.detail for check in report.failures)
    words = ("gradient_ranges", "zero_fraction", "first_activation")
    assert not numeric or any(word in details for word in words)


def claiming(text: str) -> tuple[onnx.ModelProto, onnx.ModelProto]:
    example = load_example(EXAMPLE)
    scaled = onnx.ModelProto()
    scaled.CopyFrom(gs.scale(example.model(), telemetry=AddTelemetry(ranges=True, every=3)).model)
    (entry,) = (entry for entry in scaled.metadata_props if entry.key == "graphscale.telemetry")
    assert '{"every": 3}' in entry.value
    entry.value = entry.value.replace('{"every": 3}', text)
    return example.model(), scaled


def test_another_period_in_the_metadata_is_found() -> None:
    report = gs.verify(*claiming('{"every": 4}'), runs=1)
    assert not report.ok


@pytest.mark.parametrize("text", ['{"every": 0}', '{"every": 16777217}', "{}", "3", '{"every": 3, "more": 1}'])
def test_metadata_of_another_form_are_refused(text: str) -> None:
    with pytest.raises(gs.GraphscaleError, match=r"graphscale\.telemetry has another form than expected"):
        gs.verify(*claiming(text), runs=1)


@pytest.mark.cover(1)
@pytest.mark.full
@pytest.mark.parametrize("target", ["onnx", "ort-cpu", pytest.param("ort-training", marks=pytest.mark.training)])
@pytest.mark.parametrize("name", MODEL_NAMES if HAS_TRAINING else PORTABLE)
def test_every_model_is_verified_and_linted(name: str, target: str) -> None:
    example = load_example(name)
    # Gradients that leave in float16 are a finding.
    options = {"telemetry": "ranges,activations", "gradient_dtype": "float32"}
    scaled = gs.scale(example.model(), gs.DynamicLossScale(1024.0), target=target, **options).model
    report = gs.verify(example.model(), scaled, runs=1)
    assert report.ok, report.failures
    assert gs.lint(scaled).findings == ()
