"""multiply-first: multiply a gradient before its unscaling, where ONNX Runtime fuses the factor with its product.

The exchange is exact if the scale is a power of two. For another scale, loaded with a state, the quotients are rounded
once more, like the products with that scale.
"""

from __future__ import annotations

import math

import onnx_ir as ir

from graphscale.graph.builder import replace_reads
from graphscale.graph.values import Use, constant_number, operand_at, uses_of
from graphscale.lowering.lowering_pass import LoweringPass
from graphscale.lowering.thresholds import skip_views
from graphscale.passes import CheckFinite, UnscaleGradients
from graphscale.policy.loss_scale import DynamicLossScale, LossScale
from graphscale.step.training_step import Step

__all__ = ["MultiplyFirst", "has_powers_of_two", "is_number_up_to_one"]


def has_powers_of_two(policy: LossScale | None) -> bool:
    """Return whether a loss scale is dynamic, and always a power of two, unless another one is loaded."""
    if not isinstance(policy, DynamicLossScale):
        return False
    rule = policy.rule
    numbers = [rule.initial_loss_scale, rule.growth, rule.multiplier]
    numbers += [number for number in (rule.min_loss_scale, rule.backoff_factor, rule.max_loss_scale) if number]
    return all(math.frexp(number)[0] == 0.5 for number in numbers)


class MultiplyFirst(LoweringPass):
    """Divide products of matrices after the step has multiplied them by a number, such as the learning rate.

    Before: `dw = MatMul(x, dy); dw.unscaled = Div(dw, scale); step = Mul(dw.unscaled, 0.1)`
    After:  `dw = MatMul(x, dy); step.scaled = Mul(dw, 0.1);   step = Div(step.scaled, scale)`

    The first two are one kernel then. The step is tested for finiteness: for a scale of at least 1 and a number
    of at most 1 it is finite if and only if the gradient is. The step is the same, bit for bit, unless the gradient or
    the step is a subnormal number. With a loaded scale below 1, which the policy never reaches, a gradient that
    overflows in the division goes unnoticed if the step is finite.
    """

    name = "multiply-first"
    relies_on = "a scale that is a power of two, and at least 1"

    def lower(self, step: Step) -> bool:
        policy = step.scale.policy
        if not has_powers_of_two(policy) or not isinstance(policy, DynamicLossScale) or policy.rule.min_loss_scale < 1:
            return False
        found = [(node, use) for node in tuple(step.graph) if (use := _find_only_factor(node)) is not None]
        for division, use in found:
            product, quotient = use.node.outputs[0], division.outputs[0]
            readers = uses_of(product)
            use.node.replace_input_with(use.idx, operand_at(Use(division, 0)))
            division.replace_input_with(0, product)
            replace_reads(product, quotient, readers)
        if found:
            step.graph.sort()
        return bool(found)


def _find_only_factor(division: ir.Node) -> Use | None:
    """Return the only place outside of the finite check where an unscaled gradient is multiplied by a number."""
    if not UnscaleGradients.inserted(division) or division.op_type != "Div":
        return None
    gradient = division.outputs[0]
    uses = [use for use in uses_of(gradient) if not CheckFinite.inserted(use.node)]
    if len(uses) != 1 or gradient.is_graph_output() or gradient.dtype is not ir.DataType.FLOAT:
        return None
    node = uses[0].node
    if node.op_type != "Mul" or node.domain != "" or node.graph is not division.graph:
        return None
    other, step = node.inputs[1 - uses[0].idx], node.outputs[0]
    if not is_number_up_to_one(other) or step.is_graph_output() or step.shape != gradient.shape:
        return None
    product = skip_views(operand_at(Use(division, 0))).producer()
    if product is None or (product.domain, product.op_type) != ("", "MatMul"):
        return None
    return uses[0]


def is_number_up_to_one(value: ir.Value | None) -> bool:
    """Return whether a value is a constant number from -1 to 1, but not 0."""
    number = constant_number(value)
    return number is not None and 0 < abs(number) <= 1
