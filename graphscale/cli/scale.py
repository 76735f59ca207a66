"""graphscale scale: put loss scaling into a training graph."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer

from graphscale.cli import options
from graphscale.cli.options import option
from graphscale.cli.show import show_report

__all__ = ["scale"]


def scale(
    model: options.ModelPath,
    output: Annotated[Path | None, option("Where to write the scaled graph or folder.", "-o", "--output")] = None,
    loss_scale: Annotated[str, option("The loss scale.", metavar=options.LOSS_SCALE)] = "dynamic",
    initial_loss_scale: options.InitialLossScale = None,
    increment_period: options.IncrementPeriod = None,
    multiplier: options.Multiplier = None,
    loss: options.Loss = None,
    seed: options.Seed = None,
    gradient: options.Gradient = None,
    update: options.Update = None,
    roles: options.RolesFile = None,
    keep: options.Keep = None,
    force_roles: options.ForceRoles = False,
    target: options.Target = None,
    skip_nonfinite: Annotated[bool, option("Check and guard the step for a fixed scale as well.")] = False,
    expose_scaled_loss: Annotated[bool, option("Append the output scaled_loss.")] = False,
    autocast: Annotated[str | None, option("Put it into mixed precision first.", metavar="float16|bfloat16")] = None,
    telemetry: Annotated[
        str | None,
        option(
            "Count skips, and tell their cause and the zeros in the gradients; with ranges also measure each gradient, "
            "with activations also name the first forward value that is not finite.",
            metavar="[ranges|activations|ranges,activations]",
        ),
    ] = None,
    telemetry_every: Annotated[
        int | None, option("Measure the gradients every N-th step. Default: 100.", metavar="N")
    ] = None,
    no_lower: Annotated[bool, option("Of a folder: leave the models plain, which costs more on a CPU.")] = False,
    force: options.Force = False,
    dry_run: options.DryRun = False,
    json: options.Json = False,
) -> None:
    """Put loss scaling into a training graph: scale, unscale, check, update, guard, and prove it.

    MODEL may also be a folder of artifacts of an ONNX Runtime training session; then OUT is a folder, too.
    """
    from graphscale import pipeline
    from graphscale.ort.artifacts.scale_folder import scale_artifacts
    from graphscale.passes import AddTelemetry

    hints = {"--seed": seed, "--gradient": gradient, "--update": update, "--roles": roles, "--keep": keep}
    more = {"--expose-scaled-loss": expose_scaled_loss, "--telemetry": telemetry is not None}
    counting = None if telemetry is None else AddTelemetry.of(telemetry or True)
    if telemetry_every is not None:
        if counting is None or not counting.ranges:
            raise typer.BadParameter("--telemetry-every goes with --telemetry ranges")
        counting = dataclasses.replace(counting, every=telemetry_every)
    folder = options.is_folder(model, output, dry_run, {**hints, **more})
    if no_lower and not folder:
        raise typer.BadParameter("--no-lower is for a folder of artifacts; a graph is lowered for ort-cpu alone")
    policy = options.parse_loss_scale(loss_scale, initial_loss_scale, increment_period, multiplier)
    common: dict[str, Any] = {"loss": loss, "skip_nonfinite": skip_nonfinite, "autocast": autocast}
    common["target"] = target or ("ort-training" if folder else "onnx")
    if folder:
        written = None if dry_run else output
        report = scale_artifacts(model, written, policy, force=force, lower=not no_lower, **common).report
    else:
        result = pipeline.scale(
            model,
            policy,
            seed=seed,
            gradients=gradient,
            updates=options.parse_updates(update),
            roles=options.read_roles(roles),
            keep=keep,
            force_roles=force_roles,
            expose_scaled_loss=expose_scaled_loss,
            telemetry=counting or False,
            **common,
        )
        report = result.report
        if output is not None and not dry_run:
            result.save(output)
    show_report(report, json, f"{model} scaled" + (" (dry run)" if dry_run else f" -> {output}"))
