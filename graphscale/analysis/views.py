"""Which values may share a buffer, because a runtime hands it on, or removes the node between them."""

from __future__ import annotations

import onnx_ir as ir

from graphscale.graph.values import constant_tensor
from graphscale.operators import Trait, has_trait

__all__ = ["is_fresh", "views_of"]


def views_of(node: ir.Node, index: int) -> list[ir.Value]:
    """The results of a node that may be in the buffer of one of its operands, because a runtime may remove the node."""
    if has_trait(node, Trait.REMOVABLE_BY_FACTOR) and len(node.inputs) == 2:
        other = node.inputs[1 - index]
        return list(node.outputs) if other is not None and constant_tensor(other) is not None else []
    if has_trait(node, Trait.REMOVABLE_BY_CONDITION):
        condition = node.inputs[0]
        return list(node.outputs) if condition is not None and constant_tensor(condition) is not None else []
    return list(node.outputs) if has_trait(node, Trait.SHARES_BUFFER | Trait.REMOVABLE) else []


def is_fresh(value: ir.Value, depth: int = 8) -> bool:
    """Whether a value is computed into a buffer of its own: it is no input, and no view of another value.

    Of a select whose condition is a constant, what it may choose must be fresh.
    """
    node = value.producer()
    if node is None or node.domain != "" or depth == 0:
        return False
    viewed = [v for i, v in enumerate(node.inputs) if v is not None and views_of(node, i)]
    if node.op_type == "Where":
        return all(is_fresh(v, depth - 1) for v in viewed if v is not node.inputs[0])
    return not viewed
