"""bound-accumulation: prove accumulated gradients finite without reading them, and unscale their cotangents.

This pass is bound-gradients for the training model of an artifact folder, which adds gradients to buffers.
"""

from __future__ import annotations

import dataclasses

import onnx_ir as ir

from graphscale.graph.builder import Editor, replace_outputs, replace_reads
from graphscale.graph.values import Use, operand_at, uses_of
from graphscale.lowering.lowering_pass import LoweringPass
from graphscale.lowering.multiply_first import has_powers_of_two
from graphscale.lowering.nodes.bounds import OPSET, SAFE, ScalarBuilder, add_bound, add_inverse
from graphscale.lowering.nodes.gradient_tests import GradientTest, Product, find_scaled, find_total, plan_test
from graphscale.passes import UnscaleGradients
from graphscale.step.training_step import Step

__all__ = ["BoundAccumulation"]


class BoundAccumulation(LoweringPass):
    """Test gradients by bounds of their operands, at the beginning of a window of gradients.

    Before: `dw = Div(MatMul(x, dy), scale); flag, sum = InPlaceAccumulatorV2(buffer, dw, resets); probe = ...(sum)`
    After:  `bound = Mul(ReduceL1(x), ReduceL1(dy)); factor = Clip(ThresholdedRelu <1e36> (bound), 1 / scale, 1)`
            `raw = MatMul(x, Mul(dy, factor)); fits = Less(bound, 1e36)`
            `flag, probe = If <then: InPlaceAccumulatorV2(buffer, raw, resets), 0;`
            `                  else: If <then: flag, sum = InPlaceAccumulatorV2(buffer, raw, resets); flag, ...(sum);`
            `                            else: dw = Div(raw, Mul(scale, factor));`
            `                                  flag, sum = InPlaceAccumulatorV2(buffer, dw, resets);`
            `                                  flag, ...(sum)> (fits)> (And(fits, resets))`

    A buffer with earlier gradients of the window is read: sums of finite gradients may overflow.
    """

    name = "bound-accumulation"
    sign = "≤"
    relies_on = "a scale that is a power of two, else gradients are divided as before; no subnormal number on the way"

    def lower(self, step: Step) -> bool:
        graph = step.graph
        divisions = [node for node in graph if UnscaleGradients.inserted(node) and node.op_type == "Div"]
        scales = {operand_at(Use(node, 1)) for node in divisions if node.inputs[0] is not None}
        total = find_total(step.guard)
        if total is None or len(scales) != 1 or not has_powers_of_two(step.scale.policy):
            return False
        (scale,) = scales
        scaled = find_scaled(graph, scale)
        found = [test for node in divisions if (test := self._find(node, total, scaled)) is not None]
        if not found or graph.opset_imports.get("", 0) < OPSET:
            return False
        make = ScalarBuilder(Editor(graph), self.name, "bound", dtype=ir.DataType.FLOAT, shape=())
        exact, inverse = add_inverse(make, scale)
        sums: dict[ir.Value, ir.Value] = {}
        for test in found:
            assert test.product is not None
            bound = add_bound(make, test.product, sums)
            factor = _unscale_early(make, test.product, inverse, bound)
            fits = make.flag("And", [exact, make.flag("Less", [bound, make.constant("limit")])])
            _accumulate(make, test, fits, make.op("Mul", [scale, factor]))
        graph.sort()
        return True

    def _find(self, division: ir.Node, total: ir.Node, scaled: set[ir.Value]) -> GradientTest | None:
        """Return the test of an unscaled gradient that only a buffer reads, if early unscaling pays; else None."""
        uses = uses_of(division.outputs[0])
        if len(uses) != 1 or uses[0].node.op_type != "InPlaceAccumulatorV2" or division.outputs[0].is_graph_output():
            return None
        node = uses[0].node
        readers = [use.node for use in uses_of(node.outputs[1])] if len(node.outputs) > 1 else []
        if len(node.inputs) < 3 or len(readers) != 1:
            return None
        test = plan_test(division, readers, total, scaled, self.thresholds, is_private=True)
        return test if test is not None and test.early else None


def _unscale_early(make: ScalarBuilder, product: Product, inverse: ir.Value, bound: ir.Value) -> ir.Value:
    """Multiply the cotangent of a product by a factor, and return the factor: `inverse` if its bound fits, else 1.

    A bound of NaN has two causes: zeros times a sum that has overflowed, where the gradient is 0 in any order of
    summation; or a non-finite operand, where the gradient is not finite either. So NaN counts as 0.
    """
    excess = make.op("ThresholdedRelu", [bound], alpha=SAFE)
    factor = make.op("Clip", [excess, inverse, make.constant("one")])
    (node, index), cotangent = product.cotangent, operand_at(product.cotangent)
    node.replace_input_with(index, make.op("Mul", [cotangent, factor], like=cotangent))
    return factor


def _accumulate(make: ScalarBuilder, test: GradientTest, fits: ir.Value, rest: ir.Value) -> None:
    """Add a gradient to its buffer in the branches of an If: unscaled early or divided, tested or not."""
    editor, division = make.editor, test.division
    node = uses_of(division.outputs[0])[0].node
    raw, resets = operand_at(Use(division, 0)), operand_at(Use(node, 2))
    flag, probe = node.outputs[0], test.probe[-1].outputs[0]
    outputs = [(f"{value.name}.chosen", value.dtype, value.shape) for value in (flag, probe)]
    chosen = make.node("If", [make.flag("And", [fits, resets])], outputs)
    for old, new in zip((flag, probe), chosen.outputs, strict=True):
        editor.replace(old, new, uses_of(old), "accumulated")
    moved = (division, node, *test.probe)
    editor.graph.remove(moved)
    divided = make.within(f"{make.mark}.divided", moved).closed([flag, probe])
    tested = _copy_undivided(make, divided, raw)
    untested = _copy_undivided(make, divided, raw)
    division.replace_input_with(1, rest)
    zero = dataclasses.replace(make, body=untested).op("Identity", [make.constant("zero")])
    replace_outputs(untested.outputs[1], zero)
    untested.remove(list(untested)[1:-1], safe=True)
    otherwise = make.within(f"{make.mark}.otherwise")
    branches = {"then_branch": tested, "else_branch": divided}
    inner = otherwise.node("If", [fits], outputs, attributes=branches)
    for name, body in (("then_branch", untested), ("else_branch", otherwise.closed(inner.outputs))):
        chosen.attributes.add(ir.AttrGraph(name, body))


def _copy_undivided(make: ScalarBuilder, body: ir.Graph, raw: ir.Value) -> ir.Graph:
    """Copy a body that begins with the division of a gradient, without the division."""
    copy = body.clone(allow_outer_scope_values=True)
    division = copy[0]
    replace_reads(division.outputs[0], raw, uses_of(division.outputs[0]))
    copy.remove(division, safe=True)
    make.rename(copy)
    return copy
