"""Ranges of the gradients in the metrics of a run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from graphscale.entries.inspection import inspect
from graphscale.passes import AddTelemetry
from graphscale.training.metrics import read_metrics
from graphscale.training.record import StepRecord
from graphscale.training.schedules import LearningRate
from tests.training.runs import DIGITS, make_digits, options, train

pytestmark = pytest.mark.static


@pytest.mark.full
@pytest.mark.parametrize("suffix", ["jsonl", "csv"])
def test_measured_steps_have_the_ranges_of_all_gradients_also_when_resumed(suffix: str, tmp_path: Path) -> None:
    make_digits(tmp_path, telemetry=AddTelemetry(ranges=True, every=3))

    def run(name: str, resume: bool = False, stop_after: int | None = None) -> list[StepRecord]:
        rate, kept = LearningRate(0.05), tmp_path / name
        files = {"checkpoint_dir": kept, "checkpoint_every": 1, "metrics": tmp_path / f"{name}.{suffix}"}
        chosen = options(tmp_path, batch_size=16, learning_rate=rate, resume=resume, shuffle=False, **files)
        train(chosen, stop_after)
        return read_metrics(tmp_path / f"{name}.{suffix}")

    records = run("whole")
    gradients = {entry.value for entry in inspect(DIGITS).gradients}
    for number, record in enumerate(records):
        assert record.ranges is not None
        assert set(record.ranges) == (gradients if number % 3 == 0 else set())
        if record.ranges:
            assert any(each.overflow for each in record.ranges.values()) == (not record.applied)
    assert [number for number, record in enumerate(records) if not record.applied] == [6, 15], "both are measured"
    assert np.ptp([max(each.largest for each in record.ranges.values()) for record in records[::3]]) > 0
    run("cut", stop_after=6)
    assert repr(run("cut", resume=True)) == repr(records)
