"""graphscale verify: hold a scaled graph against the original."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from graphscale.checks.verification import verify as verify_graphs
from graphscale.checks.verification.counterexample import save_case
from graphscale.cli.options import Gradient, Json, Loss, Update, parse_updates
from graphscale.cli.show_verify import replay_command, show_differences, show_verification
from graphscale.files import writing

__all__ = ["verify"]


def verify(
    original: Annotated[Path, typer.Argument(help="The training graph before scaling.", show_default=False)],
    scaled: Annotated[Path, typer.Argument(help="The training graph after scaling.", show_default=False)],
    runs: Annotated[int, typer.Option(min=0, help="How many random feeds to try; 0 for the proof alone.")] = 3,
    tolerance: Annotated[
        float,
        typer.Option(help="How far values may be off, relative to the largest element of a tensor; 0: the same bits."),
    ] = 0.0,
    providers: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,...",
            help="Execution providers, such as CUDAExecutionProvider. Default: CPU.",
            show_default=False,
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the random feeds.")] = 0,
    feeds: Annotated[
        Path | None, typer.Option(metavar="FILE.npz", help="Arrays for inputs, by name.", show_default=False)
    ] = None,
    dim: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=SIZE", help="The size of a symbolic axis. May be repeated.", show_default=False),
    ] = None,
    replay: Annotated[
        Path | None,
        typer.Option(metavar="FILE.npz", help="Run this counterexample alone.", show_default=False),
    ] = None,
    save_counterexample: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.npz",
            help="Where to write the first counterexample. Default: SCALED.counterexample.npz.",
            show_default=False,
        ),
    ] = None,
    loss: Loss = None,
    gradient: Gradient = None,
    update: Update = None,
    json: Json = False,
) -> None:
    """Prove a scaled graph right, and run it against the original: exit code 0 if all holds, 1 if not."""
    report = verify_graphs(
        original,
        scaled,
        runs=runs,
        tolerance=tolerance,
        providers=None if providers is None else [name.strip() for name in providers.split(",")],
        seed=seed,
        feeds=feeds,
        dims=_parse_dims(dim),
        loss=loss,
        gradients=gradient,
        updates=parse_updates(update),
        replay=replay,
    )
    command = None
    if report.counterexample is not None:
        target = replay
        if target is None:
            target = save_counterexample or scaled.with_name(f"{scaled.name}.counterexample.npz")
            writing.check_output(target)
            save_case(report.counterexample, target)
        command = replay_command(original, scaled, target)
    show_verification(report, json, f"{scaled} against {original}", command)
    if replay is not None and not json:
        show_differences(report)
    if not report.ok:
        raise typer.Exit(1)


def _parse_dims(options: list[str] | None) -> dict[str, int]:
    """Turn `NAME=SIZE` options into `{name: size}`."""
    found: dict[str, int] = {}
    for option in options or []:
        name, separator, size = option.rpartition("=")
        if not (name and separator and size.isascii() and size.isdecimal() and 0 < int(size) < 2**31):
            raise typer.BadParameter(f"--dim {option}: expected NAME=SIZE, the name of an axis and a whole number")
        found[name] = int(size)
    return found
