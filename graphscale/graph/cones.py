"""Cones of graphs: the nodes above values, and the values below."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import onnx_ir as ir

from graphscale.graph.values import is_scalar, operands_of, subgraphs
from graphscale.graph.walks import ancestors

__all__ = ["carried_by", "descendants", "follows_from_numbers", "nodes_above", "producers_of"]


def nodes_above(*values: ir.Value) -> set[ir.Node]:
    """Return the nodes above some values."""
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
    """Return some values and their descendants.

    By recursion:

        def descendants(values):
            return {*values}.union(*(descendants(results(n)) for n in nodes if not {*values}.isdisjoint(operands(n))))

    Args:
        nodes: the nodes to go through, in topological order.
        values: the values to start from.
        operands: the operands of a node: its inputs and its subgraphs' captures by default.
        results: the outputs of a node that depend on its operands; None for all.
    """
    found = set(values)
    for node in nodes:
        if not found.isdisjoint(operands(node)):
            found.update(node.outputs if results is None else results(node))
    return found


def carried_by(node: ir.Node) -> tuple[int, int, int]:
    """Return the index of a body's first carried input, their number, and the index of the first carried output.

    The first output of a Loop's body is its condition, and its first inputs are the round and this condition; the first
    inputs of the node are the number of rounds and a condition.
    """
    first, ahead = (2, 1) if node.op_type == "Loop" else (0, 0)
    scanned = node.attributes["num_scan_inputs"].as_int() if node.op_type == "Scan" else 0
    return first, len(subgraphs(node)[0].inputs) - scanned - first, ahead


def follows_from_numbers(value: ir.Value, stop: Callable[[ir.Value], bool] | None = None) -> bool:
    """Return whether a value depends on no graph input but numbers, such as a rate by a schedule; see `ancestors`."""
    return all(is_scalar(each) for each in ancestors([value], stop=stop) if each.is_graph_input())
