"""graphscale demo: train a digit classifier from a scaled training step, with one overflow on the way."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from graphscale import io
from graphscale.demo.plot import draw
from graphscale.demo.training import StepRecord, Training, require

__all__ = ["demo"]


def demo(
    output: Annotated[Path, typer.Option("-o", "--output", help="Where to draw the run.")] = Path("demo.png"),
    steps: Annotated[int, typer.Option(min=100, max=1_000_000, help="Training steps.")] = 2000,
    seed: Annotated[int, typer.Option(min=0, help="Of split, weights and batches.")] = 0,
) -> None:
    """Train a digit classifier from a scaled training step, with one overflow on the way, and draw the run."""
    require()
    io.check_output(output)
    console = Console(highlight=False)
    training = Training(steps, seed)
    report = training.scaled.report
    console.print(
        f"[bold]digits_step.onnx[/], a training step exported from PyTorch: {report.nodes_before} nodes, "
        f"{report.nodes_after} with loss scaling inside."
    )
    begin = time.perf_counter()
    records = _train(console, training)
    seconds = time.perf_counter() - begin
    with console.status("Training once more without loss scaling, to compare every bit..."):
        differing = training.differing()
    draw(records, output)
    console.print(_table(records, seconds, differing))
    console.print(f"The picture of this run: [bold]{output}[/]")


def _train(console: Console, training: Training) -> list[StepRecord]:
    progress = Progress(
        BarColumn(bar_width=18),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f} scale {task.fields[scale]:.0f} skipped {task.fields[skipped]}"),
        TextColumn("[dim]{task.fields[rate]:.0f}/s[/]"),
        TimeRemainingColumn(compact=True),
        console=console,
    )
    records: list[StepRecord] = []
    skipped = 0
    begin = time.perf_counter()
    with progress:
        task = progress.add_task("", total=training.steps, loss=0.0, scale=training.loss_scale(), skipped=0, rate=0.0)
        for record in training.run():
            records.append(record)
            skipped += not record.applied
            progress.update(
                task,
                completed=record.step,
                loss=record.loss,
                scale=record.next_scale,
                skipped=skipped,
                rate=record.step / (time.perf_counter() - begin),
            )
    return records


def _table(records: Sequence[StepRecord], seconds: float, differing: Sequence[str]) -> Table:
    table = Table(show_header=False, show_edge=False, pad_edge=False, title="What happened", title_justify="left")
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    first, last = records[0], records[-1]
    skipped = [record for record in records if not record.applied]
    grown = sum(record.next_scale > record.scale for record in records)
    table.add_row("steps", f"{len(records)} in {seconds:.1f} s ({len(records) / seconds:.0f} steps/s)")
    table.add_row("training loss", f"{first.loss:.3f} -> {last.loss:.4f}")
    table.add_row("held-out accuracy", f"{100 * (last.accuracy or 0):.1f} %")
    table.add_row("loss scale", f"{first.scale:.0f} -> {last.next_scale:.0f}, doubled {grown} times")
    table.add_row("steps skipped", str(len(skipped)))
    for record in skipped:
        table.add_row(
            f"  step {record.step}",
            f"an Inf in the batch; all weights kept, scale {record.scale:.0f} -> {record.next_scale:.0f}",
        )
    table.add_row(
        "without loss scaling",
        f"[red]different: {', '.join(differing)}[/]"
        if differing
        else "the same batches but the skipped one give [green]bit-identical[/] weights",
    )
    return table
