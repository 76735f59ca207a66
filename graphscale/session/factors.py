"""The division of gradients by the loss scale, where that is a power of two: both rewrites are exact then.

A state may be loaded whose scale is none: quotients are rounded once more then, as the products with that scale are.
"""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from graphscale.analysis.values import Use, constant_tensor, uses_of
from graphscale.bound import CHECK
from graphscale.editing import PASS_KEY, Editor, replace_reads
from graphscale.loss_scale import DynamicLossScale, LossScale

__all__ = ["keeps_to_powers_of_two", "multiply_by_reciprocal", "multiply_first"]

NAME = "session-factors"
_UNSCALE = "unscale-gradients"


def keeps_to_powers_of_two(policy: LossScale | None) -> bool:
    """Whether a loss scale adjusts itself, and is always a power of two, and at least 1."""
    if not isinstance(policy, DynamicLossScale):
        return False
    rule = policy.rule
    numbers = [rule.initial_loss_scale, rule.growth, rule.multiplier, rule.min_loss_scale]
    numbers += [number for number in (rule.backoff_factor, rule.max_loss_scale) if number is not None]
    return rule.min_loss_scale >= 1 and all(math.frexp(number)[0] == 0.5 for number in numbers)


def multiply_by_reciprocal(graph: ir.Graph) -> None:
    """Let gradients be multiplied by the reciprocal of the loss scale: a CPU divides more slowly than it reads memory.

    Before: `dw = Div(dw.scaled, scale); db = Div(db.scaled, scale)`
    After:  `inverse = Reciprocal(scale); dw = Mul(dw.scaled, inverse); db = Mul(db.scaled, inverse)`
    """
    editor = Editor(graph)
    inverses: dict[ir.Value, ir.Value] = {}
    for division in tuple(graph):
        scale, dividend = (division.inputs[1], division.inputs[0]) if _unscales(division) else (None, None)
        if scale is None or dividend is None or scale.dtype is not ir.DataType.FLOAT:
            continue
        if scale not in inverses:
            inverse = [("inverse_scale", scale.dtype, scale.shape)]
            inverses[scale] = editor.node(NAME, "Reciprocal", [scale], inverse, at=("before", division)).outputs[0]
        quotient = division.outputs[0]
        outputs = [(f"{quotient.name}.product", quotient.dtype, quotient.shape)]
        product = editor.node(NAME, "Mul", [dividend, inverses[scale]], outputs, at=("after", division)).outputs[0]
        replace_reads(quotient, product, uses_of(quotient))
        if quotient.is_graph_output():
            editor.take_over_output(quotient, product, "quotient")
        graph.remove(division, safe=True)


def multiply_first(graph: ir.Graph) -> None:
    """Let a gradient that is only multiplied by a number, the learning rate, say, be multiplied before it is divided.

    Before: `dw = MatMul(x, dy); dw.unscaled = Div(dw, scale); step = Mul(dw.unscaled, 0.1)`
    After:  `dw = MatMul(x, dy); step.scaled = Mul(dw, 0.1);   step = Div(step.scaled, scale)`

    The first two are one kernel then. What is tested for finiteness is the step: for a scale of at least 1 and a number
    of at most 1 it is finite if and only if the gradient is. The step is the same, bit for bit, unless the gradient is
    a subnormal number.
    """
    changed = False
    for division in tuple(graph):
        use = _only_factor(division)
        if use is None or division.inputs[0] is None:
            continue
        step, quotient = use.node.outputs[0], division.outputs[0]
        readers = uses_of(step)
        use.node.replace_input_with(use.idx, division.inputs[0])
        division.replace_input_with(0, step)
        replace_reads(step, quotient, readers)
        changed = True
    if changed:
        graph.sort()


def _unscales(node: ir.Node) -> bool:
    return node.metadata_props.get(PASS_KEY) == _UNSCALE and node.op_type == "Div"


def _only_factor(division: ir.Node) -> Use | None:
    """Where a gradient that was unscaled is multiplied by a number, if nothing else reads it but the finite check."""
    if not _unscales(division):
        return None
    gradient = division.outputs[0]
    uses = [use for use in uses_of(gradient) if use.node.metadata_props.get(PASS_KEY) != CHECK]
    if len(uses) != 1 or gradient.is_graph_output() or gradient.dtype is not ir.DataType.FLOAT:
        return None
    node = uses[0].node
    if node.op_type != "Mul" or node.domain != "" or node.graph is not division.graph:
        return None
    other, step = node.inputs[1 - uses[0].idx], node.outputs[0]
    tensor = constant_tensor(other)
    if tensor is None or tensor.size != 1 or step.is_graph_output() or step.shape != gradient.shape:
        return None
    return uses[0] if 0 < abs(float(np.ravel(tensor.numpy())[0])) <= 1 else None
