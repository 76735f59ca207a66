"""graphscale fuse: one training step in one file, from an artifact folder."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

from graphscale.cli import options
from graphscale.cli.options import argument, option
from graphscale.cli.show import show_report, warn
from graphscale.errors import InvalidLossScaleError
from graphscale.files import writing

__all__ = ["fuse"]


def fuse(
    folder: Annotated[Path, argument("A folder that generate_artifacts has written.")],
    output: Annotated[Path, option("Where to write the step.", "-o", "--output")],
    target: Annotated[
        str, option("The runtime. onnx: state goes from output to input; ort-training: it is written in place.")
    ] = "onnx",
    loss_scale: Annotated[str | None, option("Scale the step too.", metavar=options.LOSS_SCALE)] = None,
    initial_loss_scale: options.InitialLossScale = None,
    increment_period: options.IncrementPeriod = None,
    multiplier: options.Multiplier = None,
    json: options.Json = False,
) -> None:
    """Turn an artifact folder into one training step for a plain InferenceSession, scaled or not."""
    from graphscale import pipeline
    from graphscale.ort.fusing import fuse as fuse_folder
    from graphscale.ort.fusing import join_models
    from graphscale.targets import get_target

    writing.check_new_output(output)
    if loss_scale is None:
        numbers = {"initial-loss-scale": initial_loss_scale, "increment-period": increment_period}
        for name, value in {**numbers, "multiplier": multiplier}.items():
            if value is not None:
                raise InvalidLossScaleError(f"--{name} goes with --loss-scale dynamic")
        step = fuse_folder(folder, target=target)
        report = pipeline.inspect(step.model, loss=step.loss, updates=step.updates)
        report = dataclasses.replace(report, replaced=step.replaced)
        step.save(output)
    else:
        policy = options.parse_loss_scale(loss_scale, initial_loss_scale, increment_period, multiplier)
        # Training builds run the operators of the folder.
        step = (join_models if get_target(target).in_place else fuse_folder)(folder)
        result = pipeline.scale(step.model, policy, loss=step.loss, updates=step.updates, target=target)
        result.save(output)
        report = dataclasses.replace(result.report, replaced=step.replaced or result.report.replaced)
    show_report(report, json, f"{folder} fused{'' if loss_scale is None else ' and scaled'} -> {output}")
    warn(f"the name {wanted} was taken: {given}" for wanted, given in step.renamed.items())
