"""Smaller graphs: the operators of ONNX repeat their operands themselves, those of JAX want them repeated."""

from __future__ import annotations

import onnx_ir as ir
import onnx_ir.passes.common

__all__ = ["clean"]

_REPEATING = {"Add", "Sub", "Mul", "Div", "Pow", "Max", "Min", "Mod", "Where", "And", "Or", "Xor"}
_REPEATING |= {"Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual", "BitwiseAnd", "BitwiseOr", "BitwiseXor"}


def clean(model: ir.Model) -> None:
    """Feed operators that repeat operands the unrepeated ones, and remove what nothing reads.

    Before: `z = Add(x, Expand(Reshape(b, [1, 32]), Shape(x)))`
    After:  `z = Add(x, b)`
    """
    for node in model.graph:
        if node.op_type in _REPEATING and not node.domain:
            _feed_unrepeated(node)
    onnx_ir.passes.common.RemoveUnusedNodesPass()(model)


def _feed_unrepeated(node: ir.Node) -> None:
    """Keep one operand of the full shape, and replace the others."""
    operands = [value for value in node.inputs if value is not None]
    whole = [value for value in operands if _repeated(value) is None] or operands[:1]
    for index, value in enumerate(operands):
        short = _repeated(value)
        if short is not None and value not in whole and any(_same_shape(value, other) for other in whole):
            node.replace_input_with(index, _without_ones(short))


def _repeated(value: ir.Value) -> ir.Value | None:
    """Return the repeated operand of an Expand."""
    node = value.producer()
    return node.inputs[0] if node is not None and node.op_type == "Expand" and not node.domain else None


def _without_ones(value: ir.Value) -> ir.Value:
    """Return the value ahead of a Reshape that adds axes of size 1 in front."""
    node = value.producer()
    if node is None or node.op_type != "Reshape" or node.domain:
        return value
    source = node.inputs[0]
    if source is None or source.shape is None or value.shape is None:
        return value
    added = len(value.shape) - len(source.shape)
    grown = [*([1] * added), *source.shape]
    return source if added >= 0 and grown == list(value.shape) and None not in grown else value


def _same_shape(value: ir.Value, other: ir.Value) -> bool:
    if value.shape is None or other.shape is None:
        return False
    sizes = [getattr(size, "value", size) for size in value.shape]
    return None not in sizes and sizes == [getattr(size, "value", size) for size in other.shape]
