"""Contractions outside the backward pass: of activations that are computed once more, and of an optimizer.

A reversible layer computes its activations from its results, an implicit one at its fixed point. They are no copies of
forward values, but a cotangent is linear in the seed up to its gradient, and the derivatives need no more of them than
non-linear functions.

Optimizers, such as Muon and Shampoo, multiply finished gradients with each other. A contraction of the backward pass
multiplies a cotangent with a weight or an activation; one of the optimizer reads only moments and values computed from
gradients; beside a moment, also weights, as in L-BFGS and Momo. An unscaling before it costs nothing. Only values
without a further contraction of the backward pass count as gradients.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Mapping, Sequence, Set

import onnx_ir as ir

from graphscale.analysis.solve import Solver
from graphscale.analysis.topology import Topology
from graphscale.errors import NonlinearGradientError, SeedNotFoundError
from graphscale.graph.cones import producers_of
from graphscale.graph.values import Use, is_scalar, operand_at, subgraphs
from graphscale.graph.walks import reach
from graphscale.operators import Kind, rule_of

__all__ = ["OptimizerContractions", "find_reconstructions", "solve_without_others"]


def find_reconstructions(topology: Topology, cotangents: Mapping[ir.Node, tuple[Use, ...]]) -> Set[ir.Node]:
    """Find the contractions that compute activations, among those that may be backward.

    They lead to cotangents, but their results are in no linear way a part of a cotangent, or of a gradient.

    Args:
        topology: the topology of the graph, for its loss.
        cotangents: each contraction that may be backward, with its possible cotangents.
    """
    live = topology.ancestors(operand_at(use) for uses in cotangents.values() for use in uses)
    leading, found = set[ir.Value](), set[ir.Node]()

    def ends(node: ir.Node, value: ir.Value) -> bool:
        is_last = node in cotangents or value.is_graph_output() or not value.uses()
        return is_last and value not in live and topology.is_backward(value)

    for node in reversed(topology.nodes):
        if not any(v in leading or ends(node, v) for v in node.outputs):
            found |= {node} & cotangents.keys()
        elif node in cotangents:
            leading.update(topology.origin(operand_at(use)) for use in cotangents[node])
        elif live.isdisjoint(node.outputs):
            leading.update(topology.operands(node))  # the optimizer
        else:
            leading.update(_linear_operands(topology, node))
    return found


def _linear_operands(topology: Topology, node: ir.Node) -> Iterable[ir.Value]:
    """Return the operands that the results of a node are linear in, if they are so in one of them alone."""
    rule, operands = rule_of(node), topology.operands(node)
    if subgraphs(node):
        return operands
    if rule is None or rule.kind not in (Kind.LINEAR, Kind.PRODUCT, Kind.QUOTIENT):
        return ()
    return operands[:1] if rule.kind is Kind.QUOTIENT else operands


class OptimizerContractions:
    """The contractions of one training graph that may be its optimizer's.

    Args:
        topology: forward, backward and dependence of every value.

    Attributes:
        nodes: backward contractions that read a state outside the loss, and those without a weight, an activation or a
            batch among their operands.
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

    def are_behind_gradients(self, unscaled: Collection[ir.Value], missed: Iterable[ir.Node]) -> bool:
        """Return whether contractions depend on batch, weights and activations through finished gradients alone.

        Args:
            unscaled: the gradients of a solution without `nodes`.
            missed: contractions without a scaled operand.
        """
        topology = self._topology
        behind = topology.descendants(nodes={node for value in unscaled for node in topology.consumers(value)})

        def operands(node: ir.Node) -> list[ir.Value]:
            return [value for value in topology.operands(node) if value not in unscaled]

        def above(node: ir.Node) -> Set[ir.Node]:
            return producers_of(value for value in operands(node) if value in behind)

        return not any(
            value not in behind and self._depends(value, node)
            for node in reach(missed, above)
            for value in operands(node)
        )

    def _depends(self, value: ir.Value, node: ir.Node) -> bool:
        """Return whether an operand depends on data; for a contraction, also on operands of the forward pass."""
        if node in self._topology.contractions and node not in self._remembering:
            return value in self._read or value in self._topology.activation_dependent
        return value in self._data or value in self._topology.activation_dependent


def solve_without_others(
    topology: Topology, seed: Use | None, chosen: Sequence[ir.Value], again: Set[ir.Node]
) -> tuple[Solver, Set[ir.Node]] | None:
    """Solve without the contractions that compute activations, or without those that may be the optimizer's, too."""
    if not again:
        return _solve_without_optimizer(topology, seed, chosen)
    topology = topology.without(again)
    solver = Solver(topology, seed, chosen)
    with contextlib.suppress(NonlinearGradientError, SeedNotFoundError):
        solver.solve()
        # An activation depends on no cotangent.
        if solver.cotangents and not solver.unscales_cotangents and solver.plan.missed(again) == again:
            return solver, set()
    found = _solve_without_optimizer(topology, seed, chosen)
    return found if found is not None and found[0].plan.missed(again) == again else None


def _solve_without_optimizer(
    topology: Topology, seed: Use | None, chosen: Sequence[ir.Value]
) -> tuple[Solver, Set[ir.Node]] | None:
    """Solve without the contractions that may be the optimizer's; return None if one of those missed may be another."""
    optimizer = OptimizerContractions(topology)
    solver = Solver(topology, seed, chosen, optimizer.nodes)
    if not optimizer.nodes or not solver.cotangents:
        return None
    solver.solve()
    missed = solver.plan.missed(optimizer.nodes)
    if solver.unscales_cotangents or not optimizer.are_behind_gradients(solver.plan.unscaled, missed):
        return None
    return solver, missed
