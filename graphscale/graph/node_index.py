"""The nodes of a main graph by operator, found in one walk for many questions."""

from __future__ import annotations

import onnx_ir as ir

from graphscale.graph.values import inner_nodes, subgraphs
from graphscale.operators import Trait, operators_with

__all__ = ["NodeIndex"]


class NodeIndex:
    """The nodes of a main graph by operator, those in bodies included; later changes of the graph are not in it.

    Args:
        graph: the main graph.

    Attributes:
        by_operator: the nodes by the domain and the name of their operator.
        holders: the nodes of the main graph with bodies.
    """

    def __init__(self, graph: ir.Graph) -> None:
        self.by_operator: dict[tuple[str, str], list[ir.Node]] = {}
        self.holders: list[ir.Node] = []
        for node in graph:
            self._add(node)
            if node.attributes.data and subgraphs(node):
                self.holders.append(node)
        for holder in self.holders:
            for node in inner_nodes(holder):
                self._add(node)

    def _add(self, node: ir.Node) -> None:
        key = node.domain, node.op_type
        if key in self.by_operator:
            self.by_operator[key].append(node)
        else:
            self.by_operator[key] = [node]

    def nodes_of(self, op_type: str, domain: str = "") -> list[ir.Node]:
        """Return the nodes of an operator."""
        return self.by_operator.get((domain, op_type), [])

    def nodes_with(self, traits: Trait) -> list[ir.Node]:
        """Return the nodes whose operators have at least one of some traits."""
        return [node for key in operators_with(traits) & self.by_operator.keys() for node in self.by_operator[key]]
