"""The dtype of a value, also where shape inference stopped at an operator that it does not know."""

from __future__ import annotations

import onnx_ir as ir

from graphscale.analysis.rules import Kind
from graphscale.analysis.values import rule_of, subgraphs
from graphscale.errors import UnsupportedModelError

__all__ = ["dtype_of"]


def dtype_of(value: ir.Value) -> ir.DataType:
    """Return the dtype of a floating-point value: its own, or that of the data it is computed from.

    Raises:
        UnsupportedModelError: the model does not say, and it cannot be told from the operators.
    """
    current, steps = value, 0
    while current.dtype is None and steps < 10_000:
        steps += 1
        node = current.producer()
        if node is None:
            if current.const_value is not None:
                return current.const_value.dtype
            break
        if node.op_type == "Cast":
            return ir.DataType(node.attributes["to"].as_int())
        constant = ir.convenience.get_const_tensor(current) if node.op_type == "Constant" else None
        if constant is not None:
            return constant.dtype
        if node.op_type == "ConstantOfShape":
            fill = node.attributes.get("value")
            return ir.DataType.FLOAT if fill is None else fill.as_tensor().dtype
        body = next(subgraphs(node), None)
        if body is not None:
            offset = 1 if node.op_type == "Loop" else 0
            current = body.outputs[offset + (current.index() or 0)]
            continue
        rule = rule_of(node)
        if rule is None or rule.kind in (Kind.SHAPE, Kind.DEGREE_0, Kind.COMPARE, Kind.BODY):
            break
        data = [node.inputs[i] for i in rule.operands(len(node.inputs))]
        # An operand that says its dtype spares the way up.
        given = (v for v in data if v is not None)
        following = min(given, key=lambda v: v.dtype is None, default=None)
        if following is None:
            break
        current = following
    if current.dtype is None:
        raise UnsupportedModelError(
            f"the dtype of value {value.name!r} is not known; run shape inference on the model before scaling it"
        )
    return current.dtype
