"""graphscale split: cut a scaled step at its gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from graphscale.cli.show import print_json
from graphscale.files import writing
from graphscale.replicas import split as split_step
from graphscale.replicas.buckets import BUCKET_BYTES
from graphscale.replicas.splitting import SplitReport, stage_path

__all__ = ["split"]

_SHOWN = 12


def split(
    step: Annotated[Path, typer.Argument(metavar="STEP.onnx", help="A scaled training step.", show_default=False)],
    output: Annotated[
        tuple[Path, Path],
        typer.Option(
            "-o",
            "--output",
            metavar="GRADS.onnx UPDATE.onnx",
            help="Where to write the two halves; stage 2 of the first is GRADS.2.onnx, and so on.",
            show_default=False,
        ),
    ],
    bucket_size: Annotated[
        str, typer.Option(metavar="SIZE", help="What a bucket holds at most: bytes, or like 25MiB.")
    ] = f"{BUCKET_BYTES // 2**20}MiB",
    stages: Annotated[
        int, typer.Option(metavar="N", help="Models for the first half: one's buckets are reduced while the next runs.")
    ] = 1,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Cut a scaled step at its gradients, to reduce them over replicas in between.

    GRADS computes the unscaled gradients, in buckets. UPDATE takes the reduced buckets, checks them, updates the loss
    scale and applies the guarded update. Run one after the other they are the step, bit for bit.
    """
    for path in output:
        writing.check_output(path)
    result = split_step(step, bucket_bytes=bucket_size, stages=stages)
    result.save(*output)
    if json:
        print_json(result.report.to_dict())
        return
    _show(result.report, step, output)


def _show(report: SplitReport, step: Path, output: tuple[Path, Path]) -> None:
    table = Table(show_header=False, show_edge=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    paths = [*(stage_path(output[0], i) for i in range(report.stages)), output[1]]
    gradients = [f"{name} {shape}" for name, shape in report.gradients.items()]
    if len(gradients) > _SHOWN:
        gradients = [*gradients[:_SHOWN], f"... and {len(gradients) - _SHOWN} more (--json shows all)"]
    buckets = [f"{b['name']} {b['dtype']}[{b['elements']}], {b['bytes']} bytes" for b in report.buckets]
    if len(buckets) > _SHOWN:
        buckets = [*buckets[:_SHOWN], f"... and {len(buckets) - _SHOWN} more (--json shows all)"]
    rows = [
        (f"gradients ({len(report.gradients)})", gradients),
        (f"buckets ({len(report.buckets)})", buckets),
        ("mean of replicas", list(report.average) or ["gradients alone"]),
        ("of one replica", [name for name in report.outputs if name not in report.average] or ["nothing"]),
        ("nodes", [f"{count} in {path}" for count, path in zip(report.nodes, paths, strict=True)]),
    ]
    for name, lines in rows:
        table.add_row(name, Text("\n".join(lines)))
    console = Console(highlight=False)
    console.print(Text(f"{step} -> {', '.join(map(str, paths))}"), soft_wrap=True)
    console.print(table)
