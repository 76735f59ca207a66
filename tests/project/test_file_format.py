"""The page about the file format: all keys that the code writes, and schemas that fit real files."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator
from typing import Any

import onnx
import onnx_ir as ir
import pytest

import graphscale as gs
from graphscale.analysis.roles.roles_file import roles_schema
from graphscale.files.training_info import ROLES_KEY
from graphscale.files.writing import MARK_KEY
from graphscale.graph.marks import PASS_KEY, WAS_FLOAT
from graphscale.graph.original import ORIGINAL_KEY
from graphscale.graph.stamp import SPLIT_KEY, Stamp
from graphscale.passes import AddTelemetry
from graphscale.passes.lower_precision import AUTOCAST_KEY
from graphscale.policy.names import RESULTS, STATES
from tests.analysis.roles.steps import hidden_state_step
from tests.conftest import MODELS, ROOT

pytestmark = pytest.mark.static

PAGE = (ROOT / "docs" / "reference" / "file-format.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^### `(graphscale\.\w+)`\n(.*?)(?=^##)", PAGE, re.MULTILINE | re.DOTALL))
POLICY = gs.DynamicLossScale(1024, 3, hysteresis=2, max_consecutive_skips=9, on_stuck="flag")
STEP = MODELS / "pytorch" / "mlp_momentum.onnx"


def schema(key: str) -> Any:
    found = re.search(r"^```json\n(.*?)^```", SECTIONS[key], re.MULTILINE | re.DOTALL)
    if key == ROLES_KEY:
        return roles_schema()
    return None if found is None else json.loads(found[1])


def files() -> Iterator[tuple[str, dict[str, str]]]:
    """Models of every kind, with their metadata."""
    everything = AddTelemetry(ranges=True, activations=True)
    made = {
        "plain": gs.scale(STEP).model,
        "everything": gs.scale(STEP, POLICY, telemetry=everything, autocast="float16", expose_scaled_loss=True).model,
        "fixed": gs.scale(STEP, 128).model,
        "lowered": gs.scale(STEP, POLICY, target="ort-cpu", telemetry=True).model,
        "in place": gs.scale(MODELS / "jax" / "mlp_adam.onnx", target="ort-training").model,
        "fused": gs.fuse(MODELS / "ort" / "artifacts" / "digits_adamw").model,
        "cast": gs.autocast(STEP, "bfloat16", emulate=True, allow=["Tanh"]).model,
        "gradients": gs.split(gs.scale(STEP, POLICY)).gradients[0],
        "accepted": gs.scale(ir.from_proto(hidden_state_step()), accept=True).model,
        "update": gs.split(gs.scale(STEP, POLICY)).update,
    }
    for kind, model in made.items():
        assert isinstance(model, ir.Model)
        yield kind, {key: text for key, text in model.metadata_props.items() if key.startswith("graphscale.")}


def test_every_key_has_a_section() -> None:
    of_models = {f"graphscale.{field.name}" for field in dataclasses.fields(Stamp)}
    assert SECTIONS.keys() == {*of_models, ORIGINAL_KEY, AUTOCAST_KEY, SPLIT_KEY, ROLES_KEY, MARK_KEY}
    assert all(f"`{key}`" in PAGE for key in (PASS_KEY, WAS_FLOAT))
    found = {key for _, metadata in files() for key in metadata}
    assert found == SECTIONS.keys() - {ROLES_KEY}


def test_every_role_has_a_row() -> None:
    rows = "".join(line for line in PAGE.splitlines() if line.startswith("| `"))
    for role in (*STATES, *RESULTS):
        assert f"`{role}`" in rows, role


@pytest.mark.full
def test_the_schemas_fit_what_is_written() -> None:
    jsonschema = pytest.importorskip("jsonschema", reason="needs jsonschema; the quick tier has it")
    for kind, metadata in files():
        for key, text in metadata.items():
            wanted = schema(key)
            if wanted is None:
                assert "JSON" not in SECTIONS[key].partition(".")[0], key
                continue
            jsonschema.Draft202012Validator.check_schema(wanted)
            found = [error.message for error in jsonschema.Draft202012Validator(wanted).iter_errors(json.loads(text))]
            assert found == [], (kind, key)


@pytest.mark.parametrize(
    ("key", "wrong"),
    [
        ("graphscale.state", {"w": 1}),
        ("graphscale.names", {"loss": "loss"}),
        ("graphscale.policy", {"class_name": "Another", "config": {}}),
        ("graphscale.in_place", {"w": "w"}),
        ("graphscale.telemetry", {"ranges": {"every": 0}}),
        ("graphscale.autocast", {"dtype": "float8", "emulate": False}),
        ("graphscale.split", {"half": "update"}),
    ],
)
def test_the_schemas_refuse_damage(key: str, wrong: Any) -> None:
    jsonschema = pytest.importorskip("jsonschema", reason="needs jsonschema; the quick tier has it")
    assert not jsonschema.Draft202012Validator(schema(key)).is_valid(wrong)


def test_types_and_first_values_are_those_of_the_page() -> None:
    """The table of inputs and outputs, row by row."""
    scaled = gs.scale(onnx.load(STEP), POLICY, telemetry=AddTelemetry(ranges=True, activations=True)).model
    names = json.loads({entry.key: entry.value for entry in scaled.metadata_props}["graphscale.names"])
    kinds = {1: "float32", 7: "int64", 9: "bool"}
    inputs, outputs = ({v.name: v.type.tensor_type for v in ends} for ends in (scaled.graph.input, scaled.graph.output))
    first = {t.name: onnx.numpy_helper.to_array(t) for t in scaled.graph.initializer}
    rows = re.findall(r"^\| (`\w+`[^|]*) \| ((?:input|output)[^|]*) \| (\w+)[^|]* \| ([^|]*)\|$", PAGE, re.MULTILINE)
    seen = set()
    for roles, place, dtype, value in rows:
        for role in re.findall(r"`(\w+)`", roles):
            seen.add(role)
            name = names[role]
            ends = [inputs[name], outputs[f"{name}.next"]] if place.startswith("input") else [outputs[name]]
            assert {kinds[end.elem_type] for end in ends} == {dtype}, role
            assert all(len(end.shape.dim) == (2 if role == "ranges" else 0) for end in ends), role
            if value.strip().startswith("0"):
                assert not first[name].any(), role
    assert seen == {*STATES, *RESULTS}
    assert scaled.graph.output[-1].name == names["all_finite"]
    assert (first["hysteresis_left"], first["current_loss_scale"]) == (2, 1024)
    late = gs.scale(onnx.load(STEP), gs.presets.deepspeed()).model
    counts = {t.name: onnx.numpy_helper.to_array(t) for t in late.graph.initializer}
    assert counts["good_steps"] == -1
