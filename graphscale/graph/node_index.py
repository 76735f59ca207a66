"""One walk over a graph for many questions: its nodes by operator, and all names and types."""

from __future__ import annotations

import onnx_ir as ir

from graphscale.graph.values import subgraphs
from graphscale.operators import Trait, operators_with

__all__ = ["NodeIndex"]


class NodeIndex:
    """The nodes of a main graph by operator, with all names and dtypes, those in bodies included.

    Args:
        graph: the main graph. A change of it is in the index only after `refresh`.

    Attributes:
        nodes: the nodes of the main graph.
        holders: those with bodies.
        by_operator: all nodes, by the domain and the name of their operator.
        names: the names of nodes and values.
        dtypes: the dtypes of values, None for an unknown one.
    """

    def __init__(self, graph: ir.Graph) -> None:
        self._graph = graph
        self.refresh()

    def refresh(self) -> None:
        """Read the graph anew."""
        self.nodes = tuple(self._graph)
        self.holders: list[ir.Node] = []
        self.by_operator: dict[tuple[str, str], list[ir.Node]] = {}
        self.names: set[str] = set()
        self.dtypes: set[ir.DataType | None] = set()
        graphs = [self._graph]
        for graph in graphs:
            values = [*graph.inputs, *graph.initializers.values()]
            for node in graph if graph is not self._graph else self.nodes:
                self.by_operator.setdefault((node.domain, node.op_type), []).append(node)
                self.names.add(node.name or "")
                values += node.outputs
                if node.attributes.data and (bodies := subgraphs(node)):
                    graphs += bodies
                    self.holders += [node] if graph is self._graph else []
            self.names.update([value.name or "" for value in values])
            self.dtypes.update([value.dtype for value in values])

    def nodes_of(self, op_type: str, domain: str = "") -> list[ir.Node]:
        """Return the nodes of an operator."""
        return self.by_operator.get((domain, op_type), [])

    def nodes_with(self, traits: Trait) -> list[ir.Node]:
        """Return the nodes whose operators have at least one of some traits."""
        return [node for key in operators_with(traits) & self.by_operator.keys() for node in self.by_operator[key]]
