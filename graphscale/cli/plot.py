"""graphscale plot: draw a run from its metrics."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from graphscale.errors import TrainingError
from graphscale.training.metrics import read_metrics
from graphscale.training.run_plot import Curve, check_picture, draw

__all__ = ["plot"]


def plot(
    metrics: Annotated[Path, typer.Argument(help="What graphscale train --metrics wrote.", show_default=False)],
    output: Annotated[Path, typer.Option("-o", "--output", help="A .png, .svg or .pdf file.", show_default=False)],
    title: Annotated[str | None, typer.Option(help="Above the picture.", show_default=False)] = None,
    column: Annotated[
        list[str] | None,
        typer.Option(
            help="Another output of the step, drawn in a panel of its own. May be repeated.", show_default=False
        ),
    ] = None,
) -> None:
    """Draw the loss, the loss scale with its growths and decreases, and the skipped steps of a run."""
    check_picture(output)
    records = read_metrics(metrics)
    if not records:
        raise TrainingError(f"{metrics} holds no step yet")
    names = sorted({name for record in records for name in record.outputs})
    for name in column or []:
        if name not in names:
            there = f"there are {', '.join(names)}" if names else "it has no outputs but the loss"
            raise TrainingError(f"--column {name}: {metrics} does not have it; {there}")
    draw(records, output, title=title, curves=[_curve(name) for name in column or []])
    skipped = sum(not record.applied for record in records)
    text = f"{len(records)} steps, {skipped} of them skipped -> {output}"
    Console(highlight=False).print(Text(text), soft_wrap=True)


def _curve(name: str) -> Curve:
    return Curve(name, lambda record: record.outputs.get(name))
