"""graphscale scale: put loss scaling into a training graph."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Annotated, Any

import typer

from graphscale.cli import options
from graphscale.cli.options import option, output_path
from graphscale.cli.show import say, show_summary

__all__ = ["scale"]

_policy = functools.partial(option, rich_help_panel="Loss scale")
_telemetry = functools.partial(option, rich_help_panel="Telemetry")
_output = functools.partial(option, rich_help_panel="Output")


def scale(
    model: options.ModelPath,
    output: Annotated[Path | None, output_path("The scaled graph or folder.")] = None,
    loss_scale: options.LossScaleOption = "dynamic",
    initial_loss_scale: options.InitialLossScale = None,
    increment_period: options.IncrementPeriod = None,
    multiplier: options.Multiplier = None,
    loss: options.Loss = None,
    seed_edge: options.SeedEdge = None,
    gradient: options.Gradient = None,
    update: options.Update = None,
    roles: options.RolesFile = None,
    keep: options.Keep = None,
    force_roles: options.ForceRoles = False,
    accept: options.Accept = False,
    skip_nonfinite: Annotated[bool, _policy("Check and guard the step for a fixed scale as well.")] = False,
    expose_scaled_loss: Annotated[bool, option("Append the output scaled_loss.")] = False,
    gradient_dtype: Annotated[
        str | None,
        option(
            "float32: gradients that leave the graph in a smaller type are float32 outputs.",
            choices=("float32",),
            metavar="TYPE",
        ),
    ] = None,
    autocast: options.DtypeBefore = None,
    telemetry: Annotated[
        str | None,
        _telemetry(
            "Count skips, with their cause and the zeros in the gradients. ranges measures each gradient, too, and "
            "activations names the first forward value that is not finite. Both: ranges,activations.",
            choices=("ranges", "activations", "ranges,activations"),
            metavar="[FORM]",
        ),
    ] = None,
    telemetry_every: Annotated[
        int | None, _telemetry("Measure the gradients every N-th step. Default: 100.", metavar="N")
    ] = None,
    no_try: Annotated[bool, option("Do not run the scaled step beside the original.")] = False,
    no_lower: Annotated[bool, _output("For a folder: leave the models plain, at a higher cost on a CPU.")] = False,
    target: options.Target = None,
    force: options.Force = False,
    dry_run: options.DryRun = False,
) -> None:
    """Put loss scaling into a training graph: scale, unscale, check, update, guard, prove it, and try it.

    Where ONNX Runtime is installed, the scaled step runs beside the original, in a process of its own with limits.

    MODEL may also be a folder of artifacts of an ONNX Runtime training session; then the output is a folder, too.

    Examples:
        graphscale scale original.onnx -o scaled.onnx
        graphscale scale original.onnx -o scaled.onnx --loss-scale torch --telemetry
        graphscale scale original.onnx --loss loss --roles roles.json --dry-run -v
        graphscale scale artifacts -o scaled_artifacts
    """
    from graphscale import pipeline
    from graphscale.analysis.roles.role_table import RoleTable
    from graphscale.ort.artifacts.scale_folder import scale_artifacts
    from graphscale.passes import AddTelemetry

    hints = {"--seed-edge": seed_edge, "--gradient": gradient, "--update": update, "--roles": roles, "--keep": keep}
    more = {
        "--accept": accept,
        "--expose-scaled-loss": expose_scaled_loss,
        "--gradient-dtype": gradient_dtype,
        "--telemetry": telemetry is not None,
        "--no-try": no_try,
    }
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
            seed=seed_edge,
            gradients=gradient,
            updates=options.parse_updates(update),
            roles=options.read_roles(roles),
            keep=keep,
            force_roles=force_roles,
            accept=accept,
            expose_scaled_loss=expose_scaled_loss,
            gradient_dtype=gradient_dtype,
            telemetry=counting or False,
            trial=not no_try,
            **common,
        )
        report = result.report
        if output is not None and not dry_run:
            result.save(output)
    show_summary(report, f"{model} scaled" + (" (dry run)" if dry_run else f" -> {output}"))
    for entry in RoleTable(report.roles).accepted:
        say(f"{entry.name}: {entry}")
