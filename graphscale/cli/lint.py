"""graphscale lint: look for mistakes in the loss scaling of a training graph."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from graphscale.cli.options import Json, ModelPath
from graphscale.cli.show_lint import show_lint
from graphscale.files import writing

__all__ = ["lint"]


def lint(
    model: ModelPath,
    scale: Annotated[str | None, typer.Option(help="The loss scale. Default: found.", show_default=False)] = None,
    select: Annotated[
        list[str] | None,
        typer.Option(metavar="CODE", help="Report this code alone (GS201), or these (GS2). May be repeated."),
    ] = None,
    ignore: Annotated[
        list[str] | None, typer.Option(metavar="CODE", help="Do not report this code. May be repeated.")
    ] = None,
    sarif: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the findings in SARIF 2.1.0.", show_default=False)
    ] = None,
    json: Json = False,
) -> None:
    """Look for mistakes in the loss scaling of a training graph, scaled or not, by graphscale or by hand.

    Exit code 1 if there is an error or a warning.
    """
    from graphscale.checks.linting import lint as find
    from graphscale.checks.linting.sarif import write_sarif

    if sarif is not None:
        writing.check_output(sarif)
    report = find(model, scale=scale, select=select or (), ignore=ignore or ())
    if sarif is not None:
        write_sarif(report, model, sarif)
    show_lint(report, json, str(model))
    if not report.clean:
        raise typer.Exit(1)
