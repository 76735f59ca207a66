"""graphscale inspect: show what the analysis finds in a training graph."""

from __future__ import annotations

from graphscale import pipeline
from graphscale.cli.options import Gradient, Json, Loss, ModelPath, Seed, Update, parse_updates
from graphscale.cli.show import show_report

__all__ = ["inspect"]


def inspect(
    model: ModelPath,
    loss: Loss = None,
    seed: Seed = None,
    gradient: Gradient = None,
    update: Update = None,
    json: Json = False,
) -> None:
    """Show the loss, where the scale enters, the gradients and the carried state. Changes nothing."""
    report = pipeline.inspect(model, loss=loss, seed=seed, gradients=gradient, updates=parse_updates(update))
    show_report(report, json, str(model))
