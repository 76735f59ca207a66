"""TensorFlow's rule for the dynamic loss scale, as ONNX nodes.

    finite:      if good + 1 >= period:  n = scale * multiplier;  scale = n if n is finite;  good = 0
                 else:                   good = good + 1
    not finite:  good = 0;  scale = max(scale / multiplier, 1)

As a model-local function `graphscale::UpdateLossScale` it is one node whose attributes show the policy's numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir

from graphscale.editing import Editor
from graphscale.loss_scale import DynamicLossScale

__all__ = ["DOMAIN", "FUNCTION", "call_update_rule", "inline_update_rule"]

DOMAIN, FUNCTION = "graphscale", "UpdateLossScale"

# Creates a node from an operator, inputs and the dtype of its output, and returns that output.
_Make = Callable[..., ir.Value]


def call_update_rule(
    editor: Editor,
    model: ir.Model | None,
    policy: DynamicLossScale,
    scale: ir.Value,
    good_steps: ir.Value,
    finite: ir.Value,
    pass_name: str,
) -> tuple[ir.Node, ir.Value, ir.Value]:
    """Add the function to the model and a call of it to the graph.

    Returns:
        the calling node, the next scale (float32 scalar) and the next count of good steps (scalar).
    """
    assert model is not None and good_steps.dtype is not None
    identifier = (DOMAIN, FUNCTION, "")
    if identifier not in model.functions:
        model.functions[identifier] = _function(good_steps.dtype, model.opset_imports[""])
    node = editor.node(
        pass_name,
        FUNCTION,
        [scale, good_steps, finite],
        [("next_scale", ir.DataType.FLOAT, []), ("next_count", good_steps.dtype, [])],
        domain=DOMAIN,
        attributes={"increment_period": policy.increment_period, "multiplier": float(policy.multiplier)},
    )
    return node, node.outputs[0], node.outputs[1]


def inline_update_rule(
    editor: Editor,
    model: ir.Model | None,
    policy: DynamicLossScale,
    scale: ir.Value,
    good_steps: ir.Value,
    finite: ir.Value,
    pass_name: str,
) -> tuple[ir.Node, ir.Value, ir.Value]:
    """Add the rule to the graph as single nodes, for models whose IR version has no functions.

    Returns:
        the last node, the next scale and the next count of good steps.
    """
    del model

    def make(op_type: str, inputs: list[ir.Value], dtype: ir.DataType, **attributes: Any) -> ir.Value:
        name = f"update.{op_type.lower()}"
        return editor.node(pass_name, op_type, inputs, [(name, dtype, [])], attributes=attributes).outputs[0]

    count = good_steps.dtype
    assert count is not None
    multiplier = _number(make, policy.multiplier, ir.DataType.FLOAT)
    period = _number(make, policy.increment_period, count)
    next_scale, next_count = _rule(make, scale, good_steps, finite, multiplier, period)
    node = next_scale.producer()
    assert node is not None
    return node, next_scale, next_count


def _function(count: ir.DataType, opset: int) -> ir.Function:
    nodes: list[ir.Node] = []

    def make(op_type: str, inputs: list[ir.Value], dtype: ir.DataType, **attributes: Any) -> ir.Value:
        value = ir.Value(name=f"{op_type.lower()}_{len(nodes)}", type=ir.TensorType(dtype), shape=ir.Shape([]))
        nodes.append(ir.node(op_type, inputs, attributes=attributes, outputs=[value], name=f"{op_type}_{len(nodes)}"))
        return value

    scale, good_steps, finite = (
        ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape([]))
        for name, dtype in (
            ("loss_scale", ir.DataType.FLOAT),
            ("good_steps", count),
            ("all_finite", ir.DataType.BOOL),
        )
    )
    multiplier = make("Constant", [], ir.DataType.FLOAT)
    reference = ir.RefAttr("value_float", "multiplier", ir.AttributeType.FLOAT)
    nodes[-1].attributes["value_float"] = reference
    period = make("Constant", [], ir.DataType.INT64)
    nodes[-1].attributes["value_int"] = ir.RefAttr("value_int", "increment_period", ir.AttributeType.INT)
    if count is not ir.DataType.INT64:
        period = make("Cast", [period], count, to=count)
    next_scale, next_count = _rule(make, scale, good_steps, finite, multiplier, period)
    next_scale.name, next_count.name = "next_loss_scale", "next_good_steps"
    return ir.Function(
        DOMAIN,
        FUNCTION,
        graph=ir.Graph(
            [scale, good_steps, finite],
            [next_scale, next_count],
            nodes=nodes,
            opset_imports={"": opset},
            name=FUNCTION,
            doc_string=__doc__,
        ),
        attributes=[
            ir.Attr("increment_period", ir.AttributeType.INT, None),
            ir.Attr("multiplier", ir.AttributeType.FLOAT, None),
        ],
    )


def _rule(
    make: _Make,
    scale: ir.Value,
    good_steps: ir.Value,
    finite: ir.Value,
    multiplier: ir.Value,
    period: ir.Value,
) -> tuple[ir.Value, ir.Value]:
    real, flag, count = ir.DataType.FLOAT, ir.DataType.BOOL, good_steps.dtype
    assert count is not None
    counted = make("Add", [good_steps, _number(make, 1, count)], count)
    too_few = make("Less", [counted, period], flag)
    grown = make("Mul", [scale, multiplier], real)
    overflows = make("Or", [make("IsInf", [grown], flag), make("IsNaN", [grown], flag)], flag)
    kept = make("Where", [make("Or", [too_few, overflows], flag), scale, grown], real)
    lowered = make("Max", [make("Div", [scale, multiplier], real), _number(make, 1, real)], real)
    zero = _number(make, 0, count)
    next_count = make("Where", [finite, make("Where", [too_few, counted, zero], count), zero], count)
    next_scale = make("Where", [finite, kept, lowered], real)
    return next_scale, next_count


def _number(make: _Make, number: float, dtype: ir.DataType) -> ir.Value:
    return make("Constant", [], dtype, value=ir.tensor(np.asarray(number, dtype=dtype.numpy())))
