"""The demo's picture: loss, accuracy on held-out digits, and the loss scale with its growths and its halving."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from graphscale import io
from graphscale.demo.training import StepRecord
from graphscale.errors import OutputError

__all__ = ["draw"]

BLUE, GREEN, ORANGE, RED, INK, GRID = "#2f6db5", "#2c8a57", "#d97a1a", "#c2352b", "#333333", "#e4e4e4"
STYLE: Any = {
    "font.size": 9.5,
    "axes.edgecolor": "#b5b5b5",
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": INK,
    "ytick.color": INK,
    "text.color": INK,
}


def draw(records: Sequence[StepRecord], path: str | os.PathLike[str]) -> None:
    """Write the picture of a run as a PNG file, atomically.

    Raises:
        OutputError: the file cannot be written.
    """
    from matplotlib import rc_context

    target = io.check_output(path)
    try:
        with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as folder:
            temporary = Path(folder, "picture.png")
            with rc_context(STYLE):
                _figure(records).savefig(temporary, format="png", dpi=120)
            os.replace(temporary, target)
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror or error}") from error


def _figure(records: Sequence[StepRecord]) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.4, 6.6), layout="constrained")
    loss, accuracy, scale = figure.subplots(3, 1, sharex=True, height_ratios=(3, 2.4, 3))
    _draw_loss(loss, records)
    _draw_accuracy(accuracy, records)
    _draw_scale(scale, records)
    for axes in (loss, accuracy, scale):
        axes.grid(axis="y", color=GRID, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.margins(x=0.015)
        for record in records:
            if not record.applied:
                axes.axvline(record.step, color=RED, linewidth=1, linestyle=(0, (4, 3)), zorder=1)
    scale.set_xlabel("training step")
    figure.align_ylabels()
    figure.suptitle(
        "One training step as one ONNX graph, its loss scale inside",
        x=0.012,
        ha="left",
        fontsize=12,
        fontweight="bold",
    )
    return figure


def _draw_loss(axes: Any, records: Sequence[StepRecord]) -> None:
    steps = np.asarray([r.step for r in records if np.isfinite(r.loss)])
    losses = np.asarray([r.loss for r in records if np.isfinite(r.loss)])
    axes.semilogy(steps, losses, color=BLUE, alpha=0.28, linewidth=0.7, label="each batch")
    width = max(1, len(records) // 50)
    smooth = np.exp(np.convolve(np.log(losses), np.full(width, 1 / width), mode="valid"))
    axes.semilogy(steps[width - 1 :], smooth, color=BLUE, linewidth=1.8, label=f"mean of {width} batches")
    for record in records:
        if not record.applied:
            note = f"an Inf in the batch of step {record.step}:\nthe step is skipped, every weight kept"
            anchor = (record.step, 0.86)
            axes.annotate(
                note,
                anchor,
                xytext=(9, 0),
                textcoords="offset points",
                xycoords=axes.get_xaxis_transform(),
                color=RED,
                va="center",
            )
    axes.set_ylabel("training loss")
    axes.legend(frameon=False, loc="lower left")


def _draw_accuracy(axes: Any, records: Sequence[StepRecord]) -> None:
    steps, values = zip(*((r.step, r.accuracy) for r in records if r.accuracy is not None), strict=True)
    axes.plot(steps, [100 * value for value in values], color=GREEN, linewidth=1.8)
    axes.plot(steps[-1:], [100 * values[-1]], "o", color=GREEN, markersize=5)
    axes.annotate(
        f"{100 * values[-1]:.1f} %",
        (steps[-1], 100 * values[-1]),
        xytext=(0, -9),
        textcoords="offset points",
        ha="right",
        va="top",
        color=GREEN,
        fontweight="bold",
    )
    axes.set_ylabel("held-out accuracy (%)")
    axes.set_ylim(0, 104)


def _draw_scale(axes: Any, records: Sequence[StepRecord]) -> None:
    axes.step([r.step for r in records], [r.next_scale for r in records], where="post", color=ORANGE, linewidth=1.8)
    grown = [r for r in records if r.next_scale > r.scale]
    halved = [r for r in records if r.next_scale < r.scale]
    for marks, symbol, colour, label in (
        (grown, "^", ORANGE, "doubled after a full period of good steps"),
        (halved, "v", RED, "halved after the overflow"),
    ):
        axes.plot(
            [r.step for r in marks],
            [r.next_scale for r in marks],
            symbol,
            color=colour,
            markersize=7,
            linestyle="none",
            label=label,
        )
    lowest = min(min(r.scale, r.next_scale) for r in records)
    highest = max(max(r.scale, r.next_scale) for r in records)
    axes.set_yscale("log", base=2)
    axes.set_ylim(lowest / 1.6, highest * 1.9)
    axes.set_ylabel("loss scale")
    axes.legend(frameon=False, loc="upper left")
