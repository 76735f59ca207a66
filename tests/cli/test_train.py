"""graphscale train as a user runs it: texts, files and refusals."""

from __future__ import annotations

import re
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import numpy as np
import onnx
import pytest

import graphscale as gs
from graphscale.training.metrics import read_metrics
from tests.cli.command import cell, graphscale, refuse, succeed
from tests.conftest import MODELS
from tests.training.runs import DIGITS_COMMAND, make_digits, make_step

RATE = ("--learning-rate", "0.05")
BASE = ("train", "step.onnx", "--data", "data.npz", "--state", "state.npz")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_digits(tmp_path)
    return tmp_path


@pytest.mark.full
def test_the_whole_command(folder: Path) -> None:
    command = (
        *DIGITS_COMMAND,
        *("--epochs", "4", "--schedule", "cosine", "--warmup", "10", "--seed", "3"),
        *("--checkpoint-dir", "kept", "--metrics", "run.csv"),
    )
    printed = succeed(folder, *command, "-o", "trained.onnx")
    records = read_metrics(folder / "run.csv")
    skipped = sum(not record.applied for record in records)
    assert len(records) == 4 * 19
    assert 4 <= skipped <= 8
    assert cell(printed, "steps").startswith("76 in ")
    assert cell(printed, "steps skipped") == str(skipped)
    assert cell(printed, "training loss") == f"{records[0].loss:.4g} -> {records[-1].loss:.4g}"
    assert cell(printed, "loss scale").startswith(f"4096 -> {records[-1].next_loss_scale:.0f}, raised ")
    assert cell(printed, "checkpoint") == "kept/step-00000076.safetensors"
    assert cell(printed, "metrics") == "run.csv"
    assert cell(printed, "trained step") == "trained.onnx"
    names = sorted(path.name for path in (folder / "kept").glob("*.safetensors"))
    assert names == [f"step-{step:08d}.safetensors" for step in (38, 57, 76)], "one an epoch, three stay"
    assert records[9].learning_rate == pytest.approx(0.05)
    assert records[-1].learning_rate < 0.005

    again = succeed(folder, *command, "--resume")
    assert cell(again, "steps") == "none left to train: the checkpoint is at step 76 of 76"
    assert repr(read_metrics(folder / "run.csv")) == repr(records)  # repr: NaN equals itself there


@pytest.mark.full
def test_the_trained_step_goes_on_from_the_weights(folder: Path) -> None:
    succeed(folder, *DIGITS_COMMAND, "--epochs", "8", "-o", "trained.onnx")
    session = gs.Session(folder / "trained.onnx")
    trained, first = session.state_dict(), np.load(folder / "state.npz")
    assert not any(np.array_equal(trained[name], first[name]) for name in first.files)
    onnx.checker.check_model(onnx.load(folder / "trained.onnx"))
    succeed(folder, "train", "trained.onnx", "--data", "data.npz", *RATE, "--metrics", "more.jsonl")
    assert read_metrics(folder / "more.jsonl")[0].loss_scale == session.loss_scale


@pytest.mark.full
def test_a_checkpoint_serves_as_first_values(folder: Path) -> None:
    succeed(folder, *DIGITS_COMMAND, "--checkpoint-dir", "kept")
    (path,) = (folder / "kept").glob("*.safetensors")
    succeed(folder, "train", "step.onnx", "--data", "data.npz", "--state", path, *RATE, "--metrics", "more.jsonl")


def test_the_table_says_how_it_went_unless_told_to_be_quiet(folder: Path) -> None:
    assert re.search(r"steps +│ 19 in \S+ s \(\d+ steps/s\)", succeed(folder, *DIGITS_COMMAND))
    assert succeed(folder, *DIGITS_COMMAND, "--quiet") == ""


@pytest.mark.full
def test_length_and_order(folder: Path) -> None:
    def losses(*arguments: str) -> list[float]:
        succeed(folder, *BASE, *RATE, "--metrics", "run.jsonl", *arguments)
        return [record.loss for record in read_metrics(folder / "run.jsonl")]

    assert len(losses()) == 10, "an epoch of batches of 32, the last one of 12"
    assert len(losses("--batch-size", "300", "--max-steps", "3")) == 3, "as many epochs as it takes"
    assert len(losses("--epochs", "2", "--max-steps", "12")) == 12
    assert len(losses("--epochs", "2", "--max-steps", "100")) == 20
    assert repr(losses("--seed", "1")) == repr(losses("--seed", "1"))
    assert losses("--seed", "1") != losses("--seed", "2")
    assert repr(losses("--no-shuffle", "--seed", "1")) == repr(losses("--no-shuffle"))


def test_a_step_with_a_fixed_batch(tmp_path: Path) -> None:
    make_step(tmp_path, "pytorch/mlp_momentum", 30)
    succeed(tmp_path, *BASE, "--epochs", "2", "--metrics", "run.csv")
    records = read_metrics(tmp_path / "run.csv")
    assert len(records) == 6, "three batches of 8 in an epoch; the 6 samples left over are left out"
    assert records[0].learning_rate is None
    words = ("--batch-size 4: the inputs of the step have a fixed batch of 8",)
    refuse(tmp_path, *BASE, "--batch-size", "4", words=words)
    succeed(tmp_path, *BASE, "--batch-size", "8")


def test_constants_and_arrays_that_are_left_out(tmp_path: Path) -> None:
    """A graph that takes its weights as inputs and returns gradients: they are the same in every step."""
    make_step(tmp_path, "pytorch/mse_tanh", 40)
    stored = dict(np.load(tmp_path / "data.npz"))
    weights = np.load(MODELS / "pytorch" / "mse_tanh.npz")
    feeds = []
    for name in ("fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"):
        np.save(tmp_path / f"{name}.npy", weights[name])
        feeds += ["--feed", f"{name}={name}.npy"]
    data = ("train", "step.onnx", "--data", "data.npz")
    np.savez(tmp_path / "data.npz", x=stored["x"], target=stored["target"], note=np.zeros(7))
    refuse(tmp_path, *data, *feeds, words=("data.npz has an array 'note'",))
    succeed(tmp_path, *data, *feeds, "--ignore-extra", "--metrics", "run.jsonl")
    assert all(record.applied for record in read_metrics(tmp_path / "run.jsonl"))


def test_stuck_stops_with_one_line(folder: Path) -> None:
    make_digits(folder, gs.DynamicLossScale(2.0, on_stuck="flag"), telemetry=True)
    np.savez(folder / "data.npz", images=np.full((64, 64), np.inf, np.float32), labels=np.zeros(64, np.int64))
    done = graphscale(*DIGITS_COMMAND, "--checkpoint-dir", "kept", folder=folder)
    assert done.returncode == 1
    assert re.fullmatch(
        r"graphscale: stopped at step 2: the loss scale is stuck at 1, since gradients stay non-finite "
        r"\((nan|inf) in the gradient \S+\); look for NaN and Inf in the data and the weights, or lower the learning "
        r"rate; the checkpoint is kept/step-00000002\.safetensors\n",
        done.stderr,
    )
    assert (folder / "kept" / "step-00000002.safetensors").is_file()


def train_on_infinite_images(folder: Path, on_stuck: str, **options: Any) -> CompletedProcess[str]:
    make_digits(folder, gs.DynamicLossScale(2.0, on_stuck=on_stuck), **options)
    np.savez(folder / "data.npz", images=np.full((64, 64), np.inf, np.float32), labels=np.zeros(64, np.int64))
    return graphscale(*DIGITS_COMMAND, "--metrics", "run.jsonl", folder=folder)


@pytest.mark.full
def test_a_policy_that_stops_names_the_gradient_or_says_how_to_get_it(folder: Path) -> None:
    told = train_on_infinite_images(folder, "stop", telemetry=True)
    *_, last = read_metrics(folder / "run.jsonl")
    assert (told.returncode, last.step, last.applied) == (1, 2, False)
    assert f"({last.cause} in the gradient {last.offender})" in told.stderr
    assert "--telemetry" not in told.stderr
    forward = train_on_infinite_images(folder, "stop", telemetry="activations")
    assert forward.returncode == 1
    assert f"in the gradient {last.offender}; the first value of the forward pass is images);" in forward.stderr
    assert [record.activation for record in read_metrics(folder / "run.jsonl")] == ["images", "images"]
    silent = train_on_infinite_images(folder, "stop")
    assert silent.returncode == 1
    assert silent.stderr.count("\n") == 1
    assert silent.stderr.endswith("; scaled with --telemetry, the step would name the gradient\n")


@pytest.mark.parametrize("on_stuck", ["hold", "reset", "accept"])
def test_a_policy_that_goes_on_does_not_stop(folder: Path, on_stuck: str) -> None:
    done = train_on_infinite_images(folder, on_stuck)
    assert done.returncode == 0, done.stderr
    records = read_metrics(folder / "run.jsonl")
    assert [record.applied for record in records] == [False, *[on_stuck == "accept"] * 3]
    assert records[-1].next_loss_scale == {"hold": 1, "reset": 2, "accept": 1}[on_stuck]


@pytest.mark.cuda
def test_on_a_gpu(folder: Path) -> None:
    make_digits(folder, target="ort-cuda", telemetry=True)
    succeed(folder, *DIGITS_COMMAND, "--provider", "CUDAExecutionProvider", "--metrics", "run.csv")
    records = read_metrics(folder / "run.csv")
    assert any(not record.applied for record in records)
    assert records[-1].loss < records[0].loss
