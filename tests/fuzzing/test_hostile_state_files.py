"""Hostile checkpoints and state files are refused in one line that names the file, for every change."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from fuzz.hostile.state_files import Case, Target, cuts, flips, forgeries, try_all
from graphscale.training.checkpoints import Position
from tests.cli.command import refuse
from tests.conftest import assert_all_same_bits
from tests.training.runs import checkpoints, make_digits, options, read_checkpoint, train

pytestmark = pytest.mark.static

QUICK = 40  # the quick tier tries one case in so many


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return Target(tmp_path_factory.mktemp("hostile"))


@pytest.mark.full
@pytest.mark.parametrize("every", [QUICK, pytest.param(1, marks=pytest.mark.full)])
@pytest.mark.parametrize("kind", [flips, cuts, forgeries])
def test_a_hostile_checkpoint(kind: Callable[[bytes], Iterator[Case]], every: int, target: Target) -> None:
    tried, faults = try_all(target, itertools.islice(kind(target.good), 0, None, every))
    assert not faults, faults[:20]
    assert tried > 800 / every


def test_the_attack_is_noticed_where_nothing_is_checked(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cases are hostile: without the check of the position most of them pass."""
    monkeypatch.setattr(Position, "find_fault", lambda *_: None)
    _, faults = try_all(target, (case for case in forgeries(target.good) if "applied" in case.name))
    assert len(faults) > 10


@pytest.mark.full
def test_a_run_that_resumes_from_a_hostile_checkpoint(tmp_path: Path) -> None:
    """The command itself: exit code 2 and one line, nothing written, and the checkpoint before is good."""
    make_digits(tmp_path)
    kept = tmp_path / "kept"
    train(options(tmp_path, batch_size=16, checkpoint_dir=kept, checkpoint_every=2, feeds=["learning_rate=0.05"]), 3)
    newest = checkpoints(kept)[-1]
    good, state = newest.read_bytes(), read_checkpoint(newest)
    command = ("train", "step.onnx", "--data", "data.npz", "--state", "state.npz", "--batch-size", "16")
    command += ("--feed", "learning_rate=0.05", "--checkpoint-dir", "kept", "--resume", "--max-steps", "4")
    flipped = bytearray(good)
    flipped[-1] ^= 1
    for data, words in (
        (bytes(flipped), ("its content has changed since its checksum", "the run resumes from step-00000002")),
        (good[:-1], ("truncated",)),
    ):
        newest.write_bytes(data)
        refuse(tmp_path, *command, words=(str(newest.relative_to(tmp_path)), *words))
    newest.write_bytes(good)
    newest.rename(newest.with_name("step-00000009.safetensors"))
    refuse(tmp_path, *command, words=("it is of step 3, whose checkpoint is step-00000003.safetensors",))
    newest.with_name("step-00000009.safetensors").rename(newest)
    assert_all_same_bits(read_checkpoint(newest), state)


def test_first_values_from_a_damaged_state_file(tmp_path: Path, target: Target) -> None:
    """`--state FILE` and export-weights read the arrays alone, and notice the damage all the same."""
    make_digits(tmp_path)
    for case in itertools.islice(flips(target.good), 5, None, 4001):
        (tmp_path / "state.safetensors").write_bytes(case.data)
        refuse(tmp_path, "train", "step.onnx", "--data", "data.npz", "--state", "state.safetensors")
    np.savez(tmp_path / "bad.npz", **np.load(tmp_path / "state.npz"), current_loss_scale=np.float32(np.nan))
    words = ("the loss scale 'current_loss_scale' is nan",)
    refuse(tmp_path, "train", "step.onnx", "--data=data.npz", "--state=bad.npz", "--feed=learning_rate=1", words=words)
