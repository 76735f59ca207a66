"""Accumulated gradients that a host resets by a fed flag."""

from __future__ import annotations

from collections.abc import Iterable

import onnx_ir as ir

from graphscale.graph.values import constant_tensor, is_source
from graphscale.graph.walks import source_by_trait
from graphscale.operators import Trait

__all__ = ["find_reset_flags", "is_reset"]


def is_reset(value: ir.Value | None, state: ir.Value) -> bool:
    """Return whether a value is a state, or zeros by a fed flag.

    A skipped step obeys the flag, too: gradients of another window must not remain in the sum.
    """
    node = None if value is None else value.producer()
    if node is None or node.inputs[-1] is not state:
        return False
    return _fed_flag(node) is not None


def find_reset_flags(nodes: Iterable[ir.Node]) -> set[str]:
    """Return the names of the inputs that reset states by a select, or by an accumulator that writes in place."""
    found = set()
    for node in nodes:
        flag = _fed_flag(node)
        if node.op_type == "InPlaceAccumulatorV2" and len(node.inputs) > 2:
            flag = node.inputs[2]
        if flag is not None and flag.is_graph_input():
            found.add(flag.name or "")
    return found


def _fed_flag(node: ir.Node) -> ir.Value | None:
    """Return the input of the graph by which a node selects zeros in place of a state; None for other nodes."""
    if (node.domain, node.op_type) != ("", "Where") or None in node.inputs:
        return None
    condition, zero, state = (value for value in node.inputs if value is not None)
    flag, number = source_by_trait(condition, Trait.VIEW), constant_tensor(zero)
    is_zero = number is not None and not number.numpy().any()
    return flag if is_zero and flag.is_graph_input() and is_source(state) else None
