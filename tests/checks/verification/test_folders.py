"""Artifact folders for verify: no alarm on what scaling writes, and each damage is named."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import graphscale as gs
from graphscale.errors import GraphscaleError
from graphscale.files.ort_checkpoint import Checkpoint, read_checkpoint, write_checkpoint
from graphscale.ort.artifacts.autocast_folder import autocast_artifacts
from tests.cli.command import graphscale, refuse, succeed
from tests.conftest import MODELS

pytestmark = pytest.mark.static

FOLDERS = MODELS / "ort" / "artifacts"
NAMES = sorted(path.name for path in FOLDERS.iterdir())
SOURCE = FOLDERS / "digits_adamw"
TRAINING, EVAL, OPTIMIZER = "training_model.onnx", "eval_model.onnx", "optimizer_model.onnx"

Edit = Callable[[onnx.ModelProto], object]


@pytest.fixture(scope="module")
def scaled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("folders")
    gs.scale_artifacts(SOURCE, made / "scaled", gs.DynamicLossScale(1024, 3))
    return made / "scaled"


@pytest.fixture
def folder(scaled: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(scaled, tmp_path / "scaled"))


def edit(path: Path, change: Edit) -> None:
    model = onnx.load(path)
    change(model)
    onnx.save(model, path)


def faults(folder: Path, source: Path = SOURCE) -> str:
    """Return the checks that do not hold, in words; empty if the folder is verified."""
    report = gs.verify(source, folder)
    found = [check for check in report.checks if check.status != "holds"]
    assert report.ok == (not found) and (report.verdict == "verified (folder)") == (not found)
    assert report.runs == 0 and "no model was run" in report.notes[0]
    return "; ".join(f"{check.name} {check.status}: {check.detail}" for check in found)


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


@pytest.mark.sample(9)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", NAMES)
def test_what_scaling_writes_is_verified(name: str, options: str, tmp_path: Path) -> None:
    gs.scale_artifacts(FOLDERS / name, tmp_path / "scaled", **OPTIONS[options])
    assert faults(tmp_path / "scaled", FOLDERS / name) == ""


@pytest.mark.sample(2)
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


def rename_inside(model: onnx.ModelProto) -> None:
    graph = model.graph
    kept = {value.name for value in (*graph.input, *graph.output, *graph.initializer)}
    renamed = {name: f"v{i}" for i, name in enumerate(n for node in graph.node for n in node.output if n not in kept)}
    for i, node in enumerate(graph.node):
        node.name = f"n{i}"
        for names in (node.input, node.output):
            found = [renamed.get(name, name) for name in names]
            del names[:]
            names.extend(found)
    del graph.value_info[:]


def reorder(model: onnx.ModelProto) -> None:
    """Put every node as late as its readers allow."""
    nodes, placed = list(model.graph.node), list[onnx.NodeProto]()
    while nodes:
        read = {name for node in nodes for name in node.input}
        free = next(node for node in nodes if not read.intersection(filter(None, node.output)))
        nodes.remove(free)
        placed.insert(0, free)
    assert [node.name for node in placed] != [node.name for node in model.graph.node]
    del model.graph.node[:]
    model.graph.node.extend(placed)


@pytest.mark.parametrize("change", [rename_inside, reorder])
def test_names_and_order_are_free(change: Edit, folder: Path) -> None:
    for file in (TRAINING, OPTIMIZER):
        edit(folder / file, change)
    assert faults(folder) == ""


# --- damage to models -------------------------------------------------------------------------------------------------


def node(model: onnx.ModelProto, op_type: str, index: int = 0) -> onnx.NodeProto:
    return [node for node in model.graph.node if node.op_type == op_type][index]


def reading(op_type: str, at: int, name: str, index: int = 0) -> Edit:
    return lambda model: node(model, op_type, index).input.__setitem__(at, name)


def constant(name: str, value: Any) -> Edit:
    def change(model: onnx.ModelProto) -> None:
        tensor = next(tensor for tensor in model.graph.initializer if tensor.name == name)
        held = numpy_helper.to_array(tensor)
        tensor.CopyFrom(numpy_helper.from_array(np.full(held.shape, value, held.dtype), name))

    return change


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


def shadow(model: onnx.ModelProto) -> None:
    """Give the file a function of the optimizer's name."""
    inputs = ["a", "b", "c", "d", "e", "f", "g"]
    body = [helper.make_node("Identity", ["b"], ["y"])]
    made = helper.make_function(
        "com.microsoft", "AdamWOptimizer", inputs, ["y"], body, [helper.make_opsetid("", 17)], ["alpha"]
    )
    model.functions.append(made)


def inputs_exchanged(one: int, other: int) -> Edit:
    def change(model: onnx.ModelProto) -> None:
        held = list(model.graph.input)
        held[one], held[other] = held[other], held[one]
        del model.graph.input[:]
        model.graph.input.extend(held)

    return change


STRANGER = "is neither the original's nor an inserted piece"
DAMAGE: dict[str, tuple[str, Edit, str]] = {
    "constant": (TRAINING, constant("graphscale/no_window", -2.0), "the constant 'graphscale/no_window' is -2.0"),
    "never-nan": (TRAINING, constant("graphscale/zero.float", 1e-40), f".zeroed' (Mul) {STRANGER}"),
    "seed": (TRAINING, constant("onnx::loss::2_grad", 0.5), "the constant 'onnx::loss::2_grad' is 0.5"),
    "squashed": (TRAINING, clip, f"node 'squash' (Tanh) {STRANGER}"),
    "dead": (TRAINING, lambda m: m.graph.node.add(op_type="Neg", input=["input"], output=["q"], name="q"), STRANGER),
    "another-scale": (TRAINING, reading("Div", 1, "current_loss_scale"), "is 'current_loss_scale', and should be"),
    "unchecked": (TRAINING, reading("Sum", 1, "fc1.weight_grad.accumulation.buffer.sum.probe"), f"(Sum) {STRANGER}"),
    "unwritten": (TRAINING, lambda m: m.graph.node.pop(), "window_finite.written' (com.microsoft::InPl"),
    "dropped-guard": (OPTIMIZER, lambda m: node(m, "AdamWOptimizer").input.pop(), "reads 6 values, and should read 7"),
    "one-unchecked": (OPTIMIZER, reading("SequenceAt", 1, "graphscale/index.0", 2), "input 1 of"),
    "always": (OPTIMIZER, reading("Reshape", 0, "any_nonfinite"), "is 'any_nonfinite', and should be"),
    "beta": (OPTIMIZER, set_float("AdamWOptimizer", "beta", 0.5), "attribute 'beta'"),
    "decay": (OPTIMIZER, set_float("AdamWOptimizer", "weight_decay", 0.5), "attribute 'weight_decay'"),
    "shadow": (OPTIMIZER, shadow, f"the function com.microsoft::AdamWOptimizer {STRANGER}"),
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
    """Each operand of each node in turn is replaced by another value, of a node before it or of an input."""
    model, made = onnx.load(scaled / file), 0
    mutant = Path(shutil.copytree(scaled, tmp_path / "mutant"))
    random = np.random.default_rng(0)
    for i, reader in enumerate(model.graph.node):
        before = [value.name for value in model.graph.input]
        before += [name for other in list(model.graph.node)[:i] for name in other.output if name]
        for at, name in enumerate(reader.input):
            changed = onnx.ModelProto()
            changed.CopyFrom(model)
            changed.graph.node[i].input[at] = str(random.choice([other for other in before if other != name]))
            onnx.save(changed, mutant / file)
            assert f"translation of {file} not proved" in faults(mutant)
            made += 1
    assert made > 5


# --- damage to metadata -----------------------------------------------------------------------------------------------


def in_metadata(key: str, change: Callable[[Any], object]) -> Edit:
    def apply(model: onnx.ModelProto) -> None:
        entry = next(entry for entry in model.metadata_props if entry.key == f"graphscale.{key}")
        held = json.loads(entry.value)
        change(held)
        entry.value = json.dumps(held)

    return apply


def drop_record(model: onnx.ModelProto) -> None:
    kept = [entry for entry in model.metadata_props if entry.key != "graphscale.original"]
    del model.metadata_props[:]
    model.metadata_props.extend(kept)


METADATA: dict[str, tuple[Edit, str]] = {
    "policy": (in_metadata("policy", lambda p: p["config"].update(increment_period=4)), "'increment_period'"),
    "names": (in_metadata("names", lambda n: n.update(good_steps="window_finite")), "the good steps"),
    "coverage": (in_metadata("report", lambda r: r.update(coverage=0.5)), "'coverage' is 0.5"),
    "state": (in_metadata("state", lambda s: s.update(a="b")), "graphscale.state has 'a'"),
    "telemetry": (lambda m: m.metadata_props.add(key="graphscale.telemetry", value='{"gradients": ["a"]}'), "telemetr"),
    "record": (drop_record, "the record of the original is missing"),
    "stranger": (lambda m: m.metadata_props.add(key="graphscale.more", value="1"), "'graphscale.more'"),
}


@pytest.mark.parametrize("file", [TRAINING, EVAL, OPTIMIZER])
@pytest.mark.parametrize("name", METADATA)
def test_edited_metadata_fail(name: str, file: str, folder: Path) -> None:
    change, words = METADATA[name]
    edit(folder / file, change)
    found = faults(folder)
    assert f"metadata of {file} fails" in found or f"translation of {TRAINING} not proved" in found, found
    assert words in found or (file, name) == (TRAINING, "policy"), found


@pytest.mark.parametrize(
    "config",
    [{"increment_period": 4}, {"initial_loss_scale": 2048.0}, {"multiplier": 4.0}, {"on_stuck": "reset"}],
    ids=str,
)
def test_a_policy_forged_in_all_models(config: dict[str, Any], folder: Path) -> None:
    for file in (TRAINING, EVAL, OPTIMIZER):
        edit(folder / file, in_metadata("policy", lambda policy: policy["config"].update(config)))
        edit(folder / file, in_metadata("report", lambda report: report["policy"]["config"].update(config)))
    assert faults(folder) != ""


# --- damage to checkpoints and files ----------------------------------------------------------------------------------


def with_parameter(kind: str, name: str, value: Any) -> Callable[[Checkpoint], Checkpoint]:
    def change(checkpoint: Checkpoint) -> Checkpoint:
        held = dict(getattr(checkpoint, kind))
        array = np.array(held[name]) if name in held else np.zeros((), np.float32)
        array.reshape(-1)[-1] = value
        return dataclasses.replace(checkpoint, **{kind: {**held, name: array}})

    return change


def frozen(checkpoint: Checkpoint) -> Checkpoint:
    trainable = dict(checkpoint.trainable)
    weight = trainable.pop("fc1.bias")
    return dataclasses.replace(checkpoint, trainable=trainable, frozen={**checkpoint.frozen, "fc1.bias": weight})


CHECKPOINTS: dict[str, tuple[Callable[[Checkpoint], Checkpoint], str]] = {
    "weight": (with_parameter("trainable", "fc2.bias", 9.5), "the trainable parameter 'fc2.bias' is 9.5 at [9]"),
    "scale": (with_parameter("frozen", "current_loss_scale", 512), "'current_loss_scale' is 512.0, and should be 1024"),
    "nan": (with_parameter("frozen", "current_loss_scale", np.nan), "'current_loss_scale' is nan"),
    "count": (with_parameter("frozen", "good_steps", -100000), "'good_steps' is -100000"),
    "window": (with_parameter("frozen", "window_finite", 1), "'window_finite' is 1.0, and should be -1.0"),
    "zero": (with_parameter("frozen", "good_steps", -0.0), "'good_steps' is -0.0, and should be 0.0"),
    "more": (with_parameter("frozen", "more", 1), "'more' is neither the original's nor the loss scale's"),
    "less": (lambda c: dataclasses.replace(c, frozen={}), "'current_loss_scale' is missing"),
    "frozen": (frozen, "the trainable parameter 'fc1.bias' is missing"),
    "property": (lambda c: dataclasses.replace(c, properties={"epoch": 3}), "the property 'epoch' is neither"),
    "version": (lambda c: dataclasses.replace(c, version=1), "the version is 1, and should be"),
}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_damaged_checkpoint_fails(name: str, folder: Path) -> None:
    change, words = CHECKPOINTS[name]
    write_checkpoint(folder / "checkpoint", change(read_checkpoint(folder / "checkpoint")))
    found = faults(folder)
    assert found.startswith("content of checkpoint fails") and words in found, found


def test_the_checkpoint_of_another_folder(folder: Path, tmp_path: Path) -> None:
    source = Path(shutil.copytree(SOURCE, tmp_path / "source"))
    change = with_parameter("trainable", "fc1.weight", 1.0)
    write_checkpoint(source / "checkpoint", change(read_checkpoint(source / "checkpoint")))
    gs.scale_artifacts(source, tmp_path / "other", gs.DynamicLossScale(1024, 3))
    assert faults(tmp_path / "other", source) == ""
    shutil.copy(tmp_path / "other" / "checkpoint", folder / "checkpoint")
    assert "the trainable parameter 'fc1.weight' is 1.0" in faults(folder)


def test_a_checkpoint_that_holds_a_name_twice(folder: Path) -> None:
    path = folder / "checkpoint"
    data = path.read_bytes()
    assert data.count(b"fc1.bias") == 1
    path.write_bytes(data.replace(b"fc1.bias", b"fc2.bias"))
    refuse(folder, "verify", SOURCE, ".", words=["checkpoint", "it holds 'fc2.bias' twice"])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda f: (f / "sample.npz").write_bytes(b"0"), "'sample.npz' has other content than it should"),
        (lambda f: (f / "sample.npz").unlink(), "'sample.npz' is missing"),
        (lambda f: (f / "more").write_bytes(b""), "'more' is neither the original's nor one that scaling writes"),
        (lambda f: (f / "sub").mkdir(), "'sub' is no file of the original folder"),
    ],
)
def test_other_files(change: Callable[[Path], object], words: str, folder: Path) -> None:
    change(folder)
    assert faults(folder) == f"other files fails: the file {words}".replace("the file 'sub'", "'sub'")


TRAINED: dict[str, tuple[Callable[[Checkpoint], Checkpoint], str]] = {
    "nan": (CHECKPOINTS["nan"][0], "current_loss_scale"),
    "count": (CHECKPOINTS["count"][0], "good_steps"),
    "count-beyond": (with_parameter("frozen", "good_steps", 3), "the good steps is 3, out of the range"),
    "scale": (with_parameter("frozen", "current_loss_scale", 0.5), "the loss scale is 0.5, out of the range"),
    "window": (with_parameter("frozen", "window_finite", 0.5), "'window_finite' is 0.5, and should be one of -1, 0, 1"),
    "more": (CHECKPOINTS["more"][0], CHECKPOINTS["more"][1]),
    "less": (CHECKPOINTS["less"][0], CHECKPOINTS["less"][1]),
    "frozen": (CHECKPOINTS["frozen"][0], CHECKPOINTS["frozen"][1]),
    "type": (
        lambda c: dataclasses.replace(c, frozen={k: v.astype(np.float64) for k, v in c.frozen.items()}),
        "is DOUBLE[], and should be FLOAT[]",
    ),
}


@pytest.mark.parametrize("name", TRAINED)
def test_what_no_training_leaves_behind(name: str, folder: Path) -> None:
    change, words = TRAINED[name]
    write_checkpoint(folder / "checkpoint", change(read_checkpoint(folder / "checkpoint")))
    (check,) = gs.verify(SOURCE, folder, trained=True).failures
    assert words in check.detail


@pytest.mark.parametrize("name", ["weight", "window", "zero", "property"])
def test_what_training_leaves_behind(name: str, folder: Path) -> None:
    change = CHECKPOINTS[name][0]
    write_checkpoint(folder / "checkpoint", change(read_checkpoint(folder / "checkpoint")))
    assert "verified (folder)" in succeed(folder, "verify", SOURCE, ".", "--trained")
    edit(folder / OPTIMIZER, DAMAGE["dropped-guard"][1])
    assert not gs.verify(SOURCE, folder, trained=True).ok


def test_a_policy_that_has_taken_steps(tmp_path: Path) -> None:
    policy = gs.DynamicLossScale(64, 4)
    policy.update([np.asarray(np.inf)])
    gs.scale_artifacts(SOURCE, tmp_path / "scaled", policy)
    assert "'current_loss_scale' is 32.0, and should be 64.0" in faults(tmp_path / "scaled")
    assert gs.verify(SOURCE, tmp_path / "scaled", trained=True).ok


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
        ([str(SOURCE), TRAINING], ["is a folder", "two folders"]),
        ([str(SOURCE / TRAINING), "."], ["is a folder", "two folders"]),
        ([str(SOURCE), str(FOLDERS)], ["has no training_model.onnx"]),
        ([str(SOURCE), ".", "--numeric"], ["numeric is for a single graph"]),
        ([str(SOURCE), ".", "--place=a:0"], ["place is for a single graph"]),
        ([str(SOURCE), ".", "--tolerance=0.1"], ["tolerance is for a single graph"]),
    ],
)
def test_bad_input(arguments: list[str], words: list[str], folder: Path) -> None:
    refuse(folder, "verify", *arguments, words=words)
