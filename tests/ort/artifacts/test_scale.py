"""The files of scale_artifacts, and the command `graphscale scale FOLDER`."""

from __future__ import annotations

import json
import shutil
import stat
from pathlib import Path

import numpy as np
import onnx
import pytest

import graphscale as gs
from graphscale.errors import AlreadyScaledError, GraphscaleError, OutputError, TargetError, UnsupportedModelError
from graphscale.files.ort_checkpoint import read_checkpoint, write_checkpoint
from graphscale.graph.stamp_reading import read_stamp
from graphscale.ort.artifacts import ScaledArtifacts, scale_artifacts
from graphscale.ort.artifacts import scale_folder as scale_module
from tests.cli.command import cell, contents, graphscale, succeed
from tests.conftest import assert_all_same_bits
from tests.ort.artifacts.training_session import FOLDERS, STATES, TrainingSession, edited, runtime, sample, train

NAME = "digits_adamw"
SOURCE = FOLDERS / NAME
MODELS = ("training_model.onnx", "eval_model.onnx", "optimizer_model.onnx")


def test_the_new_folder_is_complete_and_the_old_one_untouched(tmp_path: Path) -> None:
    before = contents(SOURCE)
    result = scale_artifacts(SOURCE, tmp_path / "out")
    assert contents(SOURCE) == before
    written = contents(tmp_path / "out")
    assert written.keys() == before.keys()
    assert written["sample.npz"] == before["sample.npz"]
    assert isinstance(result, ScaledArtifacts) and result.path == tmp_path / "out"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert stat.S_IMODE((tmp_path / "out").stat().st_mode) & 0o700 == 0o700


def test_what_the_report_says(tmp_path: Path) -> None:
    report = scale_artifacts(SOURCE, tmp_path / "out", gs.DynamicLossScale(8, 5)).report
    assert (report.coverage, report.contractions, report.proved, report.target) == (1.0, 5, True, "ort-training")
    assert [(state.input, state.output) for state in report.state] == [(name, None) for name in STATES]
    assert {(g.value, g.dtype, g.shape) for g in report.gradients} == {
        ("fc1.weight_grad", "FLOAT", "[64,64]"),
        ("fc1.bias_grad", "FLOAT", "[64]"),
        ("fc2.weight_grad", "FLOAT", "[10,64]"),
        ("fc2.bias_grad", "FLOAT", "[10]"),
    }
    assert report.policy is not None and report.policy["config"]["increment_period"] == 5
    assert report.warnings == ()
    assert scale_artifacts(SOURCE, None).report.to_dict() == scale_artifacts(SOURCE, tmp_path / "b").to_dict()


def test_every_model_says_that_it_is_scaled(tmp_path: Path) -> None:
    report = scale_artifacts(SOURCE, tmp_path / "out").report
    for name in MODELS:
        metadata = {prop.key: prop.value for prop in onnx.load(tmp_path / "out" / name).metadata_props}
        stamp = read_stamp(metadata, name)
        assert stamp.names == {
            "loss": "onnx::loss::2",
            "loss_scale": "current_loss_scale",
            "good_steps": "good_steps",
            "window_finite": "window_finite",
        }
        assert gs.inspect(tmp_path / "out" / name).to_dict() == report.to_dict()
    with pytest.raises(AlreadyScaledError, match="scale the original"):
        scale_artifacts(tmp_path / "out", tmp_path / "again")


def test_the_eval_model_gets_inputs_and_nothing_else(tmp_path: Path) -> None:
    scale_artifacts(FOLDERS / "conv_adamw", tmp_path / "out")
    before, after = (
        onnx.load(folder / "eval_model.onnx").graph for folder in (FOLDERS / "conv_adamw", tmp_path / "out")
    )
    assert list(after.input)[: len(before.input)] == list(before.input)
    assert [value.name for value in after.input][len(before.input) :] == list(STATES)
    assert [onnx.printer.to_text(node) for node in after.node] == [onnx.printer.to_text(node) for node in before.node]
    assert list(after.output) == list(before.output)
    assert list(after.initializer) == list(before.initializer)
    training = onnx.load(tmp_path / "out" / "training_model.onnx").graph
    names = {tensor.name for tensor in training.initializer}
    assert [value.name for value in training.input][-3:] == list(STATES)
    assert names.isdisjoint(STATES)


def test_an_ir_version_that_cannot_be_loaded_is_lowered(tmp_path: Path) -> None:
    result = scale_artifacts(FOLDERS / "digits_adamw_ir14", tmp_path / "out")
    (warning,) = result.report.warnings
    assert "optimizer_model.onnx has IR version 14" in warning and "IR version 10" in warning
    assert onnx.load(tmp_path / "out" / "optimizer_model.onnx").ir_version == 10
    assert onnx.load(tmp_path / "out" / "training_model.onnx").ir_version == 8
    assert onnx.load(FOLDERS / "digits_adamw_ir14" / "optimizer_model.onnx").ir_version == 14


@pytest.mark.training
def test_the_repaired_folder_trains(tmp_path: Path) -> None:
    scale_artifacts(FOLDERS / "digits_adamw_ir14", tmp_path / "out")
    session, original = TrainingSession(tmp_path / "out"), TrainingSession(SOURCE)
    for each in (session, original):
        train(each, [sample(NAME)] * 3)
    assert_all_same_bits(session.weights(), original.weights())


def test_checkpoints_in_the_folder_get_the_state_and_keep_the_rest(tmp_path: Path) -> None:
    folder = edited(NAME, tmp_path)
    later = read_checkpoint(SOURCE / "checkpoint")
    later.properties["epoch"] = 7
    write_checkpoint(folder / "epoch7", later)
    other = read_checkpoint(FOLDERS / "conv_adamw" / "checkpoint")
    write_checkpoint(folder / "of_another_model", other)
    (folder / "notes.txt").write_text("learning rate 0.001")
    (folder / "logs").mkdir()
    scale_artifacts(folder, tmp_path / "out")
    found = read_checkpoint(tmp_path / "out" / "epoch7")
    assert found.properties == {"epoch": 7} and list(found.frozen) == list(STATES)
    assert (tmp_path / "out" / "of_another_model").read_bytes() == (folder / "of_another_model").read_bytes()
    assert (tmp_path / "out" / "notes.txt").read_text() == "learning rate 0.001"


@pytest.mark.training
def test_nominal_checkpoints_are_left_out(tmp_path: Path) -> None:
    folder = edited(NAME, tmp_path)
    parameters = read_checkpoint(SOURCE / "checkpoint").trainable
    tensors = [onnx.numpy_helper.from_array(a, name).SerializeToString() for name, a in parameters.items()]
    runtime.save_checkpoint(tensors, [], str(folder / "nominal_checkpoint"), True)
    assert read_checkpoint(folder / "nominal_checkpoint").nominal
    report = scale_artifacts(folder, tmp_path / "out").report
    assert [warning.split()[0] for warning in report.warnings] == ["nominal_checkpoint"]
    assert not (tmp_path / "out" / "nominal_checkpoint").exists()
    # A fixed scale has no state, so that the file fits unchanged.
    assert scale_artifacts(folder, tmp_path / "fixed", 8).report.warnings == ()
    assert contents(tmp_path / "fixed")["nominal_checkpoint"] == contents(folder)["nominal_checkpoint"]
    shutil.copy(folder / "nominal_checkpoint", folder / "checkpoint")
    with pytest.raises(UnsupportedModelError, match="nominal"):
        scale_artifacts(folder, tmp_path / "again")


def test_the_policys_present_state_is_the_initial_state(tmp_path: Path) -> None:
    policy = gs.DynamicLossScale(64, 4)
    for gradient in (1.0, 1.0, np.inf, 1.0):
        policy.update([np.asarray(gradient)])
    scale_artifacts(SOURCE, tmp_path / "out", policy)
    frozen = read_checkpoint(tmp_path / "out" / "checkpoint").frozen
    assert [float(frozen[name]) for name in STATES] == [32, 1, -1]


@pytest.mark.training
def test_external_weights_go_along(tmp_path: Path) -> None:
    folder = edited(NAME, tmp_path)
    for name in ("training_model.onnx", "eval_model.onnx"):
        model = onnx.load(folder / name)
        tensor = onnx.numpy_helper.from_array(np.ones((64, 64), np.float32), "big")
        model.graph.initializer.append(tensor)
        model.graph.node[0].input[0] = "input.kept"
        node = onnx.helper.make_node("MatMul", ["input", "eye"], ["input.kept"], name="keep")
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.eye(64, dtype=np.float32), "eye"))
        model.graph.node.insert(0, node)
        location = f"{name}.weights"
        onnx.save(model, folder / name, save_as_external_data=True, location=location, size_threshold=1000)
    scale_artifacts(folder, tmp_path / "out")
    assert not (tmp_path / "out" / "training_model.onnx.weights").exists()
    assert (tmp_path / "out" / "training_model.onnx.data").stat().st_size >= 64 * 64 * 4
    shutil.move(folder, tmp_path / "gone")
    session = TrainingSession(tmp_path / "out")
    assert np.isfinite(session.train(sample(NAME))[0])
    assert np.isfinite(session.evaluate(sample(NAME))[0])


@pytest.mark.parametrize("target", ["onnx", "ort-cuda", "tpu"])
def test_targets_without_training_sessions_are_refused(target: str, tmp_path: Path) -> None:
    with pytest.raises(TargetError):
        scale_artifacts(SOURCE, tmp_path / "out", target=target)
    assert contents(tmp_path) == {}


def test_the_cuda_target_uses_its_kernel(tmp_path: Path) -> None:
    scale_artifacts(FOLDERS / "digits_adamw_clip", tmp_path / "out", target="ort-training-cuda")
    for name in ("training_model.onnx", "optimizer_model.onnx"):
        kinds = [node.op_type for node in onnx.load(tmp_path / "out" / name).graph.node]
        assert kinds.count("IsAllFinite") == 1 and "IsNaN" not in kinds


def test_force_replaces_everything_in_the_folder(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    scale_artifacts(SOURCE, tmp_path / "out")  # an empty folder is filled
    shutil.rmtree(tmp_path / "out")
    (tmp_path / "out" / "deep").mkdir(parents=True)
    (tmp_path / "out" / "deep" / "old").write_text("old")
    with pytest.raises(OutputError, match=r"not empty.*--force"):
        scale_artifacts(SOURCE, tmp_path / "out")
    assert contents(tmp_path) == {"out/deep/old": b"old"}
    scale_artifacts(SOURCE, tmp_path / "out", force=True)
    assert contents(tmp_path / "out").keys() == contents(SOURCE).keys()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_folders_are_replaced_also_where_they_cannot_be_swapped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_library(*args: object, **kwargs: object) -> None:
        raise OSError("no such library")

    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "old").write_text("old")
    monkeypatch.setattr("ctypes.CDLL", no_library)
    scale_artifacts(SOURCE, tmp_path / "out", force=True)
    assert contents(tmp_path / "out").keys() == contents(SOURCE).keys()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("force", [False, True])
def test_the_source_is_never_overwritten(force: bool, tmp_path: Path) -> None:
    folder = edited(NAME, tmp_path / "a")
    (tmp_path / "link").symlink_to(folder)
    before = contents(tmp_path)
    for out in (folder, tmp_path / "a", folder / ".." / NAME, tmp_path / "link"):
        with pytest.raises(OutputError, match="holds the folder"):
            scale_artifacts(folder, out, force=force)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("kind", [KeyboardInterrupt, OSError, MemoryError])
@pytest.mark.parametrize("existing", [False, True])
def test_an_interrupted_run_leaves_nothing(
    kind: type[BaseException], existing: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint is written last: all models are there by then."""

    def interrupted(path: Path, *_: object) -> None:
        assert {file.name for file in Path(path).parent.iterdir()} >= set(MODELS)
        raise kind("interrupted")

    if existing:
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "old").write_text("old")
    before = contents(tmp_path)
    monkeypatch.setattr(scale_module, "write_checkpoint", interrupted)
    with pytest.raises(OutputError if kind is OSError else kind):
        scale_artifacts(SOURCE, tmp_path / "out", force=True)
    assert contents(tmp_path) == before
    assert [path.name for path in tmp_path.iterdir()] == (["out"] if existing else [])


def test_no_loss_scale_is_refused(tmp_path: Path) -> None:
    for wrong in (None, 0.5, "static", float("nan")):
        with pytest.raises(GraphscaleError):
            scale_artifacts(SOURCE, tmp_path / "out", wrong)
    assert contents(tmp_path) == {}


# --- the command ------------------------------------------------------------------------------------------------------

CLIPPED = FOLDERS / "digits_adamw_clip"


def test_the_table_and_the_folder(tmp_path: Path) -> None:
    printed = succeed(tmp_path, "scale", CLIPPED, "-o", "out", "-v")
    assert printed.startswith(f"{CLIPPED} scaled -> out\n")
    assert cell(printed, "coverage") == "100 % (5 of 5 backward contractions)"
    assert cell(printed, "target") == "ort-training"
    assert cell(printed, "gradients (4)") == "fc2.bias_grad FLOAT[10]"
    assert cell(printed, "carried state (3)") == "current_loss_scale -> (in place)"
    assert cell(printed, "optimizer model: guard-optimizer") == "1 If, 1 Reshape"
    assert cell(printed, "loss scale") == "DynamicLossScale"
    assert "initial_loss_scale=32768.0, increment_period=2000" in printed
    scale_artifacts(CLIPPED, tmp_path / "python")
    assert contents(tmp_path / "out") == contents(tmp_path / "python")


def test_options_reach_the_folder(tmp_path: Path) -> None:
    options = ["--initial-loss-scale=16", "--increment-period=3", "--multiplier=4", "--loss=onnx::loss::2"]
    report = json.loads(succeed(tmp_path, "scale", CLIPPED, "-o", "out", "--json", *options))
    assert (report["loss"], report["loss_found"]) == ("onnx::loss::2", "named")
    assert report["policy"] == json.loads(gs.DynamicLossScale(16, 3, 4).to_json())
    assert float(read_checkpoint(tmp_path / "out" / "checkpoint").frozen["current_loss_scale"]) == 16


def test_a_dry_run_writes_nothing(tmp_path: Path) -> None:
    for arguments in (["-o", "out"], []):
        printed = succeed(tmp_path, "scale", CLIPPED, "--dry-run", "--json", *arguments)
        assert [state["input"] for state in json.loads(printed)["state"]] == list(STATES)
        assert contents(tmp_path) == {}


def test_a_repair_is_a_warning(tmp_path: Path) -> None:
    result = graphscale("scale", FOLDERS / "digits_adamw_ir14", "-o", "out", folder=tmp_path)
    assert result.returncode == 0
    assert " ".join(result.stderr.split()).startswith("warning: optimizer_model.onnx has IR version 14")
