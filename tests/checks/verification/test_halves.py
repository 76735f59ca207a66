"""The halves of a split step for verify: no alarm on the results of split, and each damage is named."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import helper

import graphscale as gs
from graphscale.errors import GraphscaleError, VerifyError
from tests.checks.verification.damage import (
    STRANGER,
    Edit,
    constant,
    edit,
    faults_of,
    in_metadata,
    inputs_exchanged,
    node,
    other_operands,
    rename_inside,
    reorder,
)
from tests.cli.command import graphscale, refuse, succeed
from tests.conftest import MODELS
from tests.replicas.steps import STEPS, scaled

pytestmark = [pytest.mark.static, pytest.mark.sample(2)]

NAME = "pytorch/mlp_momentum"
STEP, GRADS, SECOND, UPDATE = "step.onnx", "grads.onnx", "grads.2.onnx", "update.onnx"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("halves")
    gs.scale(MODELS / f"{NAME}.onnx").save(folder / STEP)
    gs.split(folder / STEP, bucket_bytes=1000, stages=2).save(folder / GRADS, folder / UPDATE)
    return folder


@pytest.fixture
def halves(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "halves"))


def faults(folder: Path) -> str:
    return faults_of("halves", folder / STEP, (folder / GRADS, folder / UPDATE))


@pytest.mark.parametrize(
    "options",
    [{}, {"bucket_bytes": 64}, {"bucket_bytes": 1001, "stages": 3}, {"pack_buckets": False}],
    ids=str,
)
@pytest.mark.parametrize("name", STEPS)
@pytest.mark.sample(1)
def test_what_split_writes_is_verified(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    step = scaled(name)
    parts = gs.split(step, **options)
    assert gs.verify(step, parts).verdict == "verified (halves)"
    step.save(tmp_path / STEP)
    parts.save(tmp_path / GRADS, tmp_path / UPDATE)
    assert faults(tmp_path) == ""


@pytest.mark.parametrize(
    "options",
    [
        {"telemetry": True},
        {"telemetry": "ranges"},
        {"autocast": "float16"},
        {"loss_scale": 1024.0},
        {"target": "ort-training"},
    ],
    ids=str,
)
def test_steps_scaled_in_other_ways(options: dict[str, Any]) -> None:
    step = gs.scale(onnx.load(MODELS / f"{NAME}.onnx"), **options)
    parts = gs.split(step, bucket_bytes=500, stages=2)
    assert isinstance(parts.update, onnx.ModelProto)
    assert gs.verify(step, [*parts.gradients, parts.update]).ok


@pytest.mark.parametrize("change", [rename_inside, reorder])
def test_names_and_order_are_free(change: Edit, halves: Path) -> None:
    for file in (GRADS, UPDATE):
        edit(halves / file, change)
    assert faults(halves) == ""


def tanh(model: onnx.ModelProto) -> None:
    """Squash the first bucket."""
    writer = next(node for node in model.graph.node if "gradients.0" in node.output)
    writer.output[0] = "before"
    model.graph.node.append(helper.make_node("Tanh", ["before"], ["gradients.0"], "squash"))


def unguard(model: onnx.ModelProto) -> None:
    guard = next(node for node in model.graph.node if node.op_type == "Where" and "fc1.bias" in node.input)
    guard.input[2] = guard.input[1]


DAMAGE: dict[str, tuple[str, Edit, str]] = {
    "squashed": (GRADS, tanh, f"node 'squash' (Tanh) {STRANGER}"),
    "seed": (GRADS, lambda m: node(m, "Mul").input.__setitem__(1, node(m, "Mul").input[0]), "input 1 of"),
    "dead": (GRADS, lambda m: m.graph.node.add(op_type="Neg", input=["x"], output=["q"], name="q"), STRANGER),
    "unguarded": (UPDATE, unguard, "input 2 of"),
    "own-check-alone": (UPDATE, lambda m: node(m, "And").input.__setitem__(1, node(m, "And").input[0]), "input 1 of"),
    "inputs": (UPDATE, inputs_exchanged(-1, -2), "are in another order"),
    "missing-output": (UPDATE, lambda m: m.graph.output.pop(), "is missing among the outputs"),
    "second-stage": (SECOND, lambda m: node(m, "Div").__setattr__("op_type", "Mul"), "(Mul)"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_half_is_not_proved_and_the_damage_named(name: str, halves: Path) -> None:
    file, change, words = DAMAGE[name]
    edit(halves / file, change)
    found = faults(halves)
    assert f"translation of {file} not proved" in found and words in found, found


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("replicas_finite", False, "'replicas_finite' is False, and should be True"),
        ("current_loss_scale", 2.0, "'current_loss_scale' is 2.0, and should be 32768.0"),
        ("good_steps", -100000, "'good_steps' is -100000, and should be 0"),
    ],
)
def test_other_initial_values_fail(name: str, value: float, words: str, halves: Path) -> None:
    edit(halves / UPDATE, constant(name, value))
    assert f"initial values of {UPDATE} fails" in faults(halves) and words in faults(halves)


@pytest.mark.full
@pytest.mark.parametrize("file", [GRADS, SECOND, UPDATE])
def test_every_operand_counts(file: str, made: Path, tmp_path: Path) -> None:
    mutant = Path(shutil.copytree(made, tmp_path / "mutant"))
    for model in other_operands(onnx.load(made / file)):
        onnx.save(model, mutant / file)
        assert f"translation of {file} not proved" in faults(mutant)


# --- metadata ---------------------------------------------------------------------------------------------------------


METADATA: dict[str, Edit] = {
    "policy": in_metadata("policy", lambda policy: policy["config"].update(increment_period=4)),
    "average": in_metadata("split", lambda split: split["average"].append("loss_2")),
    "half": in_metadata("split", lambda split: split.update(half="other")),
    "segments": in_metadata("split", lambda split: split["buckets"][0]["segments"].pop()),
    "names": in_metadata("names", lambda names: names.update(loss="x")),
}


@pytest.mark.parametrize("file", [GRADS, SECOND, UPDATE])
@pytest.mark.parametrize("name", METADATA)
def test_edited_metadata_fail(name: str, file: str, halves: Path) -> None:
    edit(halves / file, METADATA[name])
    assert f"metadata of {file} fails" in faults(halves)


def test_other_buckets_than_the_claimed_ones(halves: Path) -> None:
    edit(halves / GRADS, in_metadata("split", lambda split: split["buckets"][0].update(bytes=4000)))
    assert f"translation of {GRADS} not proved" in faults(halves)


def test_halves_of_other_steps(halves: Path, tmp_path: Path) -> None:
    gs.scale(MODELS / f"{NAME}.onnx", 1024.0).save(tmp_path / STEP)
    gs.split(tmp_path / STEP, bucket_bytes=1000, stages=2).save(tmp_path / GRADS, tmp_path / UPDATE)
    assert faults(tmp_path) == ""
    shutil.copy(tmp_path / UPDATE, halves / UPDATE)
    assert f"translation of {UPDATE} not proved" in faults(halves)
    shutil.copy(halves / GRADS, halves / UPDATE)
    assert f"translation of {UPDATE} not proved" in faults(halves)


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_command(halves: Path) -> None:
    shown = " ".join(succeed(halves, "verify", STEP, GRADS, UPDATE).split())
    assert "verified (halves)" in shown and SECOND in shown and "verify ORIGINAL STEP" in shown
    edit(halves / SECOND, DAMAGE["second-stage"][1])
    result = graphscale("verify", STEP, GRADS, UPDATE, folder=halves)
    assert (result.returncode, result.stderr) == (1, "")
    assert "not proved" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([STEP, GRADS, "missing.onnx"], ["missing.onnx"]),
        ([STEP, STEP, UPDATE], ["step.onnx is no half of a split step"]),
        ([str(MODELS / f"{NAME}.onnx"), GRADS, UPDATE], ["carries no loss scale"]),
        ([GRADS, GRADS, UPDATE], ["is one half of a split step"]),
        ([".", GRADS, UPDATE], ["is a folder"]),
        ([STEP, ".", UPDATE], ["is a folder"]),
        ([STEP, GRADS, UPDATE, "--loss=loss"], ["loss is for a single graph"]),
        ([STEP, GRADS, UPDATE, "--trained"], ["trained is for a single graph"]),
    ],
)
def test_bad_input(arguments: list[str], words: list[str], halves: Path) -> None:
    refuse(halves, "verify", *arguments, words=words)


@pytest.mark.parametrize(
    "change",
    [lambda s: s.update(stages="2"), lambda s: s.pop("buckets"), lambda s: s.update(buckets=[{"name": "a"}])],
)
def test_claims_of_another_form(change: Callable[[Any], object], halves: Path) -> None:
    edit(halves / GRADS, in_metadata("split", change))
    with pytest.raises(GraphscaleError, match=r"damaged property graphscale\.split|number of stages"):
        gs.verify(halves / STEP, (halves / GRADS, halves / UPDATE))


@pytest.mark.full
def test_a_number_of_models_that_does_not_fit(halves: Path) -> None:
    models = [onnx.load(halves / file) for file in (GRADS, SECOND, UPDATE)]
    assert gs.verify(halves / STEP, models).ok
    for given in (models[:1], models[1:], [*models, models[2]]):
        with pytest.raises(VerifyError):
            gs.verify(halves / STEP, given)
