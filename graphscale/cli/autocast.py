"""graphscale autocast: put a training graph into mixed precision."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from graphscale import mixed_precision
from graphscale.cli.options import (
    Gradient,
    Json,
    Loss,
    ModelPath,
    Seed,
    Target,
    Update,
    parse_loss_scale,
    parse_updates,
)
from graphscale.cli.show_autocast import show_autocast
from graphscale.files import writing
from graphscale.ort.artifacts.autocast_folder import autocast_artifacts
from graphscale.ort.artifacts.folder import holds_artifacts

__all__ = ["autocast"]


def autocast(
    model: ModelPath,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="Where to write the graph or folder.", show_default=False),
    ] = None,
    dtype: Annotated[str, typer.Option(metavar="float16|bfloat16", help="The small type.")] = "float16",
    emulate: Annotated[
        bool, typer.Option("--emulate", help="Round in float32: what float16 does, faithfully on a CPU.")
    ] = False,
    allow: Annotated[
        list[str] | None, typer.Option(metavar="OP", help="Run this operator in the small type.", show_default=False)
    ] = None,
    deny: Annotated[
        list[str] | None, typer.Option(metavar="OP", help="Never run it in the small type.", show_default=False)
    ] = None,
    keep: Annotated[
        list[str] | None, typer.Option(metavar="NODE", help="Keep this node in float32.", show_default=False)
    ] = None,
    lists: Annotated[
        Path | None, typer.Option(metavar="FILE.json", help="Lists of operators.", show_default=False)
    ] = None,
    loss_scale: Annotated[
        str | None,
        typer.Option(metavar="dynamic|NUMBER|PRESET|FILE.json", help="Scale the result, too.", show_default=False),
    ] = None,
    loss: Loss = None,
    seed: Seed = None,
    gradient: Gradient = None,
    update: Update = None,
    target: Target = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an output folder that is not empty.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Write nothing.")] = False,
    json: Json = False,
) -> None:
    """Put a training graph into mixed precision: contractions and what is safe between them in float16 or bfloat16.

    MODEL may also be a folder of artifacts of an ONNX Runtime training session; then OUT is a folder, too.
    """
    if output is None and not dry_run:
        raise typer.BadParameter("name the file to write with -o, or pass --dry-run")
    policy = None if loss_scale is None else parse_loss_scale(loss_scale, None, None, None)
    title = f"{model} in mixed precision" + (" (dry run)" if dry_run else f" -> {output}")
    lists_of = {"emulate": emulate, "allow": allow or (), "deny": deny or (), "keep": keep or (), "lists": lists}
    if holds_artifacts(model):
        for option, value in {"--seed": seed, "--gradient": gradient, "--update": update}.items():
            if value:
                raise typer.BadParameter(f"{option} is for a single graph; {model} is a folder of artifacts")
        written = None if dry_run else output
        report = autocast_artifacts(
            model,
            written,
            dtype,
            loss_scale=policy,
            loss=loss,
            target=target or "ort-training",
            force=force,
            **lists_of,  # type: ignore[arg-type]
        )
        show_autocast(report, json, title)
        return
    if output is not None:
        writing.check_output(output)
    result = mixed_precision.autocast(
        model,
        dtype,
        loss_scale=policy,
        loss=loss,
        seed=seed,
        gradients=gradient,
        updates=parse_updates(update),
        target=target or "onnx",
        **lists_of,  # type: ignore[arg-type]
    )
    if output is not None and not dry_run:
        result.save(output)
    show_autocast(result.report, json, title)
