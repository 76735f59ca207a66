"""Unscaling at the least cost: of a cotangent or a learning rate, instead of a gradient."""

from __future__ import annotations

from graphscale.graph.builder import replace_reads
from graphscale.graph.values import Use, operand_at, uses_of
from graphscale.lowering.nodes.bounds import Fit, ScalarBuilder
from graphscale.lowering.nodes.gradient_tests import GradientTest

__all__ = ["unscale_ahead", "unscale_at_once"]


def unscale_ahead(make: ScalarBuilder, test: GradientTest, fit: Fit) -> None:
    """Unscale the cotangent of a product outside of the branches, if it fits.

    The exact branch, which divides by the scale, runs for other steps, and with any values for a step to be skipped.
    """
    if not test.early or test.product is None or test.product.cotangent.node.graph is not make.editor.graph:
        return
    (node, index), cotangent = test.product.cotangent, operand_at(test.product.cotangent)
    factor = make.op("Where", [fit.flag, fit.inverse, make.constant("one")])
    node.replace_input_with(index, make.op("Mul", [cotangent, factor], like=cotangent))


def unscale_at_once(make: ScalarBuilder, test: GradientTest, fit: Fit) -> None:
    """Unscale the cotangent or the rate instead of a gradient, in the branch where all bounds fit."""
    division = test.division
    if test.rate is None and not test.early:
        return
    replace_reads(division.outputs[0], operand_at(Use(division, 0)), uses_of(division.outputs[0]))
    assert make.body is not None
    make.body.remove(division, safe=True)
    if test.rate is not None:
        test.rate.node.replace_input_with(test.rate.idx, fit.quotients[operand_at(test.rate)])
    elif test.product is not None and test.product.cotangent.node.graph is make.body:
        (node, index), cotangent = test.product.cotangent, operand_at(test.product.cotangent)
        unscaled = make.op("Mul", [cotangent, fit.inverse], like=cotangent, at=("before", node))
        node.replace_input_with(index, unscaled)
