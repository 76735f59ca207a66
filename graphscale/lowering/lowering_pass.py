"""The base class of passes that lower a scaled step."""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from typing import ClassVar

import onnx_ir as ir
from onnx_ir.passes import PassResult

from graphscale.graph.failures import cannot_fail
from graphscale.graph.marks import PASS_KEY
from graphscale.graph.values import subgraphs
from graphscale.lowering.thresholds import PRODUCTION, Thresholds
from graphscale.passes import GraphPass
from graphscale.step.scaled_step import read
from graphscale.step.training_step import Step

__all__ = ["LoweringPass", "is_inserted"]


def is_inserted(node: ir.Node) -> bool:
    """Return whether graphscale inserted a node; such a node never fails, unlike nodes moved into a branch."""
    if PASS_KEY not in node.metadata_props:
        return False
    return all(is_inserted(inner) or cannot_fail(inner) for body in subgraphs(node) for inner in body)


@dataclasses.dataclass(frozen=True)
class LoweringPass(GraphPass):
    """A pass over a scaled step, with the same results afterwards.

    Attributes:
        thresholds: the sizes from which a rewrite pays.
        relies_on: the premises for equal bits, for readers.
    """

    relies_on: ClassVar[str]
    thresholds: Thresholds = PRODUCTION

    def call(self, model: ir.Model) -> PassResult:
        """Lower a scaled step in place; a step that applies every update is unchanged."""
        step = read(model)
        is_changed = step.guard is not None and self.lower(step)
        if is_changed:
            _drop_unused(model.graph)
        return PassResult(model, is_changed)

    @abstractmethod
    def lower(self, step: Step) -> bool:
        """Lower a step, and return whether it has changed."""


def _drop_unused(graph: ir.Graph) -> None:
    """Remove inserted constants without readers: ONNX Runtime would warn of each."""
    for name, value in list(graph.initializers.items()):
        is_read = value.uses() or value.is_graph_output()
        if name.startswith("graphscale/") and not is_read and not value.is_graph_input():
            del graph.initializers[name]
