"""graphscale demo: train a digit classifier from a scaled training step, with one overflow on the way; or compare."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from graphscale.cli.options import option

if TYPE_CHECKING:
    from rich.console import Console

    from graphscale.training.record import StepRecord

__all__ = ["demo"]


def demo(
    precision: Annotated[
        bool,
        option(
            "--precision", help="Compare float32 with float16 without, with a fixed, and with a dynamic loss scale."
        ),
    ] = False,
    output: Annotated[
        Path | None,
        option("-o", "--output", help="Where to draw. Default: demo.png; with --precision precision.png."),
    ] = None,
    steps: Annotated[
        int | None,
        option(min=100, max=1_000_000, help="Training steps. Default: 2000; with --precision 300 in each run."),
    ] = None,
    seed: Annotated[int, option(min=0, help="Of split, weights and batches.", show_default=True)] = 0,
) -> None:
    """Train a digit classifier from a scaled training step, with one overflow on the way, and draw the run."""
    from rich.console import Console

    from graphscale.cli.demo_precision import compare
    from graphscale.demo.training import require
    from graphscale.training.run_plot import check_picture

    require()
    picture = output or Path("precision.png" if precision else "demo.png")
    check_picture(picture)
    console = Console(highlight=False)
    if precision:
        compare(picture, steps or 300, seed, console)
    else:
        _overflow(picture, steps or 2000, seed, console)


def _overflow(output: Path, steps: int, seed: int, console: Console) -> None:
    from rich.markup import escape

    from graphscale.cli.progress import Tally, show_table
    from graphscale.demo.demo_plot import draw
    from graphscale.demo.training import Training

    training = Training(steps, seed)
    report = training.scaled.report
    console.print(
        f"[bold]digits_step.onnx[/], a training step exported from PyTorch: {report.nodes_before} nodes, "
        f"{report.nodes_after} with loss scaling inside."
    )
    tally = Tally()
    records = list(tally.follow(training.run(), console, steps))
    with console.status("Training once more without loss scaling, to compare every bit..."):
        differing = training.differing()
    draw(records, output)
    show_table(console, [*tally.rows(), *_rows(records, differing)])
    console.print(f"The picture of this run: [bold]{escape(str(output))}[/]")
    console.print("[dim]What float16 loses without a loss scale: graphscale demo --precision[/]")


def _rows(records: Sequence[StepRecord], differing: Sequence[str]) -> list[tuple[str, str]]:
    rows = [
        (
            f"  step {record.step}",
            f"an Inf in the batch; all weights kept, scale {record.loss_scale:.0f} -> {record.next_loss_scale:.0f}",
        )
        for record in records
        if not record.applied
    ]
    rows.append(("held-out accuracy", f"{100 * records[-1].outputs['accuracy']:.1f} %"))
    same = "the same batches but the skipped one give [green]bit-identical[/] weights"
    rows.append(("without loss scaling", f"[red]different: {', '.join(differing)}[/]" if differing else same))
    return rows
