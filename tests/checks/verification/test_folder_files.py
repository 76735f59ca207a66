"""Metadata, checkpoints and other files of artifact folders for verify."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import graphscale as gs
from graphscale.files.ort_checkpoint import Checkpoint, read_checkpoint, write_checkpoint
from tests.checks.verification.damage import (
    EVAL,
    OPTIMIZER,
    SOURCE,
    TRAINING,
    Edit,
    edit,
    faults,
    in_metadata,
    node,
)
from tests.cli.command import refuse, succeed

pytestmark = [pytest.mark.static, pytest.mark.sample(2)]


# --- damage to metadata -----------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("file", [TRAINING, EVAL, OPTIMIZER])
def test_models_of_two_versions(file: str, folder: Path) -> None:
    def rewrite(model: onnx.ModelProto) -> None:
        next(entry for entry in model.metadata_props if entry.key == "graphscale.version").value = "9"

    edit(folder / file, rewrite)
    assert "graphscale.version is" in faults(folder)


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


def test_bytes_of_a_further_checkpoint(tmp_path: Path) -> None:
    source, scaled = Path(shutil.copytree(SOURCE, tmp_path / "source")), tmp_path / "scaled"
    shutil.copy(source / "checkpoint", source / "epoch1")
    gs.scale_artifacts(source, scaled)
    with (scaled / "epoch1").open("ab") as file:
        file.write(b"zzzz")
    assert "'epoch1': its bytes are not those that scaling writes" in faults(scaled, source)
    assert gs.verify(source, scaled, trained=True).ok


def test_a_checkpoint_that_holds_a_name_twice(folder: Path) -> None:
    path = folder / "checkpoint"
    data = path.read_bytes()
    assert data.count(b"fc1.bias") == 1
    path.write_bytes(data.replace(b"fc1.bias", b"fc2.bias"))
    refuse(folder, "verify", SOURCE, ".", words=["checkpoint", "it holds 'fc2.bias' twice"])


@pytest.mark.parametrize("at", ["the end of a name", "a table", "behind all"])
def test_bytes_of_a_checkpoint_that_hold_no_number(at: str, folder: Path) -> None:
    """ONNX Runtime does not load the first two."""
    path = folder / "checkpoint"
    data = bytearray(path.read_bytes())
    if at == "behind all":
        data += b"zzzz"
    else:
        data[140 if at == "a table" else data.index(b"good_steps") + len(b"good_steps")] ^= 1
    path.write_bytes(data)
    assert faults(folder).startswith("content of checkpoint fails: its bytes are not those that scaling writes")
    assert gs.verify(SOURCE, folder, trained=True).ok


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
    edit(folder / OPTIMIZER, lambda model: node(model, "AdamWOptimizer").input.pop())
    assert not gs.verify(SOURCE, folder, trained=True).ok


def test_a_policy_that_has_taken_steps(tmp_path: Path) -> None:
    policy = gs.DynamicLossScale(64, 4)
    policy.update([np.asarray(np.inf)])
    gs.scale_artifacts(SOURCE, tmp_path / "scaled", policy)
    assert "'current_loss_scale' is 32.0, and should be 64.0" in faults(tmp_path / "scaled")
    assert gs.verify(SOURCE, tmp_path / "scaled", trained=True).ok
