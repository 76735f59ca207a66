"""Patterns of nodes for verify, lint and diff, in any graph."""

from __future__ import annotations

import onnx_ir as ir

from graphscale.graph.values import constant_tensor
from graphscale.graph.walks import is_contradiction, source_of
from graphscale.operators import Kind, optimizer_of, rule_of

__all__ = [
    "assigns",
    "input_at",
    "is_cast_of",
    "is_comparison",
    "producer",
    "skip_ordering",
    "update_signal",
]


def input_at(node: ir.Node, index: int | None) -> ir.Value | None:
    """Return an input of a node, None for a missing one."""
    return node.inputs[index] if index is not None and index < len(node.inputs) else None


def producer(value: ir.Value | None, op_type: str) -> ir.Node | None:
    """Return the node above a value if it has an operator, else None."""
    node = None if value is None else value.producer()
    return node if node is not None and node.op_type == op_type else None


def is_cast_of(value: ir.Value | None, source: ir.Value) -> bool:
    """Return whether a value is another one, or a cast of it."""
    node = producer(value, "Cast")
    return (value if node is None else node.inputs[0]) is source


def assigns(accumulator: ir.Node) -> bool:
    """Return whether an accumulator overwrites its buffer on every step: its third input is the constant true."""
    flag = input_at(accumulator, 2) if accumulator.op_type == "InPlaceAccumulatorV2" else None
    tensor = constant_tensor(flag)
    return tensor is not None and bool(tensor.numpy().all())


def update_signal(node: ir.Node) -> ir.Value | None:
    """Return the update signal of an optimizer operator, None if omitted."""
    optimizer = optimizer_of(node)
    return None if optimizer is None else input_at(node, optimizer.update_signal)


def is_comparison(node: ir.Node) -> bool:
    """Return whether a node compares its operands."""
    rule = rule_of(node)
    return rule is not None and rule.kind is Kind.COMPARE


def skip_ordering(value: ir.Value) -> ir.Value:
    """Return the value behind selects that only delay it: `Where(And(f, Not(f)), other, value)`."""

    def selected(node: ir.Node) -> ir.Value | None:
        return node.inputs[2] if node.op_type == "Where" and is_contradiction(node.inputs[0]) else None

    return source_of(value, selected)
