"""graphscale fuse: one training step in one file, from an artifact folder."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

from graphscale.cli import options
from graphscale.cli.options import argument, option, output_path
from graphscale.cli.show import show_summary, warn
from graphscale.errors import InvalidLossScaleError
from graphscale.files import writing
from graphscale.targets import TARGETS, get_target, target_names

__all__ = ["fuse"]


def fuse(
    folder: Annotated[Path, argument("A folder that generate_artifacts has written.")],
    output: Annotated[Path, output_path("The training step.")],
    target: Annotated[
        str,
        option(
            f"The runtime: {target_names()}. ort-training writes state in place, onnx gives it as outputs.",
            choices=TARGETS,
            metavar="TARGET",
            rich_help_panel="Output",
        ),
    ] = "onnx",
    loss_scale: options.AlsoScale = None,
    initial_loss_scale: options.InitialLossScale = None,
    increment_period: options.IncrementPeriod = None,
    multiplier: options.Multiplier = None,
) -> None:
    """Turn an artifact folder into one training step for a plain InferenceSession, scaled or not.

    Examples:
        graphscale fuse artifacts -o fused.onnx
        graphscale fuse artifacts -o fused.onnx --loss-scale dynamic
    """
    from graphscale import pipeline
    from graphscale.entries import inspection
    from graphscale.ort.fusing import fuse as fuse_folder
    from graphscale.ort.fusing import join_models

    writing.check_new_output(output)
    if loss_scale is None:
        numbers = {"initial-loss-scale": initial_loss_scale, "increment-period": increment_period}
        for name, value in {**numbers, "multiplier": multiplier}.items():
            if value is not None:
                raise InvalidLossScaleError(f"--{name} goes with --loss-scale dynamic")
        step = fuse_folder(folder, target=target)
        report = inspection.inspect(step.model, loss=step.loss, updates=step.updates)
        report = dataclasses.replace(report, replaced=step.replaced)
        step.save(output)
    else:
        policy = options.parse_loss_scale(loss_scale, initial_loss_scale, increment_period, multiplier)
        # Training builds run the operators of the folder.
        step = (join_models if get_target(target).in_place else fuse_folder)(folder)
        result = pipeline.scale(step.model, policy, loss=step.loss, updates=step.updates, target=target)
        result.save(output)
        report = dataclasses.replace(result.report, replaced=step.replaced or result.report.replaced)
    show_summary(report, f"{folder} fused{'' if loss_scale is None else ' and scaled'} -> {output}")
    warn(f"the name {wanted} was taken: {given}" for wanted, given in step.renamed.items())
