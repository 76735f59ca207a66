"""Walks up and down a graph. All are iterative: a graph may be deeper than Python's stack."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import TypeVar

import onnx_ir as ir

from graphscale.graph.values import inputs_of, operands_of, subgraphs
from graphscale.operators import Trait, has_trait, operators_with

__all__ = [
    "NodeIndex",
    "ancestors",
    "eliminate",
    "is_contradiction",
    "reach",
    "source_by_trait",
    "source_of",
]

_T = TypeVar("_T")
_S = TypeVar("_S")


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


def reach(start: Iterable[_T], step: Callable[[_T], Iterable[_T]]) -> Iterator[_T]:
    """Yield some things and all that steps from them reach, each once, the nearest first.

    Without cycles, the order, and the stack's limit:

        def reach(start, step):
            return {*start}.union(*(reach(step(thing), step) for thing in start))
    """
    pending = list(dict.fromkeys(start))
    seen = set(pending)
    for thing in pending:
        yield thing
        for following in step(thing):
            if following not in seen:
                seen.add(following)
                pending.append(following)


def ancestors(
    values: Iterable[ir.Value],
    *,
    stop: Callable[[ir.Value], bool] | None = None,
    operands: Callable[[ir.Node], Iterable[ir.Value]] = operands_of,
) -> set[ir.Value]:
    """Return some values and their ancestors.

    By recursion:

        def ancestors(values):
            return {*values}.union(*(ancestors(operands(v.producer())) for v in values if v.producer() and not stop(v)))

    Args:
        values: the values to start from.
        stop: the values to stop at; None for none.
        operands: the operands of a node: its inputs and its subgraphs' captures by default.
    """

    def above(value: ir.Value) -> Iterable[ir.Value]:
        node = value.producer()
        return () if node is None or (stop is not None and stop(value)) else operands(node)

    return set(reach(values, above))


def source_of(
    value: ir.Value, operand: Callable[[ir.Node], ir.Value | None], across: Mapping[ir.Value, ir.Value] | None = None
) -> ir.Value:
    """Return the value at the top of a chain of nodes.

    Args:
        value: the value at its bottom.
        operand: the next operand of the chain at a node; None for a node outside the chain.
        across: the values on the other side of the border of a body.
    """
    across = across or {}
    value = across.get(value, value)
    while (node := value.producer()) is not None and (above := operand(node)) is not None:
        value = across.get(above, above)
    return value


def source_by_trait(value: ir.Value, traits: Trait, across: Mapping[ir.Value, ir.Value] | None = None) -> ir.Value:
    """Return the value at the top of a chain of first operands of operators with one of some traits."""
    return source_of(value, lambda node: node.inputs[0] if has_trait(node, traits) and node.inputs else None, across)


def is_contradiction(flag: ir.Value | None) -> bool:
    """Return whether a flag is the conjunction of a flag and its negation: never true, it only delays a value."""
    node = None if flag is None else flag.producer()
    if node is None or node.op_type != "And":
        return False
    flags = inputs_of(node)
    negations = (above for value in flags if (above := value.producer()) is not None and above.op_type == "Not")
    return any(negation.inputs[0] in flags for negation in negations)


def eliminate(candidates: Mapping[_T, Collection[_S]]) -> Iterator[tuple[_T, _S]]:
    """Yield the pairs that remain if every output with candidates gets one of its own.

    An output has no pair if its only candidate is also the only one of another output.

    Args:
        candidates: for each output, the inputs whose next value it may be.
    """
    left = {output: set(inputs) for output, inputs in candidates.items() if inputs}
    claimants: dict[_S, set[_T]] = {}
    for output, inputs in left.items():
        for value in inputs:
            claimants.setdefault(value, set()).add(output)
    leaves = [output for output, inputs in left.items() if len(inputs) == 1]
    while leaves:
        wanted: dict[_S, list[_T]] = {}
        for output in leaves:
            for value in left[output]:
                wanted.setdefault(value, []).append(output)
        leaves = []
        for value, outputs in wanted.items():
            if len(outputs) == 1:
                yield outputs[0], value
                for other in claimants[value]:
                    left[other].discard(value)
                    if len(left[other]) == 1:
                        leaves.append(other)
