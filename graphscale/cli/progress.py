"""The progress of a training run, and the table of its results."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from rich.console import Console

from graphscale.cli.show import Part, make_table, make_text
from graphscale.process.stages import report_stage
from graphscale.training.record import StepRecord

__all__ = ["Tally", "show_table"]


_ALL_SKIPPED = ", so that no step was applied: look for NaN and Inf in the data and the weights"


class Tally:
    """The first and the last record of a run, its counts, and the seconds from the first request to the last record."""

    def __init__(self) -> None:
        self.first: StepRecord | None = None
        self.last: StepRecord | None = None
        self.steps = self.skipped = self.grown = self.lowered = 0
        self.seconds = 0.0

    def follow(self, records: Iterable[StepRecord], total: int) -> Iterator[StepRecord]:
        """Pass the records on, count them, and report the progress.

        Args:
            records: of the steps, as they are done.
            total: the number of the last step.
        """
        begin = time.perf_counter()
        for record in records:
            self.first, self.last = self.first or record, record
            self.steps += 1
            self.skipped += not record.applied
            self.grown += record.next_loss_scale > record.loss_scale
            self.lowered += record.next_loss_scale < record.loss_scale
            self.seconds = time.perf_counter() - begin
            text = f"loss {record.loss:.3f}, scale {_scale(record.next_loss_scale)}, {self.skipped} skipped"
            report_stage(text, record.step, total)
            yield record

    @property
    def rate(self) -> float:
        """Steps in a second."""
        return self.steps / self.seconds if self.seconds else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return counts, losses and loss scale for JSON: None for NaN and infinity, and where there were no steps."""
        first, last = self.first, self.last
        return {
            "steps": self.steps,
            "skipped": self.skipped,
            "seconds": self.seconds,
            "first_loss": first and _finite(first.loss),
            "last_loss": last and _finite(last.loss),
            "loss_scale": last and _finite(last.next_loss_scale),
        }

    def rows(self) -> list[tuple[str, str]]:
        """Return rows of a table: steps, loss and loss scale; none where there were no steps."""
        if self.first is None or self.last is None:
            return []
        first, last = self.first, self.last
        changes = [f"{verb} {_times(n)}" for verb, n in (("raised", self.grown), ("lowered", self.lowered)) if n]
        scale = f"{_scale(first.loss_scale)} -> {_scale(last.next_loss_scale)}"
        return [
            ("steps", f"{self.steps} in {self.seconds:.1f} s ({self.rate:.0f} steps/s)"),
            ("training loss", f"{first.loss:.4g} -> {last.loss:.4g}"),
            ("loss scale", ", ".join([scale, *changes])),
            ("steps skipped", f"{self.skipped}{_ALL_SKIPPED if self.skipped == self.steps else ''}"),
        ]


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _scale(value: float) -> str:
    return f"{value:.0f}" if 1 <= value < 1e8 else f"{value:.3g}"


def _times(count: int) -> str:
    return {1: "once", 2: "twice"}.get(count, f"{count} times")


def show_table(console: Console, rows: Sequence[tuple[str, str | Sequence[Part]]]) -> None:
    """Print rows under the title "What happened"."""
    table = make_table(title="What happened", title_justify="left")
    for name, text in rows:
        table.add_row(name, text if isinstance(text, str) else make_text(*text))
    console.print(table)
