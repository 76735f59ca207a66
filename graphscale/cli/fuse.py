"""graphscale fuse: one training step in one file, from an artifact folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from graphscale.cli.options import (
    LOSS_SCALE,
    IncrementPeriod,
    InitialLossScale,
    Json,
    Multiplier,
    option,
    parse_loss_scale,
)
from graphscale.errors import InvalidLossScaleError

__all__ = ["fuse"]


def fuse(
    folder: Annotated[Path, typer.Argument(help="A folder that generate_artifacts has written.")],
    output: Annotated[Path, option("-o", "--output", help="Where to write the step.")],
    target: Annotated[
        str,
        option(
            help="The runtime. onnx: state goes from output to input; ort-training: it is written in place.",
            show_default=True,
        ),
    ] = "onnx",
    loss_scale: Annotated[str | None, option(metavar=LOSS_SCALE, help="Scale the step too.")] = None,
    initial_loss_scale: InitialLossScale = None,
    increment_period: IncrementPeriod = None,
    multiplier: Multiplier = None,
    json: Json = False,
) -> None:
    """Turn an artifact folder into one training step for a plain InferenceSession, scaled or not."""
    from graphscale import pipeline
    from graphscale.cli.show import show_report, warn
    from graphscale.files import writing
    from graphscale.ort.fusing import fuse as fuse_folder

    writing.check_output(output)
    if loss_scale is None:
        options = {"initial-loss-scale": initial_loss_scale, "increment-period": increment_period}
        given = [name for name, value in {**options, "multiplier": multiplier}.items() if value is not None]
        if given:
            raise InvalidLossScaleError(f"--{given[0]} goes with --loss-scale dynamic")
        step = fuse_folder(folder, target=target)
        report = pipeline.inspect(step.model, loss=step.loss, updates=step.updates)
        step.save(output)
    else:
        policy = parse_loss_scale(loss_scale, initial_loss_scale, increment_period, multiplier)
        step = fuse_folder(folder)
        result = pipeline.scale(step.model, policy, loss=step.loss, updates=step.updates, target=target)
        result.save(output)
        report = result.report
    show_report(report, json, f"{folder} fused{'' if loss_scale is None else ' and scaled'} -> {output}")
    warn(f"the name {wanted} was taken: {given}" for wanted, given in step.renamed.items())
