"""Holders of states: values that a walk for coefficients can begin at, found in one pass over the nodes."""

from __future__ import annotations

from collections.abc import Iterable

import onnx_ir as ir

from graphscale.analysis.updates import DIRECT, Factors, find_terms, type_of
from graphscale.graph.values import subgraphs

__all__ = ["find_holders"]

_SUMS = frozenset(("Add", "Sub", "Sum"))


def find_holders(states: Iterable[ir.Value], nodes: Iterable[ir.Node], factors: Factors) -> set[ir.Value]:
    """Find the values with a state among their terms, but for sums that broadcast it.

    Args:
        states: the states.
        nodes: the nodes of the main graph, in execution order.
        factors: the known factors of the graph.
    """
    holders = set(states)
    for node in nodes:
        if subgraphs(node):
            holders.update(node.outputs)
        elif not holders.isdisjoint(node.inputs):
            holders.update(value for value in node.outputs if _holds(node, value, holders, factors))
    return holders


def _holds(node: ir.Node, value: ir.Value, holders: set[ir.Value], factors: Factors) -> bool:
    terms = [operand for operand, factor in find_terms(node, value, factors, DIRECT) if factor and operand in holders]
    if node.op_type not in _SUMS:
        return bool(terms)
    return any(None in type_of(operand) or type_of(operand) == type_of(value) for operand in terms)
