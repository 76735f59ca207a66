"""graphscale fuse: one training step in one file, from an artifact folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from graphscale import pipeline
from graphscale.cli.options import IncrementPeriod, InitialLossScale, Json, Multiplier, parse_loss_scale
from graphscale.cli.show import show_report
from graphscale.errors import InvalidLossScaleError
from graphscale.files import writing
from graphscale.ort.fusing import FusedStep
from graphscale.ort.fusing import fuse as fuse_folder

__all__ = ["fuse"]


def fuse(
    folder: Annotated[
        Path,
        typer.Argument(help="A folder that generate_artifacts has written."),
    ],
    output: Annotated[Path, typer.Option("-o", "--output", help="Where to write the step.", show_default=False)],
    target: Annotated[
        str,
        typer.Option(help="The runtime. onnx: state goes from output to input; ort-training: it is written in place."),
    ] = "onnx",
    loss_scale: Annotated[
        str | None,
        typer.Option(metavar="dynamic|NUMBER|PRESET|FILE.json", help="Scale the step too.", show_default=False),
    ] = None,
    initial_loss_scale: InitialLossScale = None,
    increment_period: IncrementPeriod = None,
    multiplier: Multiplier = None,
    json: Json = False,
) -> None:
    """Turn an artifact folder into one training step for a plain InferenceSession, scaled or not."""
    writing.check_output(output)
    if loss_scale is None:
        options = {"initial-loss-scale": initial_loss_scale, "increment-period": increment_period}
        given = [name for name, value in {**options, "multiplier": multiplier}.items() if value is not None]
        if given:
            raise InvalidLossScaleError(f"--{given[0]} goes with --loss-scale dynamic")
        step = fuse_folder(folder, target=target)
        report = pipeline.inspect(step.model, loss=step.loss, updates=step.updates)
        step.save(output)
        show_report(report, json, f"{folder} fused -> {output}")
        _show_renamed(step)
        return
    policy = parse_loss_scale(loss_scale, initial_loss_scale, increment_period, multiplier)
    step = fuse_folder(folder)
    result = pipeline.scale(step.model, policy, loss=step.loss, updates=step.updates, target=target)
    result.save(output)
    show_report(result.report, json, f"{folder} fused and scaled -> {output}")
    _show_renamed(step)


def _show_renamed(step: FusedStep) -> None:
    for wanted, given in step.renamed.items():
        Console(stderr=True, highlight=False).print(Text(f"warning: the name {wanted} was taken: {given}"))
