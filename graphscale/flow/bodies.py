"""The bodies of nodes: the ways of values through them, and one run through all bodies of a node.

They share one work list, nested ones included, until the carried values of every Loop and Scan stand.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Generic, TypeVar

import onnx_ir as ir

from graphscale.graph.cones import carried_by
from graphscale.graph.values import has_bodies, operands_of, subgraphs

__all__ = ["Body", "BodyRun", "Layout", "bodies_of", "flatten"]

E = TypeVar("E")


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


def bodies_of(
    node: ir.Node, functions: Mapping[ir.OperatorIdentifier, ir.Function] = MappingProxyType({})
) -> Sequence[Body]:
    """Return the bodies of a node that the interpreter knows; other operators with subgraphs have none."""
    function = functions.get(node.op_identifier()) if functions else None
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


class Layout:
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


class BodyRun(Generic[E]):
    """A run through the bodies of a node.

    Args:
        flow: the `Flow` that the node belongs to.
        layout: the nodes in the bodies.
    """

    def __init__(self, flow: Any, layout: Layout) -> None:
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
            outputs = self._leave(node, bodies) if bodies else self._flow.transfer(node)
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
        joined: E = self._domain.join(node, elements)
        return joined

    def _rise(self, node: ir.Node, value: ir.Value, element: E) -> None:
        """Join an element into a value that enters a body."""
        if value in self._entered:
            element = self._domain.join(node, [self._flow.of(value), element])
        else:
            self._entered.add(value)
            element = self._domain.write(value, element)
        self._change(value, element)

    def _change(self, value: ir.Value, element: E) -> None:
        if self._flow.set(value, element):
            for position in self._layout.readers.get(value, ()):
                if position not in self._queued:
                    self._queued.add(position)
                    heapq.heappush(self._queue, position)


def _conditions_of(node: ir.Node) -> list[bool]:
    """Return the condition under which an If runs each of its bodies."""
    graphs = [a for a in node.attributes.values() if a.type is ir.AttributeType.GRAPH]
    return [attribute.name == "then_branch" for attribute in graphs]
