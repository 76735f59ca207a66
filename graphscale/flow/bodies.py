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
from graphscale.graph.values import has_bodies, inputs_of, operands_of, subgraphs

__all__ = ["Body", "BodyRun", "bodies_of", "flatten"]

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


class BodyRun(Generic[E]):
    """A run through the bodies of a node, again and again until nothing rises.

    The nodes in them have one order: each node with bodies stands before and after these.

    Args:
        flow: the `Flow` that the node belongs to.
        node: the node.
        functions: the model-local functions.
    """

    def __init__(self, flow: Any, node: ir.Node, functions: Mapping[ir.OperatorIdentifier, ir.Function]) -> None:
        self._flow, self._domain, self._node = flow, flow.domain, node
        self._steps = [*flatten([node], functions)]
        self._readers: dict[ir.Value, list[int]] = {}
        self._values: list[ir.Value] = []
        self._queue: list[int] = []
        self._queued: set[int] = set()
        self._entered: set[ir.Value] = set()
        for position, (step, bodies, ends) in enumerate(self._steps):
            read = inputs_of(step) if bodies else operands_of(step)
            if bodies and ends:
                read = (*(value for body in bodies for value in (*body.outputs, *body.inputs)), *read)
            for value in dict.fromkeys(read):
                self._readers.setdefault(value, []).append(position)
            if bodies and not ends:
                self._values += (value for body in bodies for value in body.inputs)
            elif step is not node:
                self._values += step.outputs

    def run(self) -> Sequence[E]:
        """Return the elements of the node's outputs."""
        self._queue = list(range(len(self._steps)))  # sorted, so a heap
        self._queued = set(self._queue)
        self._entered = set()
        for value in self._values:
            self._flow.elements.pop(value, None)
        results: Sequence[E] = ()
        while self._queue:
            position = heapq.heappop(self._queue)
            self._queued.discard(position)
            node, bodies, ends = self._steps[position]
            if bodies and not ends:
                for value, element in self._flow.entering(node, bodies):
                    self._rise(node, value, element)
                continue
            outputs = self._leave(node, bodies) if bodies else self._flow.transfer(node)
            if node is self._node:
                results = outputs
                continue
            for value, element in zip(node.outputs, outputs, strict=True):
                self._change(value, self._domain.write(value, element))
        return results

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
            for position in self._readers.get(value, ()):
                if position not in self._queued:
                    self._queued.add(position)
                    heapq.heappush(self._queue, position)


def _conditions_of(node: ir.Node) -> list[bool]:
    """Return the condition under which an If runs each of its bodies."""
    graphs = [a for a in node.attributes.values() if a.type is ir.AttributeType.GRAPH]
    return [attribute.name == "then_branch" for attribute in graphs]
