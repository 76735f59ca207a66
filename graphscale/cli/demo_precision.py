"""graphscale demo --precision: two networks in float32, and in float16 without, with a fixed, with a dynamic scale."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from graphscale.cli.show import make_table
from graphscale.demo import precision
from graphscale.demo.precision_plot import draw

__all__ = ["compare"]


def compare(output: Path, steps: int, seed: int, console: Console) -> None:
    """Train everything, draw it, and print the results.

    Args:
        output: the file of the picture.
        steps: of each run.
        seed: of data, initial weights and batches.
        console: the terminal.

    Raises:
        OutputError: the picture cannot be written.
    """
    runs = _train(steps, seed, console)
    draw(runs, output)
    console.print(_table(runs))
    console.print("right: answers on held-out data; zeros: elements of the gradients, the median over the steps")
    console.print(f"float16 is emulated: each value is rounded to it. The picture: [bold]{escape(str(output))}[/]")


def _train(steps: int, seed: int, console: Console) -> list[precision.Run]:
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=10), MofNCompleteColumn())
    progress = Progress(*columns, TextColumn("{task.fields[text]}"), console=console)
    runs = []
    with progress:
        for task in precision.tasks(seed):
            for way in precision.ways(steps):
                bar = progress.add_task(f"{task.name}, {way.name}", total=steps, text="")
                for run in precision.train(task, way, steps):
                    last = run.records[-1]
                    text = f"loss {task.loss(last):.4f}, zeros {100 * (last.zero_fraction or 0):.0f} %"
                    progress.update(bar, advance=1, text=text)
                runs.append(run)
    return runs


def _table(runs: Sequence[precision.Run]) -> Table:
    headers = ("loss", "right", "zeros", "scale", "skipped")
    table = make_table(*headers, left="", title="What happened", title_justify="left")
    for name in dict.fromkeys(run.task.name for run in runs):
        table.add_row(f"[bold]{name}[/]")
        for run in (run for run in runs if run.task.name == name):
            table.add_row(f"  {run.way.name}", *_cells(run))
    return table


def _cells(run: precision.Run) -> tuple[str, ...]:
    loss, zeros = float(np.mean(run.losses[-10:])), float(np.median(run.zeros))
    cells = (f"{loss:.3g}", f"{100 * run.accuracy:.1f} %", f"{100 * zeros:.0f} %")
    if not run.way.float16:
        return cells
    skipped = sum(not record.applied for record in run.records)
    return (*cells, f"2^{np.log2(run.records[-1].next_loss_scale):.0f}", str(skipped))
