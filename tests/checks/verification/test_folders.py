"""Artifact folders for verify: no alarm on scaled folders, and each damage is named."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import helper, numpy_helper

import graphscale as gs
from graphscale.errors import GraphscaleError
from graphscale.ort.artifacts.autocast_folder import autocast_artifacts
from tests.checks.verification.damage import (
    EVAL,
    FOLDERS,
    OPTIMIZER,
    SOURCE,
    STRANGER,
    TRAINING,
    Edit,
    constant,
    edit,
    faults,
    inputs_exchanged,
    node,
    other_operands,
    rename_inside,
    reorder,
)
from tests.cli.command import graphscale, refuse, succeed

pytestmark = [pytest.mark.static, pytest.mark.sample(2)]

NAMES = sorted(path.name for path in FOLDERS.iterdir())


# --- no false alarm ---------------------------------------------------------------------------------------------------

OPTIONS: dict[str, dict[str, Any]] = {
    "dynamic": {},
    "fixed": {"loss_scale": 128.0},
    "fixed-checked": {"loss_scale": 128.0, "skip_nonfinite": True},
    "apex": {"loss_scale": gs.presets.apex()},
    "stuck": {"loss_scale": gs.DynamicLossScale(8, 2, on_stuck="reset")},
    "float16": {"autocast": "float16"},
    "cuda": {"target": "ort-training-cuda"},
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", NAMES)
def test_what_scaling_writes_is_verified(name: str, options: str, tmp_path: Path) -> None:
    gs.scale_artifacts(FOLDERS / name, tmp_path / "scaled", **OPTIONS[options])
    assert faults(tmp_path / "scaled", FOLDERS / name) == ""


@pytest.mark.full
@pytest.mark.parametrize("name", NAMES)
def test_mixed_precision_before_scaling(name: str, tmp_path: Path) -> None:
    autocast_artifacts(FOLDERS / name, tmp_path / "cast", "bfloat16", emulate=True)
    gs.scale_artifacts(tmp_path / "cast", tmp_path / "scaled")
    assert faults(tmp_path / "scaled", FOLDERS / name) == ""
    assert faults(tmp_path / "scaled", tmp_path / "cast") == ""


@pytest.mark.parametrize("preset", gs.presets.NAMES)
def test_all_presets(preset: str, tmp_path: Path) -> None:
    succeed(tmp_path, "scale", SOURCE, "-o", "scaled", "--loss-scale", preset)
    assert "verified (folder)" in succeed(tmp_path, "verify", SOURCE, "scaled")


@pytest.mark.full
def test_further_checkpoints_and_other_files(tmp_path: Path) -> None:
    source = Path(shutil.copytree(SOURCE, tmp_path / "source"))
    shutil.copy(source / "checkpoint", source / "epoch1")
    (source / "notes.txt").write_text("of the user")
    gs.scale_artifacts(source, tmp_path / "scaled")
    assert faults(tmp_path / "scaled", source) == ""
    shutil.copy(source / "epoch1", tmp_path / "scaled" / "epoch1")
    assert "'epoch1': the frozen parameter 'current_loss_scale' is missing" in faults(tmp_path / "scaled", source)


def test_the_name_of_the_loss_is_taken(folder: Path) -> None:
    assert gs.verify(SOURCE, folder, loss="onnx::loss::2").ok
    with pytest.raises(GraphscaleError, match="labels"):
        gs.verify(SOURCE, folder, loss="labels")


# --- names and order are free -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", [rename_inside, reorder])
def test_names_and_order_are_free(change: Edit, folder: Path) -> None:
    for file in (TRAINING, OPTIMIZER):
        edit(folder / file, change)
    assert faults(folder) == ""


# --- damage to models -------------------------------------------------------------------------------------------------


def reading(op_type: str, at: int, name: str, index: int = 0) -> Edit:
    return lambda model: node(model, op_type, index).input.__setitem__(at, name)


def clip(model: onnx.ModelProto) -> None:
    div = node(model, "Div")
    (name,) = div.output
    div.output[0] = "before"
    at = list(model.graph.node).index(div)
    model.graph.node.insert(at + 1, helper.make_node("Tanh", ["before"], [name], "squash"))


def set_float(op_type: str, key: str, value: float) -> Edit:
    def change(model: onnx.ModelProto) -> None:
        found = [attribute for attribute in node(model, op_type).attribute if attribute.name != key]
        del node(model, op_type).attribute[:]
        node(model, op_type).attribute.extend([*found, helper.make_attribute(key, value)])

    return change


def add_function(model: onnx.ModelProto) -> None:
    """Give the file a function that nothing calls."""
    inputs = ["a", "b", "c", "d", "e", "f", "g"]
    body = [helper.make_node("Identity", ["b"], ["y"])]
    made = helper.make_function("own", "AdamWOptimizer", inputs, ["y"], body, [helper.make_opsetid("", 17)], ["alpha"])
    model.functions.append(made)


DAMAGE: dict[str, tuple[str, Edit, str]] = {
    "constant": (TRAINING, constant("graphscale/no_window", -2.0), "the constant 'graphscale/no_window' is -2.0"),
    "never-nan": (TRAINING, constant("graphscale/zero.float", 1e-40), "the constant 'graphscale/zero.float' is 9.99"),
    "seed": (TRAINING, constant("onnx::loss::2_grad", 0.5), "the constant 'onnx::loss::2_grad' is 0.5"),
    "squashed": (TRAINING, clip, f"node 'squash' (Tanh) {STRANGER}"),
    "dead": (TRAINING, lambda m: m.graph.node.add(op_type="Neg", input=["input"], output=["q"], name="q"), STRANGER),
    "another-scale": (TRAINING, reading("Div", 1, "current_loss_scale"), "is 'current_loss_scale', and should be"),
    "unchecked": (
        TRAINING,
        reading("Sum", 1, "fc1.weight_grad.accumulation.buffer.sum.probe"),
        "input 1 of 'graphscale/check-f",
    ),
    "unwritten": (TRAINING, lambda m: m.graph.node.pop(), "window_finite.written' (com.microsoft::InPl"),
    "dropped-guard": (OPTIMIZER, lambda m: node(m, "AdamWOptimizer").input.pop(), "reads 6 values, and should read 7"),
    "one-unchecked": (OPTIMIZER, reading("SequenceAt", 1, "graphscale/index.0", 2), "input 1 of"),
    "always": (OPTIMIZER, reading("Reshape", 0, "any_nonfinite"), "is 'any_nonfinite', and should be"),
    "beta": (OPTIMIZER, set_float("AdamWOptimizer", "beta", 0.5), "attribute 'beta'"),
    "decay": (OPTIMIZER, set_float("AdamWOptimizer", "weight_decay", 0.5), "attribute 'weight_decay'"),
    "function": (OPTIMIZER, add_function, f"the function own::AdamWOptimizer {STRANGER}"),
    "signal": (OPTIMIZER, lambda m: node(m, "Not").__setattr__("op_type", "Identity"), "(Identity)"),
    "exchanged-inputs": (EVAL, inputs_exchanged(-1, -2), "are in another order"),
    "exchanged-states": (TRAINING, inputs_exchanged(-1, -2), "are in another order"),
    "eval": (EVAL, lambda m: node(m, "Relu").__setattr__("op_type", "Elu"), f"(Elu) {STRANGER}"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_model_is_not_proved_and_the_damage_named(name: str, folder: Path) -> None:
    file, change, words = DAMAGE[name]
    edit(folder / file, change)
    found = faults(folder)
    assert f"translation of {file} not proved" in found and words in found, found
    assert gs.verify(SOURCE, folder).verdict.startswith("not proved")


@pytest.mark.full
def test_models_of_other_folders(scaled: Path, tmp_path: Path) -> None:
    for name in ("digits_sgd", "digits_adamw_clip"):
        other = tmp_path / name
        gs.scale_artifacts(FOLDERS / name, other, gs.DynamicLossScale(1024, 3))
        mixed = Path(shutil.copytree(scaled, tmp_path / f"{name}.mixed"))
        shutil.copy(other / OPTIMIZER, mixed / OPTIMIZER)
        assert f"translation of {OPTIMIZER} not proved" in faults(mixed)
        assert f"translation of {OPTIMIZER} not proved" in faults(other)
    shutil.copy(scaled / EVAL, mixed / OPTIMIZER)
    assert f"translation of {OPTIMIZER} not proved" in faults(mixed)


@pytest.mark.full
def test_every_constant_of_the_training_model_counts(scaled: Path, tmp_path: Path) -> None:
    for file in (TRAINING, OPTIMIZER):
        for tensor in onnx.load(scaled / file).graph.initializer:
            if 0 in tensor.dims:
                continue
            mutant = Path(shutil.copytree(scaled, tmp_path / "mutant", dirs_exist_ok=True))
            edit(mutant / file, constant(tensor.name, ~numpy_helper.to_array(tensor).astype(bool)))
            assert f"translation of {file} not proved" in faults(mutant)


@pytest.mark.full
@pytest.mark.parametrize("file", [TRAINING, EVAL, OPTIMIZER])
def test_every_operand_counts(file: str, scaled: Path, tmp_path: Path) -> None:
    mutant = Path(shutil.copytree(scaled, tmp_path / "mutant"))
    for model in other_operands(onnx.load(scaled / file)):
        onnx.save(model, mutant / file)
        assert f"translation of {file} not proved" in faults(mutant)


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_command(folder: Path) -> None:
    shown = " ".join(succeed(folder, "verify", SOURCE, ".").split())
    assert "verified (folder)" in shown and "no model was run" in shown and "runs of the scaled graph" not in shown
    assert json.loads(succeed(folder, "verify", SOURCE, ".", "--json"))["verdict"] == "verified (folder)"
    edit(folder / TRAINING, clip)
    result = graphscale("verify", SOURCE, ".", folder=folder)
    assert (result.returncode, result.stderr) == (1, "")
    assert "squash" in result.stdout and "not proved" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([".", str(SOURCE)], ["the original comes first"]),
        ([str(SOURCE), str(SOURCE)], ["carries no loss scale"]),
        ([str(SOURCE), TRAINING], ["one of the models of an artifact folder", "pass both folders"]),
        ([str(SOURCE), TRAINING, OPTIMIZER], ["is a folder", "two folders"]),
        ([str(SOURCE / TRAINING), "."], ["is a folder", "two folders"]),
        ([str(SOURCE), str(FOLDERS)], ["has no training_model.onnx"]),
        ([str(SOURCE), ".", "--numeric"], ["numeric is for a single graph"]),
        ([str(SOURCE), ".", "--seed-edge=a:0"], ["place is for a single graph"]),
        ([str(SOURCE), ".", "--tolerance=0.1"], ["tolerance is for a single graph"]),
    ],
)
def test_bad_input(arguments: list[str], words: list[str], folder: Path) -> None:
    refuse(folder, "verify", *arguments, words=words)


# --- a fused step -----------------------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.sample(1)
@pytest.mark.parametrize("target", ["onnx", "ort-training"])
@pytest.mark.parametrize("name", NAMES)
def test_a_fused_step_is_verified_against_its_folder(name: str, target: str, tmp_path: Path) -> None:
    fused = tmp_path / "fused.onnx"
    succeed(tmp_path, "fuse", FOLDERS / name, "-o", fused, "--loss-scale", "dynamic", "--target", target)
    assert succeed(tmp_path, "verify", FOLDERS / name, fused, "--runs", 1).splitlines()[-1].startswith("verified")


def test_a_damaged_fused_step_is_not_proved_and_the_damage_named(tmp_path: Path) -> None:
    fused = tmp_path / "fused.onnx"
    succeed(tmp_path, "fuse", SOURCE, "-o", fused, "--loss-scale", "dynamic")
    edit(fused, clip)
    report = gs.verify(SOURCE, fused, runs=0)
    assert not report.ok
    assert "squash" in report.checks[0].detail


def test_a_fused_step_of_another_folder_is_refused(tmp_path: Path) -> None:
    succeed(tmp_path, "fuse", FOLDERS / "digits_sgd", "-o", "fused.onnx", "--loss-scale", "dynamic")
    refuse(tmp_path, "verify", SOURCE, "fused.onnx", words=["it has no input fc1.weight.momentum0"])
