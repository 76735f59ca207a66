"""Forward abstract interpretation of a graph: an element of a lattice for each value, bodies and captures included.

Each node is visited after its operands. The bodies of a node share one work list, nested ones included, until the
carried values of every Loop and Scan stand: a node is visited again only where an operand rose. The cost is linear in
the size of the graph, for lattices of a fixed height.
"""

from __future__ import annotations

import abc
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Generic, TypeVar

import onnx_ir as ir

from graphscale.graph.values import captured_values, subgraphs

if TYPE_CHECKING:
    from graphscale.flow.bodies import Body, BodyRun

__all__ = ["Domain", "Flow", "run"]

E = TypeVar("E")


class Domain(abc.ABC, Generic[E]):
    """A lattice and the effect of operators on its elements.

    Attributes:
        default: the element of a value that no seed reaches. A node whose operands all have it gives it.
    """

    default: E

    @abc.abstractmethod
    def transfer(self, node: ir.Node, operands: Sequence[E]) -> Sequence[E]:
        """Return the elements of the outputs of a node without bodies; a missing operand has the default."""

    @abc.abstractmethod
    def join(self, node: ir.Node, elements: Sequence[E]) -> E:
        """Return the least upper bound of the elements that meet in an output, or a carried value, of a node.

        The first is the present element of a carried value. With it the result is at least as high as that.
        """

    @abc.abstractmethod
    def opaque(self, node: ir.Node, operands: Sequence[E]) -> Sequence[E]:
        """Return the elements of the outputs of a node whose bodies are unknown, by its operands and captures."""

    def pass_border(self, value: ir.Value, element: E) -> E:
        """Return the element with which a value enters a body, or leaves a branch: what its constants tell."""
        return element

    def pass_round(self, element: E) -> E:
        """Return the element of the parts that the rounds of a body read or give, by that of the whole, or back."""
        return element

    def decide(self, condition: E) -> bool | None:
        """Return the truth of a condition by its element; None if both branches count."""
        return None

    def control(self, element: E, condition: E) -> E:
        """Return the element of an output of a node with bodies whose choice, or number of rounds, has an element."""
        return element

    def read(self, node: ir.Node, index: int, element: E) -> E:
        """Return the element with which a node reads an input."""
        return element

    def write(self, value: ir.Value, element: E) -> E:
        """Return the element of a value by the one from its node, or from the border of its body."""
        return element


def run(graph: ir.Graph, domain: Domain[E], seeds: Mapping[ir.Value, E]) -> Flow[E]:
    """Interpret a graph from the elements of some values on."""
    flow = Flow(domain, seeds)
    flow.visit_all(graph)
    return flow


class Flow(Generic[E]):
    """An interpretation: the elements of the values visited so far.

    Args:
        domain: the domain.
        seeds: elements of inputs, initializers, or results of nodes that are not visited.
        functions: the model-local functions, whose calls are interpreted by their nodes.

    Attributes:
        elements: the elements that differ from the default, or did.
    """

    def __init__(
        self,
        domain: Domain[E],
        seeds: Mapping[ir.Value, E] | None = None,
        functions: Mapping[ir.OperatorIdentifier, ir.Function] | None = None,
    ) -> None:
        self.domain = domain
        self.elements: dict[ir.Value, E] = dict(seeds or {})
        self._functions = functions or {}
        self._reads = type(domain).read is not Domain.read
        self._writes = type(domain).write is not Domain.write
        self._runs: dict[ir.Node, BodyRun[E]] = {}

    def of(self, value: ir.Value | None) -> E:
        """Return the element of a value."""
        return self.domain.default if value is None else self.elements.get(value, self.domain.default)

    def operands(self, node: ir.Node) -> list[E]:
        """Return the elements with which a node reads its inputs."""
        default, read, get = self.domain.default, self.domain.read, self.elements.get
        if not self._reads:
            return [get(value, default) for value in node.inputs]  # type: ignore[arg-type]
        return [default if v is None else read(node, i, get(v, default)) for i, v in enumerate(node.inputs)]

    def visit_all(self, nodes: Iterable[ir.Node]) -> None:
        """Visit nodes in execution order; those that no element reaches are passed over."""
        elements, functions = self.elements.keys(), self._functions
        transfer, operands = self.domain.transfer, self.operands
        for node in nodes:
            is_reached = not elements.isdisjoint(node.inputs)
            if (functions and node.op_identifier() in functions) or (node.attributes.data and subgraphs(node)):
                self.visit(node)
            elif is_reached:
                self.write(node, transfer(node, operands(node)))

    def visit(self, node: ir.Node) -> list[ir.Value]:
        """Interpret a node of the main graph anew, and return its outputs of changed element."""
        return self.write(node, self.evaluate(node))

    def write(self, node: ir.Node, results: Sequence[E]) -> list[ir.Value]:
        """Set the elements of a node's outputs, and return those of changed element."""
        elements, default, changed = self.elements, self.domain.default, []
        for value, element in zip(node.outputs, results, strict=True):
            if self._writes:
                element = self.domain.write(value, element)
            if elements.get(value, default) != element:
                elements[value] = element
                changed.append(value)
        return changed

    def evaluate(self, node: ir.Node) -> Sequence[E]:
        """Return the elements of a node's outputs; those of the values in its bodies are set."""
        if not (self._functions or subgraphs(node)):
            return self.domain.transfer(node, self.operands(node))
        from graphscale.flow.bodies import BodyRun, bodies_of  # few nodes have bodies

        if not bodies_of(node, self._functions):
            return self.transfer(node)
        if node not in self._runs:
            self._runs[node] = BodyRun(self, node, self._functions)
        return self._runs[node].run()

    def entering(self, node: ir.Node, bodies: Iterable[Body]) -> Iterator[tuple[ir.Value, E]]:
        """Yield the inputs of a node's bodies with the elements of its operands there, for the first round."""
        domain = self.domain
        for index, value, parts in ((*pair, body.parts) for body in bodies for pair in body.entering):
            given = node.inputs[index]
            if given is not None:
                element = domain.pass_border(given, domain.read(node, index, self.of(given)))
                yield value, domain.pass_round(element) if value in parts else element

    def transfer(self, node: ir.Node) -> Sequence[E]:
        """Return the elements of the outputs of a node whose bodies are none, or unknown."""
        if not subgraphs(node):
            return self.domain.transfer(node, self.operands(node))
        return self.domain.opaque(node, [*self.operands(node), *map(self.of, captured_values(node))])

    def set(self, value: ir.Value, element: E) -> bool:
        """Set the element of a value; return whether it changed."""
        if self.elements.get(value, self.domain.default) == element:
            return False
        self.elements[value] = element
        return True
