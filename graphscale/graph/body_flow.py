"""The flow through nodes with subgraphs: the dependences of each single output.

Of a node with subgraphs, one output may depend on less than the node reads: on the values that its branches compute
this output from; in a Loop or Scan, on those that the body computes it from in any round, and on the number of rounds.
The length of what is scanned counts as no dependence, as all shapes.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator

import onnx_ir as ir

from graphscale.graph.values import inner_nodes, inputs_of, op_name, subgraphs
from graphscale.graph.walks import reach

__all__ = ["depends_on", "outputs_reached"]

# A node stands for the common dependences of its outputs.
_Vertex = ir.Value | ir.Node


def depends_on(value: ir.Value, source: ir.Value, graph: ir.Graph) -> bool:
    """Return whether one value of a main graph depends on another one."""
    start: list[_Vertex] = [value]
    return source in reach(start, _Flow(graph.all_nodes()).above)


def outputs_reached(node: ir.Node, values: Container[ir.Value]) -> set[ir.Value]:
    """Return the outputs of a node that depend on some of the values around it."""
    flow, start = _Flow((node, *inner_nodes(node))), list[_Vertex](node.outputs)
    below: dict[_Vertex, list[_Vertex]] = {}

    def above(vertex: _Vertex) -> Iterable[_Vertex]:
        maker = vertex if isinstance(vertex, ir.Node) else vertex.producer()
        if maker is not None and maker is not node and maker.graph is node.graph:
            return ()
        sources = flow.above(vertex)
        for source in sources:
            below.setdefault(source, []).append(vertex)
        return sources

    entering = [vertex for vertex in reach(start, above) if vertex in values]
    reached = set(reach(entering, lambda vertex: below.get(vertex, ())))
    return {value for value in node.outputs if value in reached}


class _Flow:
    """The dependences between values, those inside of bodies among them.

    Args:
        nodes: the nodes, those in bodies among them.
    """

    def __init__(self, nodes: Iterable[ir.Node]) -> None:
        self._entering: dict[ir.Value, list[ir.Value]] = {}
        for node in nodes:
            if _operator(node) in ("Loop", "Scan"):
                self._enter(node)

    def _enter(self, node: ir.Node) -> None:
        """Learn the sources of the inputs of a body: operands of the node, and results of the round before."""
        body, (first, count, ahead) = subgraphs(node)[0], _carried(node)
        for value, given in zip(body.inputs, node.inputs, strict=False):
            self._entering[value] = [] if given is None else [given]
        for value, following in zip(body.inputs[first : first + count], body.outputs[ahead:], strict=False):
            self._entering.setdefault(value, []).append(following)

    def above(self, vertex: _Vertex) -> Iterable[_Vertex]:
        """Return the direct dependences of a value, or those common to all outputs of a node."""
        if isinstance(vertex, ir.Node):
            return _shared(vertex)
        node = vertex.producer()
        return self._entering.get(vertex, ()) if node is None else (node, *_own(node, vertex.index() or 0))


def _operator(node: ir.Node) -> str:
    return node.op_type if node.domain in ("", "ai.onnx") else op_name(node)


def _carried(node: ir.Node) -> tuple[int, int, int]:
    """Return the index of the first input that a body carries, how many it carries, and the index of its first output.

    A Loop's body gives whether it goes on before all else, and is given the round and this flag.
    """
    first, ahead = (2, 1) if node.op_type == "Loop" else (0, 0)
    scanned = node.attributes["num_scan_inputs"].as_int() if node.op_type == "Scan" else 0
    return first, len(subgraphs(node)[0].inputs) - scanned - first, ahead


def _shared(node: ir.Node) -> Iterable[ir.Value]:
    """Return the direct dependences common to all outputs of a node."""
    bodies = subgraphs(node)
    operator = _operator(node)
    if not bodies or operator == "If":
        return inputs_of(node)
    if operator in ("Loop", "Scan"):
        first, _, ahead = _carried(node)
        return (*bodies[0].inputs[:first], *bodies[0].outputs[:ahead])
    return (*inputs_of(node), *(value for body in bodies for value in body.outputs))


def _own(node: ir.Node, index: int) -> Iterator[ir.Value]:
    """Yield the direct dependences of one output beside the common ones."""
    operator = _operator(node)
    for body in subgraphs(node):
        if operator == "If":
            yield body.outputs[index]
        elif operator in ("Loop", "Scan"):
            first, count, ahead = _carried(node)
            # Without a round, a carried value stays as it comes.
            yield body.inputs[first + index] if index < count else body.outputs[ahead + index]
