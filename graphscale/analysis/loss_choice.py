"""The choice between outputs that may each be the loss, which is left to whoever can run the graph.

The package sets `choose`; the analysis itself needs no runtime.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx_ir as ir

    from graphscale.analysis.edits import Unscaling

__all__ = ["Join", "LossCandidate", "LossChoice"]


@dataclasses.dataclass(frozen=True, eq=False)
class LossCandidate:
    """An output that may be the loss, or several that may each be the loss of gradients of their own.

    Attributes:
        losses: the outputs.
        unscalings: their gradients; none where no scale fits the loss alone.
        scaled: the values that would scale with the loss.
    """

    losses: Sequence[ir.Value]
    unscalings: Sequence[Unscaling]
    scaled: Collection[ir.Value]


# Makes one candidate of several losses; None where no scale fits them all.
Join = Callable[[Sequence["ir.Value"]], LossCandidate | None]


class LossChoice:
    """The way to choose between losses.

    Attributes:
        choose: returns the first candidate whose gradients in a graph are its derivatives, None where none is known to
            have such gradients; and whether something ran the graph.
    """

    choose: Callable[[ir.Graph, Sequence[LossCandidate], Join], tuple[LossCandidate | None, bool]] = staticmethod(
        lambda graph, candidates, join: (None, False)
    )
