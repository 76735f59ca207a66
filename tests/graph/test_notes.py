"""The notes in the doc_strings of scaled files: they are right, kept apart from other text, and taken out again."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
import pytest

import graphscale as gs
from graphscale.errors import DOCS_URL
from graphscale.ort.artifacts.strip_folder import strip_artifacts
from graphscale.passes import AddTelemetry, InlineFunctions
from graphscale.targets import TARGETS
from tests.checks.verification.damage import SOURCE
from tests.conftest import MODELS

pytestmark = [pytest.mark.static, pytest.mark.sample(2)]

NAME = "pytorch/mlp_momentum"
PAGE = f"{DOCS_URL}start/deploy/"
OWN = "graphscale: an exporter may say this, too"
POLICY = gs.DynamicLossScale(1024, 3, hysteresis=2, max_consecutive_skips=9, on_stuck="flag")
EVERYTHING: dict[str, Any] = {"telemetry": AddTelemetry(ranges=True, activations=True), "expose_scaled_loss": True}
CUDA = ("ort-cuda", "ort-training-cuda")  # without branches, which measuring needs


@pytest.fixture(scope="module")
def original() -> onnx.ModelProto:
    """A step whose exporter has documented some of its values, one of them in several lines."""
    model = onnx.load(MODELS / f"{NAME}.onnx")
    model.doc_string = "A perceptron.\nExported by hand.\n"
    model.graph.doc_string = "main"
    model.graph.input[0].doc_string = "a batch"
    for value in (*model.graph.input, *model.graph.output):
        if value.name in ("fc1.weight", "fc1.weight.next"):
            value.doc_string = OWN
    return model


def options(target: str) -> dict[str, Any]:
    return {**EVERYTHING, "telemetry": True} if target in CUDA else EVERYTHING


def texts(model: onnx.ModelProto) -> dict[str, str]:
    return {value.name: value.doc_string for value in (*model.graph.input, *model.graph.output)}


def pairs(model: onnx.ModelProto) -> dict[str, str]:
    return dict(json.loads({entry.key: entry.value for entry in model.metadata_props}["graphscale.state"]))


@pytest.mark.parametrize("target", TARGETS)
def test_each_value_that_scaling_adds_has_a_note(original: onnx.ModelProto, target: str) -> None:
    scaled = gs.scale(original, POLICY, target=target, **options(target)).model
    found, before = texts(scaled), texts(original)
    added = [name for name in found if name not in before]
    assert added and all(found[name].startswith("graphscale: ") for name in added), found
    assert scaled.doc_string.startswith("A perceptron.\nExported by hand.\n\ngraphscale: a training graph")
    assert scaled.doc_string.endswith(PAGE) and f"for target {target}." in scaled.doc_string
    for source, output in pairs(scaled).items():
        assert found[source].splitlines()[-1].endswith(f"; feed {output} back here")
        assert found[output].splitlines()[-1] == f"graphscale: the next value of {source}; feed it back there"
    if TARGETS[target].in_place:
        assert found["current_loss_scale"].endswith("the runtime keeps from run to run; feed nothing here")
    else:
        assert found["current_loss_scale"] == "graphscale: the loss scale; feed current_loss_scale.next back here"
    assert found["x"] == "a batch" and scaled.graph.doc_string == "main"
    assert found["fc1.weight.next"].splitlines()[0] == OWN
    assert found["fc1.weight"] == f"{OWN}\ngraphscale: carried state; feed fc1.weight.next back here"


@pytest.mark.parametrize("target", TARGETS)
def test_strip_takes_the_notes_out_again(original: onnx.ModelProto, target: str) -> None:
    scaled = gs.scale(original, POLICY, target=target, **options(target)).model
    assert gs.strip(scaled).SerializeToString(deterministic=True) == original.SerializeToString(deterministic=True)


def test_lowering_writes_the_notes_anew(original: onnx.ModelProto) -> None:
    scaled = gs.scale(original, POLICY, **EVERYTHING).model
    lowered = gs.lower(scaled).model
    assert texts(lowered) == texts(scaled)
    assert lowered.doc_string == scaled.doc_string.replace("for target onnx", "for target ort-cpu")
    again = gs.strip(lowered)
    assert again.SerializeToString(deterministic=True) == original.SerializeToString(deterministic=True)


def test_parts_of_a_step_say_what_they_are(original: onnx.ModelProto) -> None:
    scaled = gs.scale(original, POLICY).model
    halves = gs.split(scaled)
    first, second = halves.gradients[0], halves.update
    for part in (first, second):
        assert part.doc_string.startswith("A perceptron.") and part.doc_string.endswith(PAGE)
        assert "graphscale: a part of a training step" in part.doc_string
        assert part.doc_string.count("graphscale: ") == 1
    assert "feed" not in first.doc_string
    assert texts(first)["fc1.weight"] == OWN
    assert texts(second)["current_loss_scale"] == texts(scaled)["current_loss_scale"]
    plain = gs.split(gs.scale(onnx.load(MODELS / f"{NAME}.onnx"), POLICY).model)
    for part in (*plain.gradients, plain.update):
        assert not [finding for finding in gs.lint(part).findings if finding.code == "GS503"]


def test_functions_and_guards_keep_the_text_of_outputs(original: onnx.ModelProto) -> None:
    """A pass that gives another value for an output, or inlines the function that gave it, moves the text."""
    scaled = gs.scale(original, POLICY).model
    assert texts(scaled)["fc1.weight.next"].splitlines()[0] == OWN
    again = ir.from_proto(scaled)
    InlineFunctions()(again)
    assert again.functions == {} and texts(ir.to_proto(again)) == texts(scaled)


@pytest.mark.full
def test_mixed_precision_keeps_them(original: onnx.ModelProto) -> None:
    scaled = gs.scale(original, POLICY, autocast="float16").model
    assert texts(scaled)["good_steps"].endswith("; feed good_steps.next back here")
    assert gs.verify(original, scaled).ok
    cast = gs.autocast(original, "float16").model
    assert texts(cast) == texts(original) and cast.doc_string == original.doc_string


@pytest.mark.parametrize("lower", [True, False])
def test_models_of_a_folder_have_notes(lower: bool, tmp_path: Path) -> None:
    gs.scale_artifacts(SOURCE, tmp_path / "scaled", lower=lower)
    for path in (tmp_path / "scaled").glob("*.onnx"):
        model = onnx.load(path)
        assert model.doc_string.startswith("graphscale: ") and model.doc_string.endswith(PAGE)
        assert model.doc_string.count("graphscale: ") == 1
    training = texts(onnx.load(tmp_path / "scaled" / "training_model.onnx"))
    assert training["current_loss_scale"] == (
        "graphscale: the loss scale, which the runtime keeps from run to run; feed nothing here"
    )
    assert gs.verify(SOURCE, tmp_path / "scaled").ok
    strip_artifacts(tmp_path / "scaled", tmp_path / "stripped")
    for path in SOURCE.glob("*.onnx"):
        stripped, model = onnx.load(tmp_path / "stripped" / path.name), onnx.load(path)
        assert (stripped.doc_string, texts(stripped)) == (model.doc_string, texts(model))


# --- verify and lint --------------------------------------------------------------------------------------------------


def value(name: str) -> Callable[[onnx.ModelProto], Any]:
    return lambda model: next(v for v in (*model.graph.input, *model.graph.output) if v.name == name)


DAMAGE: dict[str, tuple[Callable[[onnx.ModelProto], Any], str]] = {
    "another model": (lambda model: model, "graphscale: nothing is to be fed back"),
    "another pair": (value("current_loss_scale"), "graphscale: the loss scale; feed good_steps.next back here"),
    "a batch": (value("x"), "a batch\ngraphscale: carried state; feed logits back here"),
    "an output": (value("loss"), "graphscale: feed this anywhere"),
    "before other text": (value("good_steps"), "graphscale: feed nothing here\nthe count"),
    "a further line": (value("good_steps.next"), "graphscale: the loss\n{}"),
}


@pytest.mark.full
@pytest.mark.parametrize("target", ["onnx", "ort-cpu"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_misleading_notes_are_found(original: onnx.ModelProto, damage: str, target: str) -> None:
    scaled = gs.scale(original, POLICY, target=target, **EVERYTHING).model
    choose, text = DAMAGE[damage]
    wrong = text.format(choose(scaled).doc_string)
    choose(scaled).doc_string = wrong
    report = gs.verify(original, scaled)
    line = next(line for line in wrong.splitlines() if line.startswith("graphscale: "))
    assert not report.ok and any(line in check.detail for check in report.failures)
    assert any(finding.code == "GS503" and line in finding.message for finding in gs.lint(scaled).findings)


@pytest.mark.full
@pytest.mark.parametrize("target", ["onnx", "ort-cpu", pytest.param("ort-training", marks=pytest.mark.training)])
def test_right_notes_and_none_are_accepted(original: onnx.ModelProto, target: str) -> None:
    original = onnx.load(MODELS / f"{NAME}.onnx")
    scaled = gs.scale(original, POLICY, target=target, **EVERYTHING).model
    for _ in range(2):
        assert gs.verify(original, scaled).ok
        assert not [finding for finding in gs.lint(scaled).findings if finding.code == "GS503"]
        for each in (scaled, *scaled.graph.input, *scaled.graph.output):  # as tools do that drop texts for people
            each.doc_string = "another text" if each.doc_string == "" else ""
