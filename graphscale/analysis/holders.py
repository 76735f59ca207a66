"""The values that may hold a state: a filter that looks at each node once, before each value is looked at by itself."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import onnx_ir as ir

from graphscale.analysis.updates import type_of
from graphscale.graph.values import constant_tensor, subgraphs
from graphscale.operators import rule_of

__all__ = ["find_holders"]

_SUMS = frozenset(("Add", "Sub", "Sum"))


def find_holders(
    states: Iterable[ir.Value], nodes: Iterable[ir.Node], reads: Mapping[ir.Node, Sequence[ir.Value]]
) -> set[ir.Value]:
    """Find the values that may hold a state, or a part of it, but none that it is broadcast over or looked up for.

    Args:
        states: the states.
        nodes: the nodes, in execution order.
        reads: the values that each node reads.
    """
    holders = set(states)
    for node in nodes:
        held = [operand for operand in reads[node] if operand in holders]
        if held and not _ends(node, held):
            holders.update(node.outputs)
    return holders


def _ends(node: ir.Node, held: Sequence[ir.Value]) -> bool:
    """Return whether what a node gives holds none of the states that its operands hold."""
    if node.op_type == "Gather":
        return constant_tensor(node.inputs[1]) is None
    if node.op_type in _SUMS:
        kinds = [type_of(operand) for operand in held]
        return not any(None in kind or kind == type_of(node.outputs[0]) for kind in kinds)
    rule = rule_of(node)
    return rule is not None and rule.contraction and not subgraphs(node)
