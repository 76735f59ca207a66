"""The demo's picture: loss, accuracy on held-out digits, and the loss scale with its growths and its halving."""

from __future__ import annotations

import os
from collections.abc import Sequence

from graphscale.training import run_plot
from graphscale.training.record import StepRecord

__all__ = ["draw"]


def draw(records: Sequence[StepRecord], path: str | os.PathLike[str]) -> None:
    """Write the picture of a run of the demo, atomically.

    Raises:
        TrainingError: the suffix is not that of a picture.
        OutputError: the file cannot be written.
    """
    run_plot.draw(
        records,
        path,
        title="One training step as one ONNX graph, its loss scale inside",
        curves=[run_plot.Curve("held-out accuracy (%)", _accuracy, limits=(0, 104), last="{:.1f} %")],
        notes={
            record.step: f"an Inf in the batch of step {record.step}:\nthe step is skipped, every weight kept"
            for record in records
            if not record.applied
        },
    )


def _accuracy(record: StepRecord) -> float | None:
    value = record.outputs.get("accuracy")
    return None if value is None else 100 * value
