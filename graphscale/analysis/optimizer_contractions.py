"""The contractions of an optimizer, such as Muon's and Shampoo's: they multiply finished gradients with each other.

A contraction of the backward pass multiplies a cotangent with a weight or an activation; one of the optimizer reads
only values that follow from gradients, and moments; beside a moment, also weights, as L-BFGS and Momo do. To unscale
before it costs nothing. As gradients count only values that no contraction of the backward pass goes on from.
"""

from __future__ import annotations

from collections.abc import Iterable, Set

import onnx_ir as ir

from graphscale.analysis.solve import Solver
from graphscale.analysis.topology import Topology
from graphscale.graph.values import is_scalar
from graphscale.graph.walks import producers_of, reach

__all__ = ["OptimizerContractions"]


class OptimizerContractions:
    """The contractions of one training graph that may be its optimizer's.

    Args:
        topology: forward, backward and dependence of every value.

    Attributes:
        nodes: backward contractions that read a state that the loss ignores, and those without a weight, an
            activation or a batch among their operands.
    """

    def __init__(self, topology: Topology) -> None:
        graph = topology.graph
        kept = {(v.dtype, tuple(v.shape)) for v in graph.outputs if v.shape is not None}
        batch = {
            v for v in graph.inputs if not is_scalar(v) and (v.shape is None or (v.dtype, tuple(v.shape)) not in kept)
        }
        self._topology = topology
        self._data = topology.descendants(batch)
        self._read = topology.descendants(batch | (topology.states & topology.forward))
        memory = {v for v in topology.states - batch if v not in topology.forward and not is_scalar(v)}
        remembered, backward = topology.descendants(memory), topology.contractions & topology.backward
        self._remembering = {n for n in backward if any(v in remembered for v in topology.operands(n))}
        self.nodes = self._remembering | {
            node
            for node in backward
            if all(v in topology.propagated or not self._depends(v, node) for v in topology.operands(node))
        }

    def are_behind_gradients(self, solver: Solver, missed: Iterable[ir.Node]) -> bool:
        """Return whether contractions depend on batch, weights and activations through finished gradients alone.

        Args:
            solver: has solved the graph without `nodes`.
            missed: contractions without a scaled operand.
        """
        topology, unscaled = self._topology, solver.plan.unscaled
        behind = topology.descendants(nodes={node for value in unscaled for node in topology.consumers(value)})

        def operands(node: ir.Node) -> list[ir.Value]:
            return [value for value in topology.operands(node) if value not in unscaled]

        def above(node: ir.Node) -> Set[ir.Node]:
            return producers_of(value for value in operands(node) if value in behind)

        return not solver.unscales_cotangents and not any(
            value not in behind and self._depends(value, node)
            for node in reach(missed, above)
            for value in operands(node)
        )

    def _depends(self, value: ir.Value, node: ir.Node) -> bool:
        """Return whether an operand depends on data, for a contraction also on what the forward pass reads."""
        if node in self._topology.contractions and node not in self._remembering:
            return value in self._read or value in self._topology.activation_dependent
        return value in self._data or value in self._topology.activation_dependent
