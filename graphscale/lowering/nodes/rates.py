"""Learning rates divided by the scale, instead of their gradients."""

from __future__ import annotations

from collections.abc import Iterable

import onnx_ir as ir

from graphscale.graph.builder import Builder
from graphscale.graph.values import Use, operand_at, uses_of
from graphscale.lowering.thresholds import same_shape

__all__ = ["divide_rates", "find_rate"]


def find_rate(division: ir.Node, branch: ir.Graph) -> Use | None:
    """Find the place where a branch multiplies an unscaled gradient by a scalar, if it has no other reader there.

    Args:
        division: the node that unscales the gradient.
        branch: the branch that computes the next values; the scalar is computed outside.
    """
    uses = [use for use in uses_of(division.outputs[0]) if use.node.graph is branch]
    if len(uses) != 1 or (uses[0].node.domain, uses[0].node.op_type) != ("", "Mul"):
        return None
    if not same_shape(operand_at(Use(division, 0)), division.outputs[0]):
        return None
    node, index = uses[0]
    rate = operand_at(Use(node, 1 - index))
    producer, is_scalar = rate.producer(), rate.shape is not None and rate.shape.rank() == 0
    is_outside = rate.graph is not branch and (producer is None or producer.graph is not branch)
    return Use(node, 1 - index) if is_scalar and is_outside else None


def divide_rates(
    make: Builder, scale: ir.Value, inverse: ir.Value, rates: Iterable[ir.Value]
) -> tuple[dict[ir.Value, ir.Value], list[ir.Value]]:
    """Add the quotients of rates and the scale, and for each a flag, true if it is exact.

    Then, for a power of two as the scale, `dw / scale * rate` and `dw * (rate / scale)` have the same bits.
    """
    quotients = {rate: make.op("Mul", [rate, inverse]) for rate in dict.fromkeys(rates)}
    products = [make.op("Mul", [quotient, scale]) for quotient in quotients.values()]
    pairs = zip(products, quotients, strict=True)
    return quotients, [make.op("Equal", pair, dtype=ir.DataType.BOOL) for pair in pairs]
