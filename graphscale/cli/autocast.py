"""graphscale autocast: put a training graph into mixed precision."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from graphscale.cli import options
from graphscale.cli.options import option, output_path
from graphscale.cli.show import is_verbose, join, make_console, make_table, print_json, say, warn

if TYPE_CHECKING:
    from graphscale.passes.casting.cast_report import AutocastReport

__all__ = ["autocast"]


def autocast(
    model: options.ModelPath,
    output: Annotated[Path | None, output_path("The graph or folder in mixed precision.")] = None,
    dtype: options.Dtype = "float16",
    emulate: Annotated[bool, option("Round in float32, to show float16's effects on a CPU.")] = False,
    allow: Annotated[list[str] | None, option("Run this operator in the small type. Repeatable.", metavar="OP")] = None,
    deny: Annotated[
        list[str] | None, option("Never run this operator in the small type. Repeatable.", metavar="OP")
    ] = None,
    keep: Annotated[
        list[str] | None, option("Keep this node in float32. Repeatable.", "--keep-node", metavar="NODE")
    ] = None,
    lists: Annotated[Path | None, option("Lists of operators.", metavar="FILE.json")] = None,
    loss_scale: options.AlsoScale = None,
    loss: options.Loss = None,
    seed_edge: options.SeedEdge = None,
    gradient: options.Gradient = None,
    update: options.Update = None,
    roles: options.RolesFile = None,
    target: options.Target = None,
    force: options.Force = False,
    dry_run: options.DryRun = False,
) -> None:
    """Put a training graph into mixed precision: contractions and safe operators between them in float16 or bfloat16.

    MODEL may also be a folder of artifacts of an ONNX Runtime training session; then the output is a folder, too.

    Examples:
        graphscale autocast original.onnx -o mixed.onnx
        graphscale autocast original.onnx -o mixed.onnx --deny Exp -v
        graphscale autocast original.onnx -o rounded.onnx --emulate
    """
    from graphscale import mixed_precision
    from graphscale.ort.artifacts.autocast_folder import autocast_artifacts

    single = {"--seed-edge": seed_edge, "--gradient": gradient, "--update": update, "--roles": roles}
    folder = options.is_folder(model, output, dry_run, single)
    settings = {
        "loss_scale": None if loss_scale is None else options.parse_loss_scale(loss_scale),
        "loss": loss,
        "target": target or ("ort-training" if folder else "onnx"),
        "emulate": emulate,
        "allow": allow or (),
        "deny": deny or (),
        "keep": keep or (),
        "lists": lists,
    }
    if folder:
        written = None if dry_run else output
        report = autocast_artifacts(model, written, dtype, force=force, **settings)  # type: ignore[arg-type]
    else:
        hints = {"seed": seed_edge, "gradients": gradient, "updates": options.parse_updates(update)}
        answers = options.read_roles(roles)
        result = mixed_precision.autocast(model, dtype, roles=answers, **hints, **settings)  # type: ignore[arg-type]
        report = result.report
        if output is not None and not dry_run:
            result.save(output)
    _show(report, f"{model} in mixed precision" + (" (dry run)" if dry_run else f" -> {output}"))


def _show(report: AutocastReport, title: str) -> None:
    print_json(report.to_dict)
    say(title)
    if is_verbose():
        _show_operators(report)
    if report.emulate:
        casts = f"{report.casts // 2} pairs of casts round to it"
    else:
        casts = f"{report.casts} casts stand at the borders"
    before, after = report.activation_bytes_before, report.activation_bytes_after
    say(
        f"{report.low_nodes} of {report.low_nodes + report.kept_nodes} nodes run in {report.dtype}; "
        f"{casts}; activations for the backward pass: {before:,} -> {after:,} bytes"
    )
    for constant in report.constants:
        say(f"kept in float32: {constant}")
    warn(report.warnings)


def _show_operators(report: AutocastReport) -> None:
    table = make_table(report.dtype, "float32", left="operator")
    table.add_column("why it stays float32", overflow="fold")
    for op in report.ops:
        why = join(f"{count}: {reason}" for reason, count in op.reasons.items())
        table.add_row(op.op, str(op.low or ""), str(op.kept or ""), why)
    make_console().print(table)
