"""The choice between several outputs that may be the loss, by running the graph."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx_ir as ir

    from graphscale.analysis.edits import Unscaling

__all__ = ["Join", "LossCandidate", "choose_by_derivatives"]


@dataclasses.dataclass(frozen=True, eq=False)
class LossCandidate:
    """An output that may be the loss, or several, each with gradients of its own.

    Attributes:
        losses: the outputs.
        unscalings: the gradients of the losses; none where no scale fits the loss alone.
        scaled: the values that would scale with the loss.
    """

    losses: Sequence[ir.Value]
    unscalings: Sequence[Unscaling]
    scaled: Collection[ir.Value]


# Makes one candidate of several losses; None where no scale fits all of them.
Join = Callable[[Sequence["ir.Value"]], LossCandidate | None]


def choose_by_derivatives(
    graph: ir.Graph, candidates: Sequence[LossCandidate], join: Join
) -> tuple[LossCandidate | None, bool]:
    """Return the first candidate whose gradients in a graph are its derivatives, or None; and whether the graph ran.

    The choice runs the graph, as the checks of derivatives do. They stand on the analysis, and need a runtime or an
    evaluator: they are imported by the few graphs that leave several candidates, at the call.
    """
    choose = importlib.import_module("graphscale.checks.derivatives.choose_loss").choose_loss
    chosen: tuple[LossCandidate | None, bool] = choose(graph, candidates, join)
    return chosen
