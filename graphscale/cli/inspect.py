"""graphscale inspect: show what the analysis finds in a training graph."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from graphscale import pipeline
from graphscale.checks import drawing
from graphscale.cli.options import Gradient, Json, Loss, ModelPath, Seed, Update, parse_updates
from graphscale.cli.show import show_report

__all__ = ["inspect"]


def inspect(
    model: ModelPath,
    loss: Loss = None,
    seed: Seed = None,
    gradient: Gradient = None,
    update: Update = None,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw the graph into a page of HTML.", show_default=False)
    ] = None,
    json: Json = False,
) -> None:
    """Show the loss, where the scale enters, the gradients and the carried state. Changes nothing."""
    updates = parse_updates(update)
    if html is not None:
        drawing.check_page(html, model)
    report = pipeline.inspect(model, loss=loss, seed=seed, gradients=gradient, updates=updates)
    if html is not None:
        page = drawing.inspection_page(
            model, report, model.name, loss=loss, seed=seed, gradients=gradient, updates=updates
        )
        drawing.write_page(page, html)
    show_report(report, json, f"{model}" if html is None else f"{model} drawn -> {html}")
