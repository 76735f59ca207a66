"""The links between the nodes of a main graph."""

from __future__ import annotations

from collections import defaultdict

import onnx_ir as ir

from graphscale.graph.values import operands_of

__all__ = ["Wiring"]


class Wiring:
    """The links between the nodes of a main graph, through subgraphs, too; constants are left out.

    Attributes:
        nodes: the nodes that a drawing may show, in graph order.
        index: the place of each.
        links: `(source, target, value)` for each value that a node reads from another, each once.
        sources: the links into each node.
        targets: the links out of each node.
    """

    def __init__(self, graph: ir.Graph) -> None:
        self.nodes = [node for node in graph if not _is_constant(node)]
        self.index = {node: i for i, node in enumerate(self.nodes)}
        self.links: list[tuple[ir.Node, ir.Node, ir.Value]] = []
        self.sources: dict[ir.Node, list[ir.Node]] = defaultdict(list)
        self.targets: dict[ir.Node, list[ir.Node]] = defaultdict(list)
        for node in self.nodes:
            for value in dict.fromkeys(operands_of(node)):
                producer = value.producer()
                if producer is not None and producer in self.index:
                    self.links.append((producer, node, value))
                    self.sources[node].append(producer)
                    self.targets[producer].append(node)


def _is_constant(node: ir.Node) -> bool:
    """Return whether a node is a mere constant, which is shown in its readers."""
    is_constant = node.op_type == "Constant" and node.domain in ("", "ai.onnx")
    return is_constant and not any(value.is_graph_output() for value in node.outputs)
