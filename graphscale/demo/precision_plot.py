"""The picture of the demo's comparison: for each task the loss, the share of zero gradients, and the loss scale."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from graphscale.demo.precision import Run
from graphscale.files import writing
from graphscale.files.writing import metadata_of_picture
from graphscale.training.run_plot import BLUE, GRID, ORANGE, RED, STYLE, check_picture

__all__ = ["draw"]

# In the order of `precision.ways`. The thin line of the dynamic scale is drawn last, over the wide line of float32:
# equal curves show both.
LINES: tuple[dict[str, Any], ...] = (
    {"color": "#c4c4c4", "linewidth": 6.0, "solid_capstyle": "round"},
    {"color": RED, "linewidth": 1.8},
    {"color": ORANGE, "linewidth": 1.8},
    {"color": BLUE, "linewidth": 1.5},
)
GREY = "#777777"
TITLE = "Two training steps in float32, and in float16{} without, with a fixed, and with a dynamic loss scale"


def draw(runs: Sequence[Run], path: str | os.PathLike[str], is_emulated: bool = True) -> None:
    """Write the picture of every task in every way, in the order of `precision.ways`, atomically.

    Args:
        runs: every task in every way.
        path: .png, .svg or .pdf.
        is_emulated: True for emulated float16; the title says it.

    Raises:
        TrainingError: the suffix is not .png, .svg or .pdf.
        OutputError: the file cannot be written.
    """
    check_picture(path)
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    columns = list(dict.fromkeys(run.task.name for run in runs))
    with writing.write_file(path) as temporary, rc_context(STYLE):
        figure = Figure(figsize=(5.6 * len(columns), 8.4), layout="constrained")
        panels = figure.subplots(3, len(columns), sharex=True, squeeze=False, height_ratios=(3.4, 2.4, 2.4))
        for column, name in zip(panels.T, columns, strict=True):
            _draw_task(column, [run for run in runs if run.task.name == name])
        highest = max(record.next_loss_scale for run in runs for record in run.records)
        for axes in panels[-1]:
            axes.set_yscale("log", base=2)
            axes.set_ylim(2**-2, highest * 2**5)
            axes.set_yticks([2.0**power for power in range(0, int(np.log2(highest)) + 1, 5)], minor=False)
            axes.set_xlabel("training step")
        for axes, label in zip(panels[:, 0], ("training loss", "zero gradients (%)", "loss scale"), strict=True):
            axes.set_ylabel(label)
        figure.align_ylabels()
        figure.suptitle(TITLE.format(" (emulated)" * is_emulated), x=0.012, ha="left", fontsize=12, fontweight="bold")
        figure.savefig(temporary, dpi=120, metadata=metadata_of_picture(temporary.suffix))
        if Path(path).suffix == ".png":
            _shrink(temporary)


def _shrink(path: Path) -> None:
    """Convert a picture to a palette, with a third of the bytes."""
    from PIL import Image, PngImagePlugin  # matplotlib depends on it

    with Image.open(path) as picture:
        small = picture.convert("RGB").quantize(128, dither=Image.Dither.NONE)
    info = PngImagePlugin.PngInfo()
    for name, text in metadata_of_picture(path.suffix).items():
        info.add_text(name, text)
    small.save(path, optimize=True, pnginfo=info)


def _draw_task(panels: Sequence[Any], runs: Sequence[Run]) -> None:
    losses, zeros, scales = panels
    losses.set_title(runs[0].task.title, loc="left", fontsize=10)
    losses.set_yscale("log")
    guessing = float(np.log(runs[0].task.choices))
    losses.axhline(guessing, color=GREY, linewidth=0.8, linestyle=(0, (4, 3)), zorder=1)
    _write(losses, "guessing", (1, guessing), (-2, -4), "right", GREY, xycoords=losses.get_yaxis_transform())
    for run, line in zip(runs, LINES, strict=True):
        steps = np.arange(1, len(run.records) + 1)
        losses.plot(*_smooth(steps, run.losses), label=f"{run.way.name}: {100 * run.accuracy:.1f} %", **line)
        zeros.plot(*_mean(steps, 100 * run.zeros), **line)
        if run.way.float16:
            _draw_scale(scales, run, line)
    losses.set_ylim(bottom=losses.get_ylim()[0] / 2)
    losses.legend(frameon=False, title="right answers on held-out data", alignment="left", loc="best")
    _note_zeros(zeros, runs)
    zeros.set_ylim(-4, 104)
    if scales.get_legend_handles_labels()[0]:
        scales.legend(frameon=False, loc="upper left")
    for axes in panels:
        axes.grid(axis="y", color=GRID, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.margins(x=0.015)


def _draw_scale(axes: Any, run: Run, line: dict[str, Any]) -> None:
    steps = [0, *(record.step for record in run.records)]
    scales = [run.records[0].loss_scale, *(record.next_loss_scale for record in run.records)]
    axes.step(steps, scales, where="post", **line)
    end = steps[-1], min(scales[len(scales) // 2 :])
    shift = 4 if len(set(scales)) == 1 else -4
    _write(axes, run.way.name.removeprefix("float16, "), end, (0, shift), "right", line["color"])
    skipped = [record for record in run.records if not record.applied]
    if skipped:
        points = zip(*((record.step, record.next_loss_scale) for record in skipped), strict=True)
        label = f"overflow: step skipped, scale halved ({len(skipped)})"
        axes.plot(*points, "v", color=RED, markersize=6, linestyle="none", label=label)


def _note_zeros(axes: Any, runs: Sequence[Run]) -> None:
    """Write the share of zeros, the median over the run, beside the lines of float32 and of float16 without a scale."""
    for run, colour, is_upper in zip(runs, (GREY, LINES[1]["color"]), (False, True), strict=False):
        median = 100 * float(np.median(run.zeros))
        above = (is_upper and median < 80) or median < 15
        # The text is beside the first half of its line.
        _, line = _mean(np.arange(len(run.zeros)), 100 * run.zeros)
        first = line[: len(line) // 2 + 1]
        at = len(run.records) * 0.02, first.max() if above else first.min()
        _write(axes, f"{run.way.name}: median {median:.0f} %", at, (0, 6 if above else -6), "left", colour)


def _write(axes: Any, text: str, at: Any, shift: tuple[int, int], side: str, colour: str, **more: Any) -> None:
    """Write a text above or below a place of the graph, `shift` typographic points away."""
    va = "bottom" if shift[1] > 0 else "top"
    axes.annotate(text, at, xytext=shift, textcoords="offset points", ha=side, va=va, color=colour, **more)


def _mean(steps: np.ndarray[Any, Any], values: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], ...]:
    """Return the mean of the last few steps, 1 in 50."""
    width = max(1, len(steps) // 50)
    return steps[width - 1 :], np.convolve(values, np.full(width, 1 / width), mode="valid")


def _smooth(steps: np.ndarray[Any, Any], losses: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], ...]:
    """Return the smoothed losses, finite or not, for a logarithmic scale."""
    with np.errstate(divide="ignore", invalid="ignore"):
        kept, logs = _mean(steps, np.log(losses))
        return kept, np.exp(logs)
