"""bound-accumulation: know that accumulated gradients are finite without reading them, and unscale their cotangents.

This is bound-gradients for the training model of an artifact folder, whose gradients are added to buffers.
"""

from __future__ import annotations

import dataclasses

import onnx_ir as ir

from graphscale.graph.builder import Editor, replace_outputs, replace_reads
from graphscale.graph.values import Use, operand_at, uses_of
from graphscale.lowering.lowering_pass import LoweringPass, ScaledStep
from graphscale.lowering.multiply_first import has_powers_of_two
from graphscale.lowering.nodes.bounds import OPSET, ScalarBuilder, add_bound, add_inverse, rename_nodes, unscale_early
from graphscale.lowering.nodes.gradient_tests import find_probe
from graphscale.lowering.nodes.products import Product, find_product, find_scaled
from graphscale.lowering.sizes import count_elements
from graphscale.passes import CheckFinite, UnscaleGradients

__all__ = ["BoundAccumulation"]


@dataclasses.dataclass(frozen=True)
class _Accumulation:
    """A gradient that is unscaled for its buffer alone.

    Attributes:
        division: the node that unscales it.
        node: the node that adds it to its buffer.
        probe: the nodes that test the buffer then, in execution order.
        product: the product that the gradient is.
    """

    division: ir.Node
    node: ir.Node
    probe: tuple[ir.Node, ...]
    product: Product


@dataclasses.dataclass(frozen=True)
class BoundAccumulation(LoweringPass):
    """Test gradients by the bounds of the operands that they come from, where a window of gradients begins.

    Before: `dw = Div(MatMul(x, dy), scale); flag, sum = InPlaceAccumulatorV2(buffer, dw, resets); probe = ...(sum)`
    After:  `bound = Mul(ReduceL1(x), ReduceL1(dy)); factor = Clip(ThresholdedRelu <1e36> (bound), 1 / scale, 1)`
            `raw = MatMul(x, Mul(dy, factor)); fits = Less(bound, 1e36)`
            `flag, probe = If <then: InPlaceAccumulatorV2(buffer, raw, resets), 0;`
            `                  else: If <then: flag, sum = InPlaceAccumulatorV2(buffer, raw, resets); flag, ...(sum);`
            `                            else: dw = Div(raw, Mul(scale, factor));`
            `                                  flag, sum = InPlaceAccumulatorV2(buffer, dw, resets);`
            `                                  flag, ...(sum)> (fits)> (And(fits, resets))`

    A buffer that holds gradients of the window already is read: sums of finite gradients may overflow.
    """

    name = "bound-accumulation"
    sign = "≤"
    relies_on = "a scale that is a power of two, else gradients are divided as before; no subnormal number on the way"

    def lower(self, step: ScaledStep) -> bool:
        graph = step.graph
        divisions = [node for node in graph if UnscaleGradients.inserted(node) and node.op_type == "Div"]
        scales = {operand_at(Use(node, 1)) for node in divisions if node.inputs[0] is not None}
        total = _find_total(step.decision)
        if total is None or len(scales) != 1 or not has_powers_of_two(step.policy):
            return False
        (scale,) = scales
        scaled = find_scaled(graph, scale)
        found = [part for node in divisions if (part := self._find(node, total, scaled)) is not None]
        if not found or graph.opset_imports.get("", 0) < OPSET:
            return False
        make = ScalarBuilder(Editor(graph), self.name, "bound", dtype=ir.DataType.FLOAT, shape=())
        exact, inverse = add_inverse(make, scale)
        sums: dict[ir.Value, ir.Value] = {}
        for part in found:
            bound = add_bound(make, part.product, sums)
            factor = unscale_early(make, part.product, inverse, [bound])
            fits = make.flag("And", [exact, make.flag("Less", [bound, make.limit])])
            _accumulate(make, part, fits, make.op("Mul", [scale, factor]))
        graph.sort()
        return True

    def _find(self, division: ir.Node, total: ir.Node, scaled: set[ir.Value]) -> _Accumulation | None:
        """Return the accumulation of an unscaled gradient, if early unscaling pays; None otherwise."""
        gradient = division.outputs[0]
        uses = uses_of(gradient)
        if len(uses) != 1 or uses[0].node.op_type != "InPlaceAccumulatorV2" or gradient.is_graph_output():
            return None
        node = uses[0].node
        is_fit = gradient.dtype is ir.DataType.FLOAT and gradient.shape is not None and gradient.shape.is_static()
        if not is_fit or count_elements(gradient) < self.thresholds.bound_elements or len(node.inputs) < 3:
            return None
        readers = [use.node for use in uses_of(node.outputs[1])] if len(node.outputs) > 1 else []
        probe = find_probe(readers[0], total) if len(readers) == 1 else None
        if probe is None:
            return None
        product = find_product(division, scaled)
        limit = self.thresholds.unbounded_passes * count_elements(gradient)
        if product is None or not product.is_exclusive or product.count_early() > limit:
            return None
        return _Accumulation(division, node, probe, product)


def _find_total(decision: ir.Value | None) -> ir.Node | None:
    """Return the sum of all probes that decides on a window."""
    value = decision
    for op_type in ("Not", "IsNaN", "Sum"):
        node = None if value is None else value.producer()
        if node is None or node.op_type != op_type or not CheckFinite.inserted(node):
            return None
        value = node.inputs[0]
    return node


def _accumulate(make: ScalarBuilder, part: _Accumulation, fits: ir.Value, rest: ir.Value) -> None:
    """Add a gradient to its buffer in the branches of an If: unscaled already or divided, tested or not."""
    editor, node = make.editor, part.node
    raw, resets = operand_at(Use(part.division, 0)), operand_at(Use(node, 2))
    flag, probe = node.outputs[0], part.probe[-1].outputs[0]
    outputs = [(f"{flag.name}.chosen", flag.dtype, flag.shape), (f"{probe.name}.chosen", probe.dtype, probe.shape)]
    chosen = make.node("If", [make.flag("And", [fits, resets])], outputs)
    for old, new in zip((flag, probe), chosen.outputs, strict=True):
        editor.replace(old, new, uses_of(old), "accumulated")
    moved = (part.division, node, *part.probe)
    editor.graph.remove(moved)
    divided = make.within(f"{make.mark}.divided", moved).closed([flag, probe])
    tested = _copy_undivided(editor, divided, raw)
    untested = _copy_undivided(editor, divided, raw)
    part.division.replace_input_with(1, rest)
    zero = dataclasses.replace(make, body=untested).op("Identity", [make.zero])
    replace_outputs(untested.outputs[1], zero)
    untested.remove(list(untested)[1:-1], safe=True)
    otherwise = make.within(f"{make.mark}.otherwise")
    branches = {"then_branch": tested, "else_branch": divided}
    inner = otherwise.node("If", [fits], outputs, attributes=branches)
    for name, body in (("then_branch", untested), ("else_branch", otherwise.closed(inner.outputs))):
        chosen.attributes.add(ir.AttrGraph(name, body))


def _copy_undivided(editor: Editor, body: ir.Graph, raw: ir.Value) -> ir.Graph:
    """Copy a body that divides a gradient first, without the division."""
    copy = body.clone(allow_outer_scope_values=True)
    division = copy[0]
    replace_reads(division.outputs[0], raw, uses_of(division.outputs[0]))
    copy.remove(division, safe=True)
    rename_nodes(editor, copy)
    return copy
