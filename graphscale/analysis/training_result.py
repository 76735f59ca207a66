"""The result of the analysis of a training graph."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import onnx_ir as ir

from graphscale.analysis.coverage import Coverage
from graphscale.analysis.degrees import Degree
from graphscale.analysis.edits import Place, Unscaling
from graphscale.analysis.roles.role_table import Roles
from graphscale.analysis.updates import Update

__all__ = ["TrainingGraph"]


@dataclasses.dataclass(frozen=True)
class TrainingGraph:
    """The result of an analysis, in values and nodes of the graph.

    Attributes:
        graph: the main graph.
        reads: the values that each of its nodes reads, in execution order: its inputs, and its subgraphs' captures.
        owners: for each nested graph, the node of the main graph that it belongs to.
        loss: the loss, a scalar floating-point value.
        loss_found: the way the loss was found.
        places: the places where the scale enters.
        unscalings: those where it comes out: the values divided by it are the gradients.
        roles: the role of each input and output.
        updates: the pairs of carried state, as far as they are certain.
        accumulators: the in-place accumulators that gradients flow into.
        coverage: the share of backward contractions and gradient operators that compute on a scaled operand.
        degrees: the degree that each value will have in the loss scale, where it is not 0.
        warnings: notes for the user, a sentence each.
    """

    graph: ir.Graph
    reads: Mapping[ir.Node, tuple[ir.Value, ...]]
    owners: Mapping[ir.Graph, ir.Node]
    loss: ir.Value
    loss_found: str
    places: tuple[Place, ...]
    unscalings: tuple[Unscaling, ...]
    roles: Roles
    updates: tuple[Update, ...]
    accumulators: tuple[ir.Node, ...]
    coverage: Coverage
    degrees: Mapping[ir.Value, Degree]
    warnings: tuple[str, ...]

    @property
    def gradients(self) -> tuple[ir.Value, ...]:
        """The values that are divided by the scale, in graph order."""
        return tuple(unscale.value for unscale in self.unscalings)

    @property
    def nodes(self) -> tuple[ir.Node, ...]:
        """The nodes of the main graph, in execution order."""
        return tuple(self.reads)
