"""A view of a main graph with the nodes of its bodies in their place, in the first round of each body.

A value may stand on two sides of the border of a body: the input of a body is the operand of the node around it, and an
output of that node is an output of the body; that of an If is one of two. Nothing is copied.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import onnx_ir as ir

from graphscale.graph.numbering import Part
from graphscale.graph.values import (
    Use,
    inputs_of,
    is_known_zero,
    main_node,
    main_nodes,
    operand_at,
    operands_of,
    subgraphs,
    uses_of,
)
from graphscale.graph.walks import NodeIndex
from graphscale.operators import OPERATORS, Operator

if TYPE_CHECKING:
    from graphscale.flow.bodies import Body

__all__ = ["FlatGraph", "find_origins"]


class FlatGraph:
    """The nodes of a main graph and of its bodies, and the ways of values across borders.

    Args:
        graph: the main graph.
        closed: True to take all nodes with bodies as such of unknown operators.
        index: its nodes, if they are known.

    Attributes:
        graph: the main graph.
        known: its nodes by operator.
        owners: for each nested graph, the node of the main graph around it.
        steps: `(node, its bodies, whether the bodies end here)` in execution order; a node with bodies stands before
            and after the nodes in these.
        nodes: all nodes in execution order; a node with bodies stands behind the nodes in these.
        index: the position of each node in `steps`.
        entries: the position of each node with bodies, before these.
        results: for each node with bodies, the outputs of these, body by body.
        exits: for outputs of bodies, the outputs of the nodes around them.
        opaque: the nodes with bodies that nothing is known of.
        origins: for inputs of bodies, the operand of the node around them, that of the outermost node.
        across: the same, and for outputs of Loop and Scan the output of the body.
    """

    def __init__(self, graph: ir.Graph, closed: bool = False, index: NodeIndex | None = None) -> None:
        self.graph = graph
        self.known = index or NodeIndex(graph)
        nodes = self.known.nodes
        self.owners = main_nodes(self.known.holders)
        self.steps: list[tuple[ir.Node, Sequence[Body], bool]] = [(node, (), False) for node in nodes]
        self.origins: dict[ir.Value, ir.Value] = {}
        if self.owners and not closed:
            from graphscale.flow.bodies import flatten  # few steps have bodies

            self.steps, self.origins = [*flatten(graph)], find_origins(self.known.holders)
        self.across: dict[ir.Value, ir.Value] = {}
        self.results: dict[ir.Node, list[ir.Value]] = {}
        self._inputs: dict[ir.Value, list[ir.Value]] = {}  # the inputs of bodies that a value is
        self.exits: dict[ir.Value, list[ir.Value]] = {}
        self.index: dict[ir.Node, int] = {}
        self.entries: dict[ir.Node, int] = {}
        for position, (node, bodies, ends) in enumerate(self.steps):
            if bodies and not ends:
                self.entries[node] = position
                for value in (value for body in bodies for value in body.inputs if value in self.origins):
                    origin = self.origins[value]
                    self.across[value] = self.across.get(origin, origin)
                    self._inputs.setdefault(origin, []).append(value)
                continue
            self.index[node] = position
            if bodies:
                self._leave(node, bodies)
        self.nodes = tuple(self.index)
        self.opaque = {n for n in self.nodes if n not in self.entries and subgraphs(n)} if self.owners else set()
        self._opaque = main_nodes(self.opaque)

    @functools.cached_property
    def _by_operator(self) -> list[tuple[Operator, list[ir.Node]]]:
        found = dict[tuple[str, str], list[ir.Node]]() if self.owners else self.known.by_operator
        for node in self.nodes if self.owners else ():
            found.setdefault((node.domain, node.op_type), []).append(node)
        return [(OPERATORS[kind], nodes) for kind, nodes in found.items() if kind in OPERATORS]

    def nodes_like(self, test: Callable[[Operator], bool]) -> list[ir.Node]:
        """Return the nodes whose operators pass a test, operator by operator."""
        return [node for operator, nodes in self._by_operator if test(operator) for node in nodes]

    def _leave(self, node: ir.Node, bodies: Sequence[Body]) -> None:
        ahead = int(node.op_type == "Loop")  # the condition of a Loop
        results = [body.outputs[ahead : ahead + len(node.outputs)] for body in bodies]
        self.results[node] = [*itertools.chain(*results)]
        for output, result in ((o, r) for each in results for o, r in zip(node.outputs, each, strict=False)):
            self.exits.setdefault(result, []).append(output)
            if len(bodies) == 1:
                self.across[output] = self.across.get(result, result)

    def sides(self, value: ir.Value) -> Sequence[ir.Value]:
        """Return a value, and the inputs of bodies that it is."""
        origin = self.origin(value)
        return (origin, *self._inputs.get(origin, ())) if self._inputs else (value,)

    def is_source(self, value: ir.Value) -> bool:
        """Return whether a value is an input or an initializer; inputs of bodies without an operand depend on none."""
        return value.producer() is None and (value.graph is self.graph or not value.is_graph_input())

    def uses_at(self, node: ir.Node, value: ir.Value) -> list[Use]:
        """Return the places where a node, or one in its unknown bodies, reads a value."""
        if node in self.opaque or node in self.entries:
            return [use for use in uses_of(value) if node in self.opaque and self.main_node(use.node) is node]
        return [Use(node, i) for i, read in enumerate(node.inputs) if read is not None and self.origin(read) is value]

    def origin(self, value: ir.Value) -> ir.Value:
        """Return the value that the input of a body is; the value itself for all others."""
        return self.origins.get(value, value) if self.origins else value

    def parts(self) -> Iterator[Part]:
        """Yield the nodes with their results and operands; a node with bodies once for each output.

        Inputs of bodies without an origin, such as the number of the round, depend on nothing.
        """
        for node, bodies, ends in self.steps:
            if not bodies:
                yield node, node.outputs, self.operands(node)
            elif ends:
                for value in node.outputs:
                    yield node, (value,), self.above(value)
            else:
                fresh = [value for body in bodies for value in body.inputs if value not in self.origins]
                if fresh:
                    yield node, fresh, ()

    def operands(self, node: ir.Node) -> tuple[ir.Value, ...]:
        """Return the values that a node reads: its inputs and captures, or the results of its bodies."""
        if not self.owners:
            return inputs_of(node)
        if node not in self.results:
            return tuple(map(self.origin, operands_of(node)))
        return (*self._choice(node), *map(self.origin, self.results[node]))

    def above(self, value: ir.Value) -> tuple[ir.Value, ...]:
        """Return the operands of a value, for an output of a node with bodies those of this output."""
        value = self.origin(value)
        node = value.producer()
        if node is None or node not in self.results:
            return () if node is None else self.operands(node)
        results = self.results[node][value.index() :: len(node.outputs)]
        return (*self._choice(node), *map(self.origin, results))

    def operand_at(self, use: Use) -> ir.Value:
        """Return the value that a node reads at an input, or one of the results of its bodies."""
        return self.results[use.node][use.idx] if use.node in self.results else operand_at(use)

    def _choice(self, node: ir.Node) -> tuple[ir.Value, ...]:
        return tuple(map(self.origin, inputs_of(node))) if node.op_type == "If" else ()

    def position(self, value: ir.Value) -> int:
        """Return the position of the node that computes a value; -1 for a source."""
        producer = self.origin(value).producer()
        return -1 if producer is None else self.index.get(producer, -1)

    def consumers(self, value: ir.Value) -> Collection[ir.Node]:
        """Return the nodes that read a value, on any side of a border, each once."""
        if not self.owners:
            return dict.fromkeys(node for node, _ in value.uses())
        sides = self.sides(value)
        readers = (self.main_node(node) for each in sides for node, _ in each.uses())
        found = dict.fromkeys(node for node in readers if node not in self.entries or node.op_type == "If")
        leaving = (output.producer() for each in sides for output in self.exits.get(each, ()))
        found.update((node, None) for node in leaving if node is not None)
        return found

    def main_node(self, node: ir.Node) -> ir.Node:
        """Return the node itself, or the one around it whose bodies nothing is known of."""
        return main_node(self._opaque, node) if self._opaque else node


def find_origins(nodes: Iterable[ir.Node]) -> dict[ir.Value, ir.Value]:
    """Map the inputs of bodies to the operands that they are; zeros that a sum begins with have every degree."""
    origins, nodes = dict[ir.Value, ir.Value](), [*filter(subgraphs, nodes)]
    if not nodes:
        return origins
    from graphscale.flow.bodies import flatten

    for node, bodies, ends in flatten(nodes):
        for index, value in (pair for body in bodies for pair in body.entering if not ends):
            given = node.inputs[index]
            if given is not None and not is_known_zero(given):
                origins[value] = origins.get(given, given)
    return origins
