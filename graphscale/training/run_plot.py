"""The picture of a run: the loss, the loss scale with its growths, decreases and skipped steps, and other records."""

from __future__ import annotations

import dataclasses
import operator
import os
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from graphscale.errors import TrainingError, printable
from graphscale.files import writing
from graphscale.files.writing import metadata_of_picture
from graphscale.process.extras import install_command
from graphscale.training.record import StepRecord

__all__ = ["Curve", "check_picture", "draw"]

SUFFIXES = (".png", ".svg", ".pdf")
BLUE, GREEN, ORANGE, RED, INK, GRID = "#2f6db5", "#2c8a57", "#d97a1a", "#c2352b", "#333333", "#e4e4e4"
STYLE: Any = {
    "agg.path.chunksize": 10_000,  # long runs: a path of a million points is drawn in parts
    "font.size": 9.5,
    "axes.edgecolor": "#b5b5b5",
    **dict.fromkeys(("axes.labelcolor", "xtick.color", "ytick.color", "text.color"), INK),
    **dict.fromkeys(("axes.spines.top", "axes.spines.right"), False),
    "svg.fonttype": "none",
}
_EACH_BATCH = "each batch"
_MARKED = 60  # skipped steps, growths or decreases: the eye tells more of them apart no longer
_DOTTED = 30  # points of a curve up to which each is a dot
_DECADES = 8  # a loss that varies by less than this factor has a linear axis


@dataclasses.dataclass(frozen=True)
class Curve:
    """A panel of its own for one number of each record.

    Attributes:
        label: of the axis.
        value: takes a record, gives the number; None where it has none.
        limits: of the axis; None, for both or for the upper one, to fit the values.
        last: a format of the last value at the curve's end, such as "{:.1f} %"; None for no text.
    """

    label: str
    value: Callable[[StepRecord], float | None]
    limits: tuple[float, float | None] | None = None
    last: str | None = None


def check_picture(path: str | os.PathLike[str]) -> Path:
    """Check that a picture can be drawn and written, without writing anything.

    Raises:
        TrainingError: the suffix is not one of a picture, or matplotlib is not installed.
        OutputError: the folder does not exist, or the path is a folder.
    """
    target = writing.check_new_output(path)
    if target.suffix not in SUFFIXES:
        raise TrainingError(f"{path}: expected a name that ends in {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}")
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise TrainingError(
            f"drawing needs matplotlib, which cannot be imported here ({error}); install it: {install_command('plot')}"
        ) from error
    return target


def draw(
    records: Sequence[StepRecord],
    path: str | os.PathLike[str],
    *,
    title: str | None = None,
    curves: Sequence[Curve] = (),
    notes: Mapping[int, str] | None = None,
) -> None:
    """Write the picture of a run, atomically.

    Args:
        records: the steps.
        path: a .png, .svg or .pdf file.
        title: above it.
        curves: more panels, between loss and loss scale.
        notes: `{step: text}` to be written beside steps, in the panel of the loss.

    Raises:
        TrainingError: there are no records, or their numbers are too far apart; the suffix is unknown; matplotlib
            is not installed.
        OutputError: the file cannot be written.
    """
    check_picture(path)
    if not records:
        raise TrainingError("there are no steps to draw")
    from matplotlib import rc_context

    with writing.write_file(path) as temporary, rc_context(STYLE), np.errstate(over="ignore", invalid="ignore"):
        try:
            figure = _figure(records, [*curves, *_recorded(records)], notes or {})
            if title:
                figure.suptitle(printable(title), x=0.012, ha="left", fontsize=12, fontweight="bold", parse_math=False)
            figure.savefig(temporary, dpi=120, metadata=metadata_of_picture(temporary.suffix))
        except (ArithmeticError, ValueError) as error:  # of matplotlib, where numbers are near the largest float
            raise TrainingError(f"the steps cannot be drawn, their numbers are too far apart: {error}") from error


def _recorded(records: Sequence[StepRecord]) -> list[Curve]:
    """Make a panel for the learning rate where it varies, and one for the zeros where there is telemetry."""
    curves = []
    if len({record.learning_rate for record in records}) > 1:
        curves.append(Curve("learning rate", lambda record: record.learning_rate))
    if any(record.zero_fraction is not None for record in records):
        curves.append(Curve("zero gradients (%)", lambda r: r.zero_fraction and 100 * r.zero_fraction, (0, None)))
    return curves


def _figure(records: Sequence[StepRecord], curves: Sequence[Curve], notes: Mapping[int, str]) -> Any:
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    heights = (3, *(2.4 for _ in curves), 3)
    figure = Figure(figsize=(8.4, 0.95 + 0.72 * sum(heights)), layout="constrained")
    panels = figure.subplots(len(heights), 1, sharex=True, height_ratios=heights)
    _draw_loss(panels[0], records, notes)
    for axes, curve in zip(panels[1:-1], curves, strict=True):
        _draw_curve(axes, records, curve)
    _draw_scale(panels[-1], records)
    skipped = [record.step for record in records if not record.applied]
    line: dict[str, Any] = {"alpha": 1, "linewidth": 1, "linestyle": (0, (4, 3))}
    if len(skipped) > _MARKED // 5:
        line = {"alpha": 0.25 if len(skipped) > _MARKED else 0.5, "linewidth": 0.5, "linestyle": "solid"}
    for axes in panels:
        axes.grid(axis="y", color=GRID, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.margins(x=0.015)
        label = f"skipped ({len(skipped)})" if skipped and axes is panels[-1] else None
        transform = axes.get_xaxis_transform()
        axes.vlines(skipped, 0, 1, transform=transform, color=RED, zorder=1, label=label, **line)
    for axes in (panels[0], panels[-1]):
        _add_legend(axes)
    panels[-1].set_xlabel("training step")
    panels[-1].xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 2.5, 5, 10]))
    figure.align_ylabels()
    return figure


def _add_legend(axes: Any) -> None:
    """Put a legend above a panel, where no curve is, unless it would name one curve only."""
    handles, labels = axes.get_legend_handles_labels()
    if len(handles) > 1 or labels != [_EACH_BATCH]:
        place = {"loc": "lower right", "bbox_to_anchor": (1, 1), "borderaxespad": 0.2, "ncols": max(1, len(handles))}
        legend = axes.legend(handles, labels, frameon=False, columnspacing=1.6, handlelength=1.6, **place)
        for handle in legend.legend_handles:  # a faint curve has a key that can be seen
            handle.set_alpha(max(0.6, handle.get_alpha() or 1))


def _draw_loss(axes: Any, records: Sequence[StepRecord], notes: Mapping[int, str]) -> None:
    finite = [record for record in records if np.isfinite(record.loss)]
    steps, losses = np.asarray([r.step for r in finite]), np.asarray([r.loss for r in finite])
    logarithmic = bool(losses.size and losses.min() > 0 and losses.max() >= _DECADES * losses.min())
    if logarithmic:
        axes.set_yscale("log")
    width = max(1, min(len(records) // 50, len(finite)))
    faint: dict[str, Any] = {"alpha": 0.28, "linewidth": 0.7} if width > 1 else {"linewidth": 1.8}
    axes.plot(steps, losses, color=BLUE, label=_EACH_BATCH, **_dots(steps), **faint)
    if width > 1:
        window = np.full(width, 1 / width)
        values = np.log(losses) if logarithmic else losses
        smooth = np.convolve(values, window, mode="valid")
        smooth = np.exp(smooth) if logarithmic else smooth
        axes.plot(steps[width - 1 :], smooth, color=BLUE, linewidth=1.8, label=f"mean of {width} batches")
    other = [record.step for record in records if not np.isfinite(record.loss)]
    if other:
        rim = {"transform": axes.get_xaxis_transform(), "clip_on": False, "linestyle": "none"}
        axes.plot(other, [1] * len(other), "x", color=RED, markersize=5, label=f"not finite ({len(other)})", **rim)
    if not finite:
        axes.set_yticks([])
    place = {"textcoords": "offset points", "xycoords": axes.get_xaxis_transform(), "zorder": 4}
    middle = (records[0].step + records[-1].step) / 2
    for step, text in notes.items():
        # To the side where there is more room, on a ground that keeps curves off.
        side = {"xytext": (9, 0), "ha": "left"} if step <= middle else {"xytext": (-9, 0), "ha": "right"}
        ground = {"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 2}
        axes.annotate(text, (step, 0.86), color=RED, va="center", bbox=ground, **place, **side)
    axes.set_ylabel("training loss")


def _dots(steps: Sequence[Any] | np.ndarray[Any, Any]) -> dict[str, Any]:
    """Return the style of a curve: each point of a short one is a dot, as one point alone draws no line."""
    return {"marker": "o", "markersize": 4} if len(steps) <= _DOTTED else {}


def _draw_curve(axes: Any, records: Sequence[StepRecord], curve: Curve) -> None:
    points = [(record.step, value) for record in records if (value := curve.value(record)) is not None]
    steps, values = ([point[axis] for point in points] for axis in (0, 1))
    axes.plot(steps, values, color=GREEN, linewidth=1.8, **_dots(steps))
    if curve.last and points:
        axes.plot(steps[-1:], values[-1:], "o", color=GREEN, markersize=5, clip_on=False)
        place = {"xytext": (0, -9), "textcoords": "offset points", "ha": "right", "va": "top"}
        axes.annotate(curve.last.format(values[-1]), points[-1], color=GREEN, fontweight="bold", **place)
    axes.set_ylabel(printable(curve.label), parse_math=False)
    if curve.limits:
        axes.set_ylim(*curve.limits)


def _draw_scale(axes: Any, records: Sequence[StepRecord]) -> None:
    steps = [records[0].step - 1, *(record.step for record in records)]
    scales = [records[0].loss_scale, *(record.next_loss_scale for record in records)]
    changes = sum(one != other for one, other in pairwise(scales))
    axes.step(steps, scales, where="post", color=ORANGE, linewidth=1.8 if changes <= _MARKED else 0.8)
    for compare, symbol, colour, twofold, otherwise in (
        (operator.gt, "^", ORANGE, "doubled", "grown"),
        (operator.lt, "v", RED, "halved", "lowered"),
    ):
        marks = [record for record in records if compare(record.next_loss_scale, record.loss_scale)]
        if not marks:
            continue
        factors = {record.next_loss_scale / record.loss_scale for record in marks}
        axes.plot(
            [record.step for record in marks],
            [record.next_loss_scale for record in marks],
            symbol,
            color=colour,
            markersize=7 if len(marks) <= _MARKED else 3,
            linestyle="none",
            label=f"{twofold if factors <= {2.0, 0.5} else otherwise} ({len(marks)})",
        )
    axes.set_yscale("log", base=2)
    axes.set_ylim(min(scales) / 1.6, max(scales) * 1.9)
    axes.set_ylabel("loss scale")
