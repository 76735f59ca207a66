"""graphscale scale: put loss scaling into a training graph."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from graphscale import pipeline
from graphscale.cli.options import (
    Gradient,
    IncrementPeriod,
    InitialLossScale,
    Json,
    Loss,
    ModelPath,
    Multiplier,
    Seed,
    Target,
    Update,
    parse_loss_scale,
    parse_updates,
)
from graphscale.cli.show import show_report
from graphscale.files import writing
from graphscale.ort.artifacts.folder import holds_artifacts
from graphscale.ort.artifacts.scale_folder import scale_artifacts

__all__ = ["scale"]


def scale(
    model: ModelPath,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="Where to write the scaled graph or folder.", show_default=False),
    ] = None,
    loss_scale: Annotated[
        str, typer.Option(metavar="dynamic|NUMBER|PRESET|FILE.json", help="The loss scale.")
    ] = "dynamic",
    initial_loss_scale: InitialLossScale = None,
    increment_period: IncrementPeriod = None,
    multiplier: Multiplier = None,
    loss: Loss = None,
    seed: Seed = None,
    gradient: Gradient = None,
    update: Update = None,
    target: Target = None,
    skip_nonfinite: Annotated[
        bool, typer.Option("--skip-nonfinite", help="Check and guard the step for a fixed scale as well.")
    ] = False,
    expose_scaled_loss: Annotated[
        bool, typer.Option("--expose-scaled-loss", help="Append the output scaled_loss.")
    ] = False,
    autocast: Annotated[
        str | None,
        typer.Option(metavar="float16|bfloat16", help="Put it into mixed precision first.", show_default=False),
    ] = None,
    telemetry: Annotated[
        bool, typer.Option("--telemetry", help="Count skips, and tell their cause and the zeros in the gradients.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace an output folder that is not empty.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Write nothing.")] = False,
    json: Json = False,
) -> None:
    """Put loss scaling into a training graph: scale, unscale, check, update, guard, and prove it.

    MODEL may also be a folder of artifacts of an ONNX Runtime training session; then OUT is a folder, too.
    """
    if output is None and not dry_run:
        raise typer.BadParameter("name the file to write with -o, or pass --dry-run")
    policy = parse_loss_scale(loss_scale, initial_loss_scale, increment_period, multiplier)
    title = f"{model} scaled" + (" (dry run)" if dry_run else f" -> {output}")
    if holds_artifacts(model):
        options = {
            "--seed": seed,
            "--gradient": gradient,
            "--update": update,
            "--expose-scaled-loss": expose_scaled_loss,
            "--telemetry": telemetry,
        }
        for option, value in options.items():
            if value:
                raise typer.BadParameter(f"{option} is for a single graph; {model} is a folder of artifacts")
        artifacts = scale_artifacts(
            model,
            None if dry_run else output,
            policy,
            loss=loss,
            target=target or "ort-training",
            skip_nonfinite=skip_nonfinite,
            force=force,
            autocast=autocast,
        )
        show_report(artifacts.report, json, title)
        return
    if output is not None:
        writing.check_output(output)
    result = pipeline.scale(
        model,
        policy,
        loss=loss,
        seed=seed,
        gradients=gradient,
        updates=parse_updates(update),
        target=target or "onnx",
        skip_nonfinite=skip_nonfinite,
        expose_scaled_loss=expose_scaled_loss,
        telemetry=telemetry,
        autocast=autocast,
    )
    if output is not None and not dry_run:
        result.save(output)
    show_report(result.report, json, title)
