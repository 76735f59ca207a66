"""Accumulated gradients that a host resets by a flag that it feeds."""

from __future__ import annotations

import onnx_ir as ir

from graphscale.graph.values import constant_tensor
from graphscale.graph.walks import source_by_trait
from graphscale.operators import Trait

__all__ = ["is_reset"]


def is_reset(value: ir.Value | None, state: ir.Value) -> bool:
    """Return whether a value is a state, or zeros where a flag that the graph is fed says so.

    A skipped step does what the host asks for with the flag: gradients of another window must not stay in the sum.
    """
    node = None if value is None else value.producer()
    if node is None or (node.domain, node.op_type) != ("", "Where") or node.inputs[2] is not state:
        return False
    flag, zero = node.inputs[0], constant_tensor(node.inputs[1])
    is_fed = flag is not None and source_by_trait(flag, Trait.VIEW).is_graph_input()
    return is_fed and zero is not None and not zero.numpy().any()
