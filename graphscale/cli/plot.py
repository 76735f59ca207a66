"""graphscale plot: draw a run from its metrics."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from graphscale.cli.options import argument, option, output_path
from graphscale.cli.show import print_json, say
from graphscale.errors import TrainingError
from graphscale.training.metrics import read_metrics
from graphscale.training.run_plot import Curve, check_picture, draw

__all__ = ["plot"]


def plot(
    metrics: Annotated[Path, argument("A file that graphscale train --metrics wrote.")],
    output: Annotated[Path, output_path("The picture: a .png, .svg or .pdf file.")],
    title: Annotated[str | None, option("The title of the picture.")] = None,
    column: Annotated[
        list[str] | None,
        option("Another output of the step, drawn in a panel of its own. Repeatable.", metavar="NAME"),
    ] = None,
) -> None:
    """Draw the loss, the loss scale with its growths and decreases, and the skipped steps of a run.

    Examples:
        graphscale plot run.jsonl -o run.png
        graphscale plot run.csv -o run.svg --title "A run"
    """
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
    print_json(lambda: {"steps": len(records), "skipped": skipped, "output": str(output)})
    steps = "1 step" if len(records) == 1 else f"{len(records)} steps"
    say(f"{steps}, {skipped} of them skipped -> {output}")


def _curve(name: str) -> Curve:
    return Curve(name, lambda record: record.outputs.get(name))
