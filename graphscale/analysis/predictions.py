"""Contractions of predictions and statistics, outside the backward pass.

A head with its own output, outside the loss, multiplies an activation by its own weights; a validation loss has a
forward pass on another batch. The backward pass of a contraction `y = a @ b` multiplies `a` or `b` by a value that
depends on `y`. The product of a value with itself is a covariance, and a moment of an optimizer averages it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set

import onnx_ir as ir

from graphscale.analysis.topology import Topology
from graphscale.analysis.updates import Factors, find_coefficients, possible_factors, same_type
from graphscale.graph.values import Use, inputs_of, is_scalar, operand_at, subgraphs
from graphscale.graph.walks import reach, source_by_trait, source_of
from graphscale.operators import Trait, has_trait, rule_of

__all__ = ["find_predictions", "find_statistics"]

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


def find_statistics(topology: Topology) -> Set[ir.Node]:
    """Find the contractions of covariances in moments, such as those of K-FAC, and the contractions behind them."""
    squares = {
        node.outputs[0]: node for node in topology.contractions & topology.backward if _is_square(topology, node)
    }
    if not squares:
        return frozenset()
    factors, averaged = possible_factors(topology.factors), set[ir.Node]()
    for output in topology.graph.outputs:
        moments = (v for v in topology.coefficients(output) if v not in topology.forward and same_type(output, v))
        if any(moments):
            averaged.update(squares[v] for v in find_coefficients(output, squares, factors, least=0.0))
    behind = topology.descendants(nodes=averaged)
    return {node for node in topology.contractions if node in averaged or any(v in behind for v in node.outputs)}


def _is_square(topology: Topology, node: ir.Node) -> bool:
    """Return whether a contraction multiplies a value with itself, but for views and numbers."""
    rule = rule_of(node)
    operands = () if rule is None else [node.inputs[i] for i in rule.operands(len(node.inputs))]
    sources = [_without_numbers(topology, value) for value in operands if value is not None]
    return len(sources) == 2 and sources[0] is sources[1]


def _without_numbers(topology: Topology, value: ir.Value) -> ir.Value:
    """Return the tensor that a value is a multiple of, by numbers."""

    def tensor(node: ir.Node) -> ir.Value | None:
        if has_trait(node, _VIEWS):
            return node.inputs[0]
        others = (
            [operand for operand in inputs_of(node) if not is_scalar(operand)] if node.op_type in ("Mul", "Div") else []
        )
        return others[0] if len(others) == 1 else None

    return source_of(value, tensor, topology.flat.across)


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
