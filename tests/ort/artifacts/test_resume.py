"""Scaled folders in use: training continues from any checkpoint of the model; strip restores the original."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import graphscale as gs
from graphscale.errors import ModelFileError, OutputError
from graphscale.files.ort_checkpoint import OptimizerGroup, read_checkpoint, write_checkpoint
from graphscale.ort.artifacts import resume_artifacts
from graphscale.ort.artifacts.autocast_folder import autocast_artifacts
from graphscale.ort.artifacts.strip_folder import strip_artifacts
from tests.cli.command import contents
from tests.conftest import assert_all_same_bits
from tests.ort.artifacts.conftest import Scaled
from tests.ort.artifacts.training_session import FOLDERS, STATES, TrainingSession, batches, edited, train

pytestmark = pytest.mark.sample(2)

NAME = "digits_adamw"


@pytest.mark.training
@pytest.mark.parametrize("name", [NAME, "conv_adamw"])
def test_a_training_without_a_loss_scale_goes_on_with_one(name: str, scaled: Scaled, tmp_path: Path) -> None:
    folder = scaled(name)
    original = TrainingSession(FOLDERS / name)
    train(original, batches(name, 5))
    original.state.add_property("epoch", 5)
    saved = original.save(tmp_path / "saved")
    result = resume_artifacts(folder, saved)
    assert result.path == folder / "checkpoint"
    assert (result.added, result.loss_scale, result.good_steps, result.step) == (STATES, 1024.0, 0, 5)
    resumed, original = TrainingSession(folder), TrainingSession(FOLDERS / name, saved)
    assert resumed.state.get_property("epoch") == 5
    for each in (resumed, original):
        train(each, batches(name, 4))
    assert_all_same_bits(resumed.weights(), original.weights())
    assert resumed.loss_scale() == (2048, 0, 1)


@pytest.mark.training
def test_a_checkpoint_of_the_scaled_folder_is_kept_as_it_is(scaled: Scaled, tmp_path: Path) -> None:
    folder = scaled(NAME)
    session = TrainingSession(folder)
    train(session, batches(NAME, 5))
    saved = session.save(tmp_path / "saved")
    result = resume_artifacts(folder, saved)
    assert (result.added, result.loss_scale, result.good_steps, result.step) == ((), 2048.0, 1, 5)
    resumed = TrainingSession(folder)
    assert_all_same_bits(resumed.parameters(), session.parameters())
    for each in (resumed, session):
        train(each, batches(NAME, 3))
    assert resumed.loss_scale() == session.loss_scale()
    assert_all_same_bits(resumed.parameters(), session.parameters())


@pytest.mark.training
def test_without_optimizer_state_the_step_count_is_not_known(scaled: Scaled, tmp_path: Path) -> None:
    folder = scaled(NAME)
    session = TrainingSession(folder)
    train(session, batches(NAME, 2))
    assert resume_artifacts(folder, session.save(tmp_path / "saved", optimizer=False)).step is None


def test_a_folder_with_a_fixed_scale_needs_no_state(scaled: Scaled) -> None:
    folder = scaled(NAME, 64)
    result = resume_artifacts(folder, FOLDERS / NAME / "checkpoint")
    assert (result.added, result.loss_scale, result.good_steps) == ((), None, None)
    assert read_checkpoint(folder / "checkpoint").frozen == {}


def test_checkpoints_that_do_not_fit_are_refused(scaled: Scaled, tmp_path: Path) -> None:
    folder = scaled(NAME)
    before = contents(folder)
    (tmp_path / "garbage").write_bytes(b"garbage")
    smaller = read_checkpoint(FOLDERS / NAME / "checkpoint")
    del smaller.trainable["fc1.bias"]
    write_checkpoint(tmp_path / "smaller", smaller)
    for path, words in (
        (tmp_path / "garbage", "not a checkpoint"),
        (tmp_path / "missing", "No such file"),
        (tmp_path / "smaller", "'fc1.bias'"),
        (FOLDERS / "conv_adamw" / "checkpoint", "different models"),
    ):
        with pytest.raises(ModelFileError, match=words):
            resume_artifacts(folder, path)
        assert contents(folder) == before


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("current_loss_scale", np.nan, "the loss scale 'current_loss_scale' is nan; it must be finite and above 0"),
        ("current_loss_scale", 0, "is 0; it must"),
        ("good_steps", 0.5, "the count 'good_steps' is 0.5; it must be a whole number from 0"),
        ("good_steps", -1, "is -1; it must"),
    ],
)
def test_a_state_of_the_loss_scale_that_is_none(
    name: str, value: float, words: str, scaled: Scaled, tmp_path: Path
) -> None:
    folder = scaled(NAME)
    checkpoint = read_checkpoint(folder / "checkpoint")
    checkpoint.frozen[name] = np.float32(value)
    write_checkpoint(tmp_path / "forged", checkpoint)
    with pytest.raises(ModelFileError, match=words):
        resume_artifacts(folder, tmp_path / "forged")


@pytest.mark.parametrize(("step", "rate"), [(-1, 0.001), (3, np.nan), (3, np.inf)])
def test_an_optimizer_that_cannot_be(step: int, rate: float, tmp_path: Path) -> None:
    checkpoint = read_checkpoint(FOLDERS / NAME / "checkpoint")
    checkpoint.groups["group0"] = OptimizerGroup(step, rate, {})
    write_checkpoint(tmp_path / "forged", checkpoint)
    with pytest.raises(ModelFileError, match=f"forged is a damaged checkpoint.*step {step}, its learning rate {rate}"):
        read_checkpoint(tmp_path / "forged")


def test_folders_without_a_loss_scale_are_refused(tmp_path: Path) -> None:
    shutil.copytree(FOLDERS / NAME, tmp_path / "folder")
    with pytest.raises(ModelFileError, match="carries no loss scale"):
        resume_artifacts(tmp_path / "folder", FOLDERS / NAME / "checkpoint")
    with pytest.raises(ModelFileError, match="No such file"):
        resume_artifacts(tmp_path, FOLDERS / NAME / "checkpoint")


def test_frozen_parameters_are_not_forgotten(scaled: Scaled, tmp_path: Path) -> None:
    folder = scaled("conv_adamw", gs.DynamicLossScale(8))
    checkpoint = read_checkpoint(FOLDERS / "conv_adamw" / "checkpoint")
    checkpoint.frozen["norm1.running_mean"] = np.full(8, 3, np.float32)
    write_checkpoint(tmp_path / "moved", checkpoint)
    resume_artifacts(folder, tmp_path / "moved")
    found = read_checkpoint(folder / "checkpoint")
    assert_all_same_bits(found.parameters, checkpoint.parameters)
    del checkpoint.frozen["norm1.running_mean"]
    write_checkpoint(tmp_path / "without", checkpoint)
    with pytest.raises(ModelFileError, match=r"norm1\.running_mean"):
        resume_artifacts(folder, tmp_path / "without")


# --- strip: the models byte for byte, the checkpoint without the state of the loss scale ------------------------------

NAMES = sorted(path.name for path in FOLDERS.iterdir())
MODEL_FILES = ("training_model.onnx", "eval_model.onnx", "optimizer_model.onnx")


def normalized(path: Path) -> bytes:
    return ir.to_proto(ir.from_proto(onnx.load(path))).SerializeToString(deterministic=True)


def assert_same_folder(found: Path, original: Path) -> None:
    assert {path.name for path in found.iterdir()} == {path.name for path in original.iterdir()}
    for name in MODEL_FILES:
        assert normalized(found / name) == normalized(original / name), name
    mine, theirs = read_checkpoint(found / "checkpoint"), read_checkpoint(original / "checkpoint")
    assert (mine.properties, mine.groups.keys()) == (theirs.properties, theirs.groups.keys())
    for kind in ("trainable", "frozen"):
        arrays, expected = getattr(mine, kind), getattr(theirs, kind)
        assert list(arrays) == list(expected)
        assert all(arrays[key].tobytes() == expected[key].tobytes() for key in expected)


@pytest.mark.full
@pytest.mark.parametrize("target", ["ort-training", "ort-training-cuda"])
@pytest.mark.parametrize("name", NAMES)
def test_scaled_folders(name: str, target: str, scaled: Scaled, tmp_path: Path) -> None:
    for i, options in enumerate(({}, {"autocast": "float16"}, {"loss_scale": 64.0})):
        folder = scaled(name, target=target, force=True, **options)
        stripped = strip_artifacts(folder, tmp_path / f"stripped{i}")
        assert len(stripped) == 3
        assert_same_folder(tmp_path / f"stripped{i}", FOLDERS / name)


@pytest.mark.parametrize("emulate", [False, True], ids=["typed", "emulated"])
@pytest.mark.parametrize("name", NAMES)
def test_folders_in_mixed_precision(name: str, emulate: bool, tmp_path: Path) -> None:
    autocast_artifacts(FOLDERS / name, tmp_path / "mixed", emulate=emulate)
    lowered = {file for file in MODEL_FILES if onnx.load(FOLDERS / name / file).ir_version > 10}
    for file in {"eval_model.onnx", "optimizer_model.onnx", "checkpoint"} - lowered:
        assert (tmp_path / "mixed" / file).read_bytes() == (FOLDERS / name / file).read_bytes(), file
    assert set(strip_artifacts(tmp_path / "mixed", tmp_path / "stripped")) == {"training_model.onnx"} | lowered
    assert_same_folder(tmp_path / "stripped", FOLDERS / name)


def test_ir_versions_that_were_lowered(tmp_path: Path) -> None:
    raised = dict.fromkeys(("training_model", "eval_model", "optimizer_model"), lambda m: setattr(m, "ir_version", 11))
    original = edited("digits_adamw", tmp_path, **raised)
    gs.scale_artifacts(original, tmp_path / "scaled")
    autocast_artifacts(original, tmp_path / "mixed")
    for rewritten in ("scaled", "mixed"):
        assert onnx.load(tmp_path / rewritten / "eval_model.onnx").ir_version == 10
        assert len(strip_artifacts(tmp_path / rewritten, tmp_path / f"{rewritten}.stripped")) == 3
        assert_same_folder(tmp_path / f"{rewritten}.stripped", original)


def test_what_was_trained_since(scaled: Scaled, tmp_path: Path) -> None:
    """Parameters, and further checkpoints in the folder, keep what they learned, without the loss scale."""
    folder = scaled("digits_adamw")
    checkpoint = read_checkpoint(folder / "checkpoint")
    name = next(iter(checkpoint.trainable))
    checkpoint.trainable[name] = np.full_like(checkpoint.trainable[name], 7)
    assert "current_loss_scale" in checkpoint.frozen
    write_checkpoint(folder / "checkpoint", checkpoint)
    write_checkpoint(folder / "epoch1", checkpoint)
    (folder / "notes.txt").write_text("mine", encoding="utf-8")
    strip_artifacts(folder, tmp_path / "stripped")
    for file in ("checkpoint", "epoch1"):
        found = read_checkpoint(tmp_path / "stripped" / file)
        assert (found.trainable[name] == 7).all()
        assert found.frozen.keys() == read_checkpoint(FOLDERS / "digits_adamw" / "checkpoint").frozen.keys()
    assert (tmp_path / "stripped" / "notes.txt").read_text(encoding="utf-8") == "mine"


def test_refusals(scaled: Scaled, tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="nothing to strip"):
        strip_artifacts(FOLDERS / "digits_adamw", tmp_path / "stripped")
    folder = scaled("digits_adamw")
    with pytest.raises(OutputError, match="write the new folder somewhere else"):
        strip_artifacts(folder, folder)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(OutputError, match="--force"):
        strip_artifacts(folder, tmp_path / "full")
    (folder / "eval_model.onnx").write_bytes(b"no model")
    with pytest.raises(ModelFileError, match=r"eval_model\.onnx"):
        strip_artifacts(folder, tmp_path / "stripped")
    assert not (tmp_path / "stripped").exists()
