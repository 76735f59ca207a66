"""A run that was interrupted."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from graphscale.training.run import Options
from graphscale.training.schedules import LearningRate
from tests.training.runs import make_digits, options, train


@pytest.fixture
def begun(tmp_path: Path) -> Options:
    """A run of digits that stopped at step 5 of 19, with what resumes it."""
    make_digits(tmp_path)
    chosen = options(
        tmp_path,
        learning_rate=LearningRate(0.05, "linear"),
        batch_size=16,
        checkpoint_dir=tmp_path / "checkpoints",
        checkpoint_every=2,
        keep=2,
    )
    train(chosen, stop_after=5)
    return dataclasses.replace(chosen, resume=True)
