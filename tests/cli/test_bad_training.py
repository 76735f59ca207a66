"""What graphscale train refuses: one line each, exit code 2, and nothing is written."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.cli.command import contents, graphscale
from tests.conftest import has_cuda
from tests.training.runs import DIGITS, DIGITS_COMMAND, make_digits, make_step

pytestmark = pytest.mark.static

RATE = ("--learning-rate", "0.05")
BASE = ("train", "step.onnx", "--data", "data.npz", "--state", "state.npz")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prepared")
    make_digits(folder)
    stored = dict(np.load(folder / "data.npz"))
    np.savez(folder / "float64.npz", images=stored["images"].astype(np.float64), labels=stored["labels"])
    np.savez(folder / "narrow.npz", images=stored["images"][:, :63], labels=stored["labels"])
    np.savez(folder / "uneven.npz", images=stored["images"][:-1], labels=stored["labels"])
    np.savez(folder / "more.npz", **stored, extra=np.zeros(3))
    np.savez(folder / "less.npz", images=stored["images"])
    np.savez(folder / "none.npz", images=stored["images"][:0], labels=stored["labels"][:0])
    np.savez(folder / "rated.npz", **stored, learning_rate=np.zeros(300, np.float32))
    stored["labels"] = stored["labels"].copy()
    stored["labels"][:] = 99
    np.savez(folder / "labels.npz", **stored)
    (folder / "text.npz").write_text("x\n")
    first = dict(np.load(folder / "state.npz"))
    np.savez(folder / "more_state.npz", **first, extra=np.zeros(3))
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


REFUSED: dict[str, tuple[tuple[str, ...], str]] = {
    "no-step": (("train", "missing.onnx", "--data", "data.npz"), "cannot read missing.onnx: No such file"),
    "no-model": (("train", "text.onnx", "--data", "data.npz"), "text.onnx is not an ONNX model"),
    "not-scaled": (
        ("train", "plain.onnx", "--data", "data.npz"),
        "plain.onnx carries no loss scale; scale it first: graphscale scale MODEL -o OUT",
    ),
    "no-data": (("train", "step.onnx"), "Missing option '--data'"),
    "data-missing": ((*BASE, *RATE, "--data", "missing.npz"), "cannot read missing.npz: No such file or directory"),
    "data-text": ((*BASE, *RATE, "--data", "text.npz"), "text.npz is damaged, or not written by numpy.savez"),
    "float64": (
        (*BASE, *RATE, "--data", "float64.npz"),
        "float64.npz: 'images' is of dtype float64, and the step takes float32; convert it with .astype('float32')",
    ),
    "narrow": (
        (*BASE, *RATE, "--data", "narrow.npz"),
        "narrow.npz: 'images' has shape [300, 63], and the step takes [samples, 64]",
    ),
    "uneven": ((*BASE, *RATE, "--data", "uneven.npz"), "uneven.npz: 'images' has 299 samples, but 'labels' has 300"),
    "unknown": (
        (*BASE, *RATE, "--data", "more.npz"),
        "more.npz has an array 'extra', but the step is fed images, labels, learning_rate",
    ),
    "input-missing": (
        (*BASE, *RATE, "--data", "less.npz"),
        "the step needs 'labels' (int64['batch']), which less.npz does not have; add the array, or give a constant "
        "with --feed labels=VALUE",
    ),
    "no-samples": ((*BASE, *RATE, "--data", "none.npz"), "none.npz has no samples"),
    "scalar-in-data": (
        (*BASE, *RATE, "--data", "rated.npz"),
        "rated.npz: 'learning_rate' is an array, but the input is a scalar; give it with --feed NAME=VALUE",
    ),
    "labels": ((*BASE, *RATE, "--data", "labels.npz"), "step 1 of the run: the step could not run"),
    "no-state": (
        ("train", "step.onnx", "--data", "data.npz", *RATE),
        "have no initializer; pass their first values as state",
    ),
    "state-missing": ((*BASE, *RATE, "--state", "missing.npz"), "cannot read missing.npz"),
    "state-kind": ((*BASE, *RATE, "--state", "text.onnx"), "text.onnx: expected an .npz or a .safetensors file"),
    "state-more": ((*BASE, *RATE, "--state", "more_state.npz"), "'extra' is not carried by this graph"),
    "state-less": ((*BASE, *RATE, "--state", "less_state.npz"), "the carried inputs fc1.bias have no initializer"),
    "state-odd": ((*BASE, *RATE, "--state", "odd_state.npz"), "the state 'fc1.bias' has shape [3]"),
    "no-rate": (BASE, "the step takes its learning rate from the input 'learning_rate'; give --learning-rate"),
    "rate-zero": ((*BASE, "--learning-rate", "0"), "--learning-rate 0.0: expected a finite number above 0"),
    "rate-word": ((*BASE, "--learning-rate", "fast"), "Invalid value for '--learning-rate'"),
    "rate-input": ((*BASE, *RATE, "--learning-rate-input", "eta"), "--learning-rate-input eta: the step is fed"),
    "rate-and-feed": (
        (*BASE, *RATE, "--feed", "learning_rate=1"),
        "--learning-rate is given, but the step has no input for it",
    ),
    "schedule": ((*BASE, *RATE, "--schedule", "cosinus"), "--schedule cosinus does not exist; there are constant"),
    "schedule-alone": ((*BASE, "--schedule", "linear"), "--schedule goes with --learning-rate"),
    "warmup-alone": ((*BASE, "--warmup", "3"), "--warmup goes with --learning-rate"),
    "power": ((*BASE, *RATE, "--power", "2"), "--power goes with --schedule polynomial, not constant"),
    "decay": ((*BASE, *RATE, "--schedule", "step"), "--schedule step needs --decay-steps"),
    "feed": ((*BASE, *RATE, "--feed", "momentum"), "--feed momentum: expected NAME=VALUE"),
    "feed-name": (
        (*BASE, *RATE, "--feed", "momentum=1"),
        "the step is fed images, labels, learning_rate, not 'momentum'",
    ),
    "feed-carried": (
        (*BASE, *RATE, "--feed", "fc1.bias=1"),
        "the step is fed images, labels, learning_rate, not 'fc1.bias'",
    ),
    "feed-and-data": ((*BASE, *RATE, "--feed", "labels=bad.npy"), "cannot read bad.npy"),
    "batch": ((*BASE, *RATE, "--batch-size", "0"), "--batch-size 0: expected 1 or more"),
    "epochs": ((*BASE, *RATE, "--epochs", "0"), "--epochs 0: expected 1 or more"),
    "max-steps": ((*BASE, *RATE, "--max-steps", "-1"), "--max-steps -1: expected 1 or more"),
    "seed": ((*BASE, *RATE, "--seed", "-1"), "--seed -1: expected 0 or more"),
    "resume-where": ((*BASE, *RATE, "--resume"), "--resume goes with --checkpoint-dir"),
    "every-where": ((*BASE, *RATE, "--checkpoint-every", "5"), "--checkpoint-every goes with --checkpoint-dir"),
    "every": (
        (*BASE, *RATE, "--checkpoint-dir", "kept", "--checkpoint-every", "0"),
        "--checkpoint-every 0: expected 1 or more",
    ),
    "keep": ((*BASE, *RATE, "--checkpoint-dir", "kept", "--keep", "0"), "--keep 0: expected 1 or more"),
    "checkpoint-dir": ((*BASE, *RATE, "--checkpoint-dir", "file/kept"), "file is a file, not a folder"),
    "metrics-kind": ((*BASE, *RATE, "--metrics", "run.txt"), "expected a name that ends in .jsonl or .csv"),
    "metrics-folder": ((*BASE, *RATE, "--metrics", "nowhere/run.csv"), "does not exist; create it"),
    "output": ((*BASE, *RATE, "-o", "nowhere/trained.onnx"), "does not exist; create it"),
    "provider": ((*BASE, *RATE, "--provider", "AbacusExecutionProvider"), "'AbacusExecutionProvider' is not in the"),
    "option": ((*BASE, "--lr", "0.1"), "--lr"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case: str, folder: Path) -> None:
    arguments, message = REFUSED[case]
    (folder / "old.onnx").write_text("the old one")
    before = contents(folder)
    given = {word for word in arguments if word.startswith("-")}
    files = [] if given & {"-o", "--metrics"} else ["-o", "old.onnx"]
    done = graphscale(*arguments, *files, folder=folder)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert message in done.stderr
    assert done.stderr.startswith("graphscale: ")
    assert "Traceback" not in done.stderr
    if case != "labels":  # what is wrong there shows in the first step
        assert done.stdout == ""
    assert contents(folder) == before, "nothing was written"


def test_a_rate_for_a_step_that_takes_none(tmp_path: Path) -> None:
    make_step(tmp_path, "pytorch/mlp_momentum", 30)
    done = graphscale(*BASE, *RATE, folder=tmp_path)
    assert done.returncode == 2
    assert done.stderr == (
        "graphscale: --learning-rate is given, but the step has no input for it: a floating-point scalar called "
        "learning_rate or lr; name another with --learning-rate-input\n"
    )


def test_checkpoints_of_another_run_are_kept(folder: Path) -> None:
    first = graphscale(*DIGITS_COMMAND, "--checkpoint-dir", "kept", folder=folder)
    assert first.returncode == 0
    before = contents(folder)
    for more, message in (
        (
            [],
            "kept holds checkpoints of a run already, the newest step-00000019.safetensors; go on with it with --res",
        ),
        (["--resume", "--seed", "9"], "the run would be another: --seed was 0, is 9"),
    ):
        done = graphscale(*DIGITS_COMMAND, "--checkpoint-dir", "kept", "--metrics", "run.csv", *more, folder=folder)
        assert (done.returncode, done.stdout) == (2, "")
        assert message in done.stderr
        assert contents(folder) == before


@pytest.mark.skipif(has_cuda(), reason="for machines where CUDA does not start")
def test_a_provider_that_does_not_start(folder: Path) -> None:
    done = graphscale(*DIGITS_COMMAND, "--provider", "CUDAExecutionProvider", folder=folder)
    assert done.returncode == 2
    assert "the execution provider 'CUDAExecutionProvider'" in done.stderr
