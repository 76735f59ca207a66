"""Runs of `graphscale train` on real steps, for the tests: their inputs and their files."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open

import graphscale as gs
from graphscale.training.record import StepRecord
from graphscale.training.run import Options, Run
from tests.cli.command import succeed
from tests.conftest import MODELS, ROOT, Arrays, assert_all_same_bits, load_example

DIGITS = ROOT / "graphscale" / "demo" / "digits_step.onnx"
OVERFLOWS = (100, 250)  # the samples with an infinite pixel: two skipped steps in an epoch
SAMPLES = 300


def make_digits(folder: Path, policy: Any = None, **options: Any) -> None:
    """Write the scaled digits step, 300 digits, two with an overflow, and its first weights, into a folder."""
    policy = policy or gs.DynamicLossScale(2.0**12, increment_period=5)
    gs.scale(DIGITS, policy, **options).save(folder / "step.onnx")
    rng = np.random.default_rng(5)
    images = rng.random((SAMPLES, 64), dtype=np.float32)
    images[list(OVERFLOWS), 3] = np.inf
    np.savez(folder / "data.npz", images=images, labels=rng.integers(0, 10, SAMPLES))
    stored = np.load(MODELS / "pytorch" / "digits_step.npz")
    carried = gs.inspect(DIGITS).state
    np.savez(folder / "state.npz", **{pair.input: stored[pair.input] for pair in carried})


DIGITS_OPTIONS = ("--state", "state.npz", "--learning-rate", "0.05", "--batch-size", "16")
DIGITS_COMMAND = ("train", "step.onnx", "--data", "data.npz", *DIGITS_OPTIONS)
FILES = ("--metrics", "run.jsonl", "-o", "trained.onnx", "--quiet")  # the files of a long run, without a word


def make_step(folder: Path, name: str, samples: int, **options: Any) -> None:
    """Write a scaled step of models/ with random samples and its first weights into a folder."""
    example = load_example(name)
    report = gs.inspect(example.path)
    carried = {pair.input for pair in report.state}
    result = gs.scale(example.path, gs.DynamicLossScale(2.0**12, increment_period=5), **options)
    result.save(folder / "step.onnx")
    rng = np.random.default_rng(9)
    fed = {key: value for key, value in example.feeds.items() if key not in carried}
    np.savez(folder / "data.npz", **{key: _samples(rng, value, samples) for key, value in fed.items()})
    np.savez(folder / "state.npz", **{key: example.feeds[key] for key in carried})


def _samples(rng: np.random.Generator, like: np.ndarray, count: int) -> np.ndarray:
    shape = (count, *like.shape[1:])
    if like.dtype.kind in "iu":
        return rng.integers(0, int(like.max()) + 1, shape).astype(like.dtype)
    return rng.standard_normal(shape).astype(like.dtype)


def options(folder: Path, **more: Any) -> Options:
    """A run on what `make_digits` or `make_step` wrote."""
    return Options(**{"step": folder / "step.onnx", "data": folder / "data.npz", "state": folder / "state.npz", **more})


def train(chosen: Options, stop_after: int | None = None) -> tuple[list[StepRecord], Arrays]:
    """Train in this process; return the records and all carried state at the end."""
    run = Run(chosen)
    records: list[StepRecord] = []
    with run.session, run.opened() as trainer:
        for record in trainer.run(run.total, lambda: trainer.steps == stop_after):
            records.append(record)
        return records, run.session.state_dict()


def start(folder: Path, *arguments: Any, **more: Any) -> subprocess.Popen[str]:
    """Start the real command in a folder."""
    return subprocess.Popen(
        [sys.executable, "-m", "graphscale", *map(str, arguments)],
        cwd=folder,
        env={**os.environ, "COLUMNS": "200", "NO_COLOR": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **more,
    )


def wait_for(process: subprocess.Popen[str], holds: Callable[[], bool]) -> None:
    """Wait until something holds; fail if the process ends first."""
    deadline = time.monotonic() + 60
    while not holds():
        if process.poll() is not None:
            raise AssertionError(f"it ended with {process.returncode}: {process.communicate()}")
        assert time.monotonic() < deadline
        time.sleep(0.0005)


def size_of(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def checkpoints(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def read_checkpoint(path: Path) -> Arrays:
    """Every array of a checkpoint, through the library alone."""
    with safe_open(path, framework="np") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def run_to_end(folder: Path, *arguments: str) -> None:
    """Run the command of a long run, in this process."""
    assert succeed(folder, *arguments, *FILES) == ""


def assert_same_run(folder: Path, whole: Path) -> None:
    """Both runs, which end in `kept`, have the same metrics, trained step and last checkpoint."""
    for name in ("run.jsonl", "trained.onnx"):
        assert (folder / name).read_bytes() == (whole / name).read_bytes(), name
    ours, theirs = (checkpoints(each / "kept")[-1] for each in (folder, whole))
    assert ours.name == theirs.name
    assert_all_same_bits(read_checkpoint(ours), read_checkpoint(theirs))
