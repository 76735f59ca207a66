"""Forward abstract interpretation of a graph: an element of a lattice for each value, bodies and captures included.

Each node is visited after its operands. The bodies of a node share one work list, nested ones included, until the
carried values of every Loop and Scan stand: a node is visited again only where an operand rose. The cost is linear in
the size of the graph, for lattices of a fixed height.
"""

from __future__ import annotations

import abc
import dataclasses
import heapq
import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Generic, TypeVar

import onnx_ir as ir

from graphscale.graph.values import captured_values, operands_of, subgraphs
from graphscale.graph.walks import carried_by

__all__ = ["Body", "Domain", "Flow", "bodies_of", "flatten", "has_bodies", "run"]

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
        self._layouts: dict[ir.Node, _Layout] = {}

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
        for node in nodes:
            if not elements.isdisjoint(node.inputs) or subgraphs(node) or (functions and _call(node, functions)):
                self.visit(node)

    def visit(self, node: ir.Node) -> list[ir.Value]:
        """Interpret a node of the main graph anew, and return its outputs of changed element."""
        elements, default, changed = self.elements, self.domain.default, []
        for value, element in zip(node.outputs, self.evaluate(node), strict=True):
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
        if not bodies_of(node, self._functions):
            return self._transfer(node)
        layout = self._layouts.get(node)
        if layout is None:
            layout = self._layouts[node] = _Layout(node, self._functions)
        return _BodyRun(self, layout).run()

    def entering(self, node: ir.Node, bodies: Iterable[Body]) -> Iterator[tuple[ir.Value, E]]:
        """Yield the inputs of a node's bodies with the elements of its operands there, for the first round."""
        domain = self.domain
        for index, value, parts in ((*pair, body.parts) for body in bodies for pair in body.entering):
            given = node.inputs[index]
            if given is not None:
                element = domain.pass_border(given, domain.read(node, index, self.of(given)))
                yield value, domain.pass_round(element) if value in parts else element

    def _transfer(self, node: ir.Node) -> Sequence[E]:
        if not subgraphs(node):
            return self.domain.transfer(node, self.operands(node))
        return self.domain.opaque(node, [*self.operands(node), *map(self.of, captured_values(node))])

    def _set(self, value: ir.Value, element: E) -> bool:
        if self.elements.get(value, self.domain.default) == element:
            return False
        self.elements[value] = element
        return True


# --- bodies -----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Body:
    """A body of a node, with the way of values through it.

    Attributes:
        inputs: its inputs.
        outputs: its outputs.
        nodes: its nodes.
        entering: `(index of the node's input, body input)`.
        carried: `(body output, body input)` of each value that goes on to the next round.
        leaving: the values that become the outputs of the node.
        conditions: values that decide whether there is a further round.
        parts: the inputs and outputs that hold a part of a value in each round.
    """

    inputs: Sequence[ir.Value]
    outputs: Sequence[ir.Value]
    nodes: Iterable[ir.Node]
    entering: Sequence[tuple[int, ir.Value]] = ()
    carried: Sequence[tuple[ir.Value, ir.Value]] = ()
    leaving: Sequence[ir.Value] = ()
    conditions: Sequence[ir.Value] = ()
    parts: Collection[ir.Value] = ()


def _call(node: ir.Node, functions: Mapping[ir.OperatorIdentifier, ir.Function]) -> ir.Function | None:
    return functions.get(node.op_identifier()) if functions else None


def has_bodies(node: ir.Node) -> bool:
    """Return whether a node has bodies that the interpreter knows."""
    return not node.domain and node.op_type in ("If", "Loop", "Scan") and bool(subgraphs(node))


def bodies_of(
    node: ir.Node, functions: Mapping[ir.OperatorIdentifier, ir.Function] = MappingProxyType({})
) -> Sequence[Body]:
    """Return the bodies of a node that the interpreter knows; other operators with subgraphs have none."""
    function = _call(node, functions)
    if function is not None:
        pairs = [(i, value) for i, value in enumerate(function.inputs) if i < len(node.inputs)]
        return [Body(function.inputs, function.outputs, function, pairs, leaving=function.outputs)]
    if not has_bodies(node):
        return ()
    graphs = subgraphs(node)
    if node.op_type == "If":
        return [Body((), body.outputs, body, leaving=body.outputs) for body in graphs]
    (body,), (first, count, ahead) = graphs, carried_by(node)
    # The condition of a Loop is carried as well; the number of the round is a new number.
    inputs = [(i, value) for i, value in enumerate(body.inputs) if (i > 0 or ahead == 0) and i < len(node.inputs)]
    states = list(zip(body.outputs, body.inputs[first - ahead : first + count], strict=False))
    stacked = body.outputs[ahead + count :]
    leaving = (*body.inputs[first : first + count], *stacked)
    conditions = body.inputs[1:2] if ahead else ()
    parts = {*body.inputs[first + count :], *stacked}
    return [Body(body.inputs, body.outputs, body, inputs, states, leaving, conditions, parts)]


def flatten(
    nodes: Iterable[ir.Node], functions: Mapping[ir.OperatorIdentifier, ir.Function] = MappingProxyType({})
) -> Iterator[tuple[ir.Node, Sequence[Body], bool]]:
    """Yield nodes in execution order, `(node, its bodies, whether the bodies end here)`.

    A node with bodies stands before and after the nodes in these.
    """
    stack: list[tuple[ir.Node | None, Sequence[Body], Iterator[ir.Node]]] = [(None, (), iter(nodes))]
    while stack:
        owner, around, rest = stack[-1]
        node = next(rest, None)
        if node is None:
            stack.pop()
            if owner is not None:
                yield owner, around, True
            continue
        bodies = bodies_of(node, functions)
        yield node, bodies, False
        if bodies:
            stack.append((node, bodies, itertools.chain.from_iterable(body.nodes for body in bodies)))


class _Layout:
    """The nodes in the bodies of a node, in one order: each node with bodies stands before and after these.

    Attributes:
        node: the node.
        steps: `(node, its bodies, whether the bodies end here)`.
        readers: the positions in `steps` that read a value.
        values: all values in the bodies.
    """

    def __init__(self, node: ir.Node, functions: Mapping[ir.OperatorIdentifier, ir.Function]) -> None:
        self.node = node
        self.steps: list[tuple[ir.Node, Sequence[Body], bool]] = []
        self.readers: dict[ir.Value, list[int]] = {}
        self.values: list[ir.Value] = []
        for step, bodies, ends in flatten([node], functions):
            inputs = (v for v in step.inputs if v is not None)
            if not bodies:
                self._add(step, bodies, ends, operands_of(step))
            elif ends:
                read = [value for body in bodies for value in (*body.outputs, *body.inputs)]
                self._add(step, bodies, ends, (*read, *inputs))
            else:
                self._add(step, bodies, ends, inputs)
                self.values += [value for body in bodies for value in body.inputs]
            if (ends or not bodies) and step is not node:
                self.values += step.outputs

    def _add(self, node: ir.Node, bodies: Sequence[Body], ends: bool, read: Iterable[ir.Value]) -> None:
        for value in dict.fromkeys(read):
            self.readers.setdefault(value, []).append(len(self.steps))
        self.steps.append((node, bodies, ends))


class _BodyRun(Generic[E]):
    """A run through the bodies of a node."""

    def __init__(self, flow: Flow[E], layout: _Layout) -> None:
        self._flow = flow
        self._domain = flow.domain
        self._layout = layout
        self._queue = list(range(len(layout.steps)))  # sorted, so a heap
        self._queued = set(self._queue)
        self._entered: set[ir.Value] = set()

    def run(self) -> Sequence[E]:
        """Return the elements of the node's outputs."""
        for value in self._layout.values:
            self._flow.elements.pop(value, None)
        results: Sequence[E] = ()
        while self._queue:
            position = heapq.heappop(self._queue)
            self._queued.discard(position)
            node, bodies, ends = self._layout.steps[position]
            if bodies and not ends:
                self._enter(node, bodies)
                continue
            outputs = self._leave(node, bodies) if bodies else self._flow._transfer(node)
            if node is self._layout.node:
                results = outputs
                continue
            for value, element in zip(node.outputs, outputs, strict=True):
                self._change(value, self._domain.write(value, element))
        return results

    def _enter(self, node: ir.Node, bodies: Sequence[Body]) -> None:
        for value, element in self._flow.entering(node, bodies):
            self._rise(node, value, element)

    def _leave(self, node: ir.Node, bodies: Sequence[Body]) -> list[E]:
        for after, value in (pair for body in bodies for pair in body.carried):
            self._rise(node, value, self._flow.of(after))
        domain, of = self._domain, self._flow.of
        if node.op_type == "If" and not node.domain:
            condition = domain.read(node, 0, of(node.inputs[0]))
            decided = domain.decide(condition)
            chosen = [b for b, g in zip(bodies, _conditions_of(node), strict=True) if decided in (None, g)]
            columns = zip(*(body.leaving for body in chosen), strict=True)
            return [domain.control(self._meet(node, column), condition) for column in columns]
        (body,) = bodies
        results = [domain.pass_round(of(value)) if value in body.parts else of(value) for value in body.leaving]
        counts = [domain.read(node, 0, of(node.inputs[0]))] if node.op_type == "Loop" and not node.domain else []
        for condition in (*counts, *(of(value) for value in body.conditions)):
            results = [domain.control(element, condition) for element in results]
        return results

    def _meet(self, node: ir.Node, values: Sequence[ir.Value]) -> E:
        """Return the element of an output of an If by those of its branches."""
        elements = [self._flow.of(value) for value in values]
        if len(elements) == 1 or any(element != elements[0] for element in elements):
            elements = [self._domain.pass_border(v, e) for v, e in zip(values, elements, strict=True)]
        return self._domain.join(node, elements)

    def _rise(self, node: ir.Node, value: ir.Value, element: E) -> None:
        """Join an element into a value that enters a body."""
        if value in self._entered:
            element = self._domain.join(node, [self._flow.of(value), element])
        else:
            self._entered.add(value)
            element = self._domain.write(value, element)
        self._change(value, element)

    def _change(self, value: ir.Value, element: E) -> None:
        if self._flow._set(value, element):
            for position in self._layout.readers.get(value, ()):
                if position not in self._queued:
                    self._queued.add(position)
                    heapq.heappush(self._queue, position)


def _conditions_of(node: ir.Node) -> list[bool]:
    """Return the condition under which an If runs each of its bodies."""
    graphs = [a for a in node.attributes.values() if a.type is ir.AttributeType.GRAPH]
    return [attribute.name == "then_branch" for attribute in graphs]
