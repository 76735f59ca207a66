"""Contractions outside the backward pass: of predictions, of activations that are computed once more, of an optimizer.

A head with its own output, outside the loss, multiplies an activation by its own weights; a validation loss has a
forward pass on another batch. The backward pass of a contraction `y = a @ b` multiplies `a` or `b` by a value that
depends on `y`.

A reversible layer computes its activations from its results, an implicit one at its fixed point. They are no copies of
forward values, but a cotangent is linear in the seed up to its gradient, and the derivatives need no more of them than
non-linear functions.

Optimizers, such as Muon and Shampoo, multiply finished gradients with each other. A contraction of the backward pass
multiplies a cotangent with a weight or an activation; one of the optimizer reads only moments and values computed from
gradients; beside a moment, also weights, as in L-BFGS and Momo. An unscaling before it costs nothing. Only values
without a further contraction of the backward pass count as gradients.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Set

import onnx_ir as ir

from graphscale.analysis.topology import Topology
from graphscale.analysis.updates import Factors
from graphscale.graph.values import Use, is_scalar, operand_at, subgraphs
from graphscale.graph.walks import producers_of, reach, source_by_trait
from graphscale.operators import Kind, Trait, has_trait, rule_of

__all__ = ["OptimizerContractions", "find_predictions", "find_reconstructions"]

_VIEWS = Trait.VIEW | Trait.PERMUTE | Trait.REPEAT | Trait.MOVE | Trait.PART


def find_predictions(topology: Topology, cotangents: Mapping[ir.Node, tuple[Use, ...]]) -> Set[ir.Node]:
    """Find the contractions that compute predictions, among those that may be backward.

    Args:
        topology: the topology of the graph, for its loss.
        cotangents: each contraction that may be backward, with its possible cotangents.

    Returns:
        the contractions that are not backward, and depend on no backward one; none if these are all.
    """
    first = [node for node in cotangents if not any(v in topology.propagated for v in topology.operands(node))]
    forward = topology.contractions - topology.backward
    differentiating = {node for node in first if _differentiates(topology, node, forward)}
    if len(differentiating) == len(first) and topology.propagating & topology.backward <= cotangents.keys():
        return set()
    read = topology.ancestors(operand_at(use) for node in differentiating for use in cotangents[node])
    seeds = {_source(topology, operand_at(use)) for node in differentiating for use in cotangents[node]}

    def shares_cotangent(node: ir.Node) -> bool:
        # The gradient of a bias is such a product, of a cotangent with ones.
        operands = topology.operands(node)
        return any(_source(topology, v) in seeds or (v in read and topology.is_backward(v)) for v in operands)

    differentiating |= {node for node in first if shares_cotangent(node)}
    below = topology.descendants(nodes=differentiating)

    def is_forward(value: ir.Value) -> bool:
        return value in topology.activation_dependent or _source(topology, value) in topology.forward

    def predicts(node: ir.Node) -> bool:
        operands = topology.operands(node)
        return any(map(is_forward, operands)) and not any(v in below for v in operands)

    rest = {node for node in cotangents if node not in differentiating and predicts(node)}
    behind = topology.descendants(nodes=rest)
    later = (n for n in topology.contractions & topology.backward if any(v in behind for v in topology.operands(n)))
    # Another loss has a backward pass of its own.
    others = [node for node in later if _differentiates(topology, node, topology.contractions)]
    read = topology.ancestors(value for node in others for value in topology.operands(node))
    rest = {node for node in rest.difference(others) if not any(result in read for result in node.outputs)}
    return rest if len(rest) < len(cotangents) else set()


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


def _differentiates(topology: Topology, node: ir.Node, forward: Set[ir.Node]) -> bool:
    """Return whether a node is a gradient operator, or multiplies a cotangent with an operand of a forward one.

    Args:
        topology: of the graph.
        node: a contraction or gradient operator.
        forward: the contractions that may be differentiated.
    """
    rule = rule_of(node)
    if rule is None or rule.gradient or subgraphs(node):
        return True
    operands = [node.inputs[i] for i in rule.operands(len(node.inputs))]
    values = [value for value in operands if value is not None]
    factors = Factors()
    for value in values:
        readers = _readers(topology, _source(topology, value), forward)
        results = {result for reader in readers for result in reader.outputs}
        for other in values if results else ():
            # The cotangent of a linear loss is a constant, or the other operand of a product.
            source = _source(topology, other)
            if other is not value and (
                source in topology.tail or factors[source] or not results.isdisjoint(topology.ancestors([other]))
            ):
                return True
    return False


def _readers(topology: Topology, value: ir.Value, among: Set[ir.Node]) -> Iterator[ir.Node]:
    """Yield the readers of a value, or of its views, among some contractions."""

    def views(each: ir.Value) -> list[ir.Value]:
        nodes = (node for node in topology.consumers(each) if node not in among and has_trait(node, _VIEWS))
        return [result for node in nodes for result in node.outputs]

    return (node for each in reach([value], views) for node in topology.consumers(each) if node in among)


def _source(topology: Topology, value: ir.Value) -> ir.Value:
    """Return the source of a view or a part; that of the first forward pass for a recomputed value."""
    source = source_by_trait(value, _VIEWS, topology.flat.across)
    again = topology.recomputed.get(source)
    return source if again is None else source_by_trait(again, _VIEWS, topology.flat.across)


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
