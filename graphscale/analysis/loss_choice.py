"""The choice between several outputs that may be the loss, for a caller that can run the graph.

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


class LossChoice:
    """The way to choose between losses.

    Attributes:
        choose: returns the first candidate whose gradients in a graph are its derivatives, or None; and whether the
            graph was run.
    """

    choose: Callable[[ir.Graph, Sequence[LossCandidate], Join], tuple[LossCandidate | None, bool]] = staticmethod(
        lambda graph, candidates, join: (None, False)
    )
