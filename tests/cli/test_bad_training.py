"""Refusals of graphscale train: one line each, exit code 2, and nothing is written."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.cli.command import EARLIER, refuse, succeed
from tests.cli.test_train import BASE, RATE
from tests.conftest import has_cuda
from tests.training.runs import DIGITS, DIGITS_COMMAND, make_digits, make_step

pytestmark = pytest.mark.static


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prepared")
    make_digits(folder)
    stored = dict(np.load(folder / "data.npz"))
    stored["labels"] = stored["labels"].copy()
    stored["labels"][:] = 99
    np.savez(folder / "labels.npz", **stored)
    first = dict(np.load(folder / "state.npz"))
    np.savez(folder / "more_state.npz", **first, extra=np.zeros(3))
    np.savez(folder / "batch_state.npz", **first, images=stored["images"])
    np.savez(folder / "less_state.npz", **{name: first[name] for name in first if name != "fc1.bias"})
    np.savez(folder / "odd_state.npz", **{**first, "fc1.bias": np.zeros(3, np.float32)})
    (folder / "text.onnx").write_text("no model")
    (folder / "file").touch()
    shutil.copy(DIGITS, folder / "plain.onnx")
    return folder


@pytest.fixture
def folder(prepared: Path, tmp_path: Path) -> Path:
    shutil.copytree(prepared, tmp_path, dirs_exist_ok=True)
    return tmp_path


# The arguments, in which STEP is `BASE` and RATE a learning rate, and the message.
REFUSED = {
    "no-step": ("train missing.onnx --data data.npz", "cannot read missing.onnx: No such file"),
    "no-model": ("train text.onnx --data data.npz", "text.onnx is not an ONNX model"),
    "not-scaled": (
        "train plain.onnx --data data.npz",
        "plain.onnx carries no loss scale; scale it first: graphscale scale MODEL -o OUT",
    ),
    "no-data": ("train step.onnx", "--data is missing: arrays named like the inputs"),
    "data-missing": ("STEP RATE --data missing.npz", "cannot read missing.npz: No such file or directory"),
    "labels": ("STEP RATE --data labels.npz --quiet", "step 1 of the run: the step could not run"),
    "no-state": ("train step.onnx --data data.npz RATE", "have no initializer; pass their first values as state"),
    "state-missing": ("STEP RATE --state missing.npz", "cannot read missing.npz"),
    "state-more": ("STEP RATE --state more_state.npz", "'extra' is not carried by this graph"),
    "state-batch": ("STEP RATE --state batch_state.npz", "'images' is not carried by this graph, its role is batch"),
    "state-less": ("STEP RATE --state less_state.npz", "the carried inputs fc1.bias have no initializer"),
    "state-odd": ("STEP RATE --state odd_state.npz", "the state 'fc1.bias' has shape [3]"),
    "no-rate": ("STEP", "the step takes its learning rate from the input 'learning_rate'; give --learning-rate"),
    "rate-zero": ("STEP --learning-rate 0", "--learning-rate 0.0: expected a finite number above 0"),
    "rate-word": ("STEP --learning-rate fast", "Invalid value for '--learning-rate'"),
    "rate-and-feed": ("STEP RATE --feed learning_rate=1", "--learning-rate is given, but the step has no input for it"),
    "schedule-alone": ("STEP --schedule linear", "--schedule goes with --learning-rate"),
    "warmup-alone": ("STEP --warmup 3", "--warmup goes with --learning-rate"),
    "feed-carried": ("STEP RATE --feed fc1.bias=1", "the step is fed images, labels, learning_rate, not 'fc1.bias'"),
    "feed-and-data": ("STEP RATE --feed labels=bad.npy", "cannot read bad.npy"),
    "epochs": ("STEP RATE --epochs 0", "--epochs 0: expected 1 or more"),
    "max-steps": ("STEP RATE --max-steps -1", "--max-steps -1: expected 1 or more"),
    "resume-where": ("STEP RATE --resume", "--resume goes with --checkpoint-dir"),
    "every-where": ("STEP RATE --checkpoint-every 5", "--checkpoint-every goes with --checkpoint-dir"),
    "every": ("STEP RATE --checkpoint-dir kept --checkpoint-every 0", "--checkpoint-every 0: expected 1 or more"),
    "checkpoint-dir": ("STEP RATE --checkpoint-dir file/kept", "file is a file, not a folder"),
    "metrics-folder": ("STEP RATE --metrics nowhere/run.csv", "does not exist; create it"),
    "output": ("STEP RATE -o nowhere/trained.onnx", "does not exist; create it"),
    "provider": ("STEP RATE --provider AbacusExecutionProvider", "'AbacusExecutionProvider' is not in the"),
    "option": ("STEP --lr 0.1", "--lr"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case: str, folder: Path) -> None:
    text, message = REFUSED[case]
    arguments = text.replace("STEP", " ".join(BASE)).replace("RATE", " ".join(RATE)).split()
    (folder / "old.onnx").write_bytes(EARLIER)
    files = [] if {"-o", "--metrics"} & set(arguments) else ["-o", "old.onnx"]
    refuse(folder, *arguments, *files, words=(message,))


def test_a_rate_for_a_step_that_takes_none(tmp_path: Path) -> None:
    make_step(tmp_path, "pytorch/mlp_momentum", 30)
    message = (
        "--learning-rate is given, but the step has no input for it: a floating-point scalar called "
        "learning_rate or lr; name another with --learning-rate-input"
    )
    refuse(tmp_path, *BASE, *RATE, words=(message,))


def test_checkpoints_of_another_run_are_kept(folder: Path) -> None:
    succeed(folder, *DIGITS_COMMAND, "--checkpoint-dir", "kept")
    for more, message in (
        (
            [],
            "kept holds checkpoints of a run already, the newest step-00000019.safetensors; continue it with "
            "--resume, ",
        ),
        (["--resume", "--seed", "9"], "the run would be another: --seed was 0, is 9"),
    ):
        command = (*DIGITS_COMMAND, "--checkpoint-dir", "kept", "--metrics", "run.csv", *more)
        refuse(folder, *command, words=(message,))


@pytest.mark.skipif(has_cuda(), reason="for machines where CUDA does not start")
def test_a_provider_that_does_not_start(folder: Path) -> None:
    words = ("the execution provider 'CUDAExecutionProvider'",)
    refuse(folder, *DIGITS_COMMAND, "--provider", "CUDAExecutionProvider", words=words)
