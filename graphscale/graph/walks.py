"""Walks up and down a graph. All are iterative: a graph may be deeper than Python's stack."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import onnx_ir as ir

from graphscale.graph.values import is_scalar, operands_of
from graphscale.operators import Trait, has_trait

__all__ = [
    "ancestors",
    "descendants",
    "follows_from_numbers",
    "nodes_above",
    "producers_of",
    "reach",
    "source_by_trait",
    "source_of",
]

_T = TypeVar("_T")


def reach(start: Iterable[_T], step: Callable[[_T], Iterable[_T]]) -> Iterator[_T]:
    """Yield some things and all that steps lead to from them, each once, the nearest first.

    Without the order and the stack's limit, on what has no cycle:

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
    """Return the values that some values depend on, themselves included.

    By recursion:

        def ancestors(values):
            return {*values}.union(*(ancestors(operands(v.producer())) for v in values if v.producer() and not stop(v)))

    Args:
        values: the values to start from.
        stop: the values not to go up from; None for none.
        operands: the values that a node depends on: its inputs and its subgraphs' captures by default.
    """

    def above(value: ir.Value) -> Iterable[ir.Value]:
        node = value.producer()
        return () if node is None or (stop is not None and stop(value)) else operands(node)

    return set(reach(values, above))


def follows_from_numbers(value: ir.Value) -> bool:
    """Return whether a value depends on no graph input but numbers, as a rate by a schedule does."""
    return all(is_scalar(each) for each in ancestors([value]) if each.is_graph_input())


def nodes_above(*values: ir.Value) -> set[ir.Node]:
    """Return the nodes that some values depend on."""
    return producers_of(ancestors(values))


def producers_of(values: Iterable[ir.Value]) -> set[ir.Node]:
    """Return the nodes that compute some values."""
    return {node for value in values if (node := value.producer()) is not None}


def descendants(
    nodes: Iterable[ir.Node],
    values: Iterable[ir.Value],
    *,
    operands: Callable[[ir.Node], Iterable[ir.Value]] = operands_of,
    results: Callable[[ir.Node], Iterable[ir.Value]] | None = None,
) -> set[ir.Value]:
    """Return the values that depend on some values, themselves included.

    By recursion:

        def descendants(values):
            return {*values}.union(*(descendants(results(n)) for n in nodes if not {*values}.isdisjoint(operands(n))))

    Args:
        nodes: the nodes to go through, in topological order.
        values: the values to start from.
        operands: the values that a node depends on: its inputs and its subgraphs' captures by default.
        results: the values of a node that depend on its operands; None for all its outputs.
    """
    found = set(values)
    for node in nodes:
        if not found.isdisjoint(operands(node)):
            found.update(node.outputs if results is None else results(node))
    return found


def source_of(value: ir.Value, operand: Callable[[ir.Node], ir.Value | None]) -> ir.Value:
    """Return the value at the top of a chain of nodes.

    Args:
        value: the value at its bottom.
        operand: the operand of a node that the chain continues with; None for a node that is no part of it.
    """
    while (node := value.producer()) is not None and (above := operand(node)) is not None:
        value = above
    return value


def source_by_trait(value: ir.Value, traits: Trait) -> ir.Value:
    """Return the value at the top of a chain of first operands of nodes whose operators have one of some traits."""
    return source_of(value, lambda node: node.inputs[0] if has_trait(node, traits) and node.inputs else None)
