"""bound-gradients: know that gradients are finite without reading them, and unscale them where that costs nothing.

Where the scale is a power of two, dy can be divided by it instead of dw. Without an overflow the results are the same,
bit for bit, unless a number is subnormal on the way. Otherwise dw is divided.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import onnx_ir as ir

from graphscale.graph.builder import Editor, replace_reads
from graphscale.graph.values import Use, operand_at, uses_of
from graphscale.lowering.lowering_pass import LoweringPass, ScaledStep
from graphscale.lowering.multiply_first import has_powers_of_two
from graphscale.lowering.nodes.bounds import OPSET, ScalarBuilder, add_tests, rename_nodes
from graphscale.lowering.nodes.gradient_tests import FiniteCheck, GradientTest, find_check, plan_tests
from graphscale.lowering.select_update import SelectUpdate

__all__ = ["BoundGradients"]


@dataclasses.dataclass(frozen=True)
class BoundGradients(LoweringPass):
    """Test gradients by the bounds of the operands that they come from.

    Before: `dw = Div(MatMul(x, dy), scale); finite = ...(dw)`
            `w.next = If <then: f(dw); else: w> (finite)`
    After:  `bound = Mul(ReduceL1(x), ReduceL1(dy)); factor = Clip(ThresholdedRelu <1e36> (bound), 1 / scale, 1)`
            `raw = MatMul(x, Mul(dy, factor))`
            `finite, w.next = If <then: True, f(raw);`
            `                     else: dw = Div(raw, Mul(scale, factor)); ok = ...(dw);`
            `                           ok, If <then: f(dw); else: w> (ok)> (Less(bound, 1e36))`

    If the scale is no power of two:
    After:  `fits = Less(Mul(ReduceL1(x), ReduceL1(dy)), 1e36); dw = Div(MatMul(x, dy), scale)`
            `finite, w.next = If <then: True, f(dw);`
            `                     else: ok = ...(dw); ok, If <then: f(dw); else: w> (ok)> (fits)`
    """

    name = "bound-gradients"
    sign = "≤"
    relies_on = "a scale that is a power of two, else gradients are divided as before; no subnormal number on the way"

    def lower(self, step: ScaledStep) -> bool:
        graph, scale = step.graph, step.scale
        update = next((node for node in graph if node.op_type == "If" and SelectUpdate.inserted(node)), None)
        assert step.decision is not None
        check = None if update is None else find_check(graph, step.decision, update)
        if update is None or scale is None or check is None:
            return False
        tests = plan_tests(graph, check, scale, update, self.thresholds, exact=has_powers_of_two(step.policy))
        is_bound = bool(tests) and graph.opset_imports.get("", 0) >= OPSET
        if is_bound:
            make = ScalarBuilder(Editor(graph), self.name, "bound", dtype=ir.DataType.FLOAT, shape=())
            self._bound(make, check, scale, update, tests)
        return is_bound

    def _bound(
        self, make: ScalarBuilder, check: FiniteCheck, scale: ir.Value, step: ir.Node, tests: Sequence[GradientTest]
    ) -> None:
        graph = make.editor.graph
        fit, factors = add_tests(make, scale, tests, self.thresholds)
        check.remove_probes(tests, make.zero)
        at_once = make.flag("And", [fit, check.decision])
        then, keep = (step.attributes[name].as_graph() for name in ("then_branch", "else_branch"))
        apply = then.clone(allow_outer_scope_values=True)
        otherwise = _make_exact_branch(make, check, scale, tests, factors, apply, keep)
        for division in factors:
            unscaled = division.outputs[0]
            replace_reads(unscaled, operand_at(Use(division, 0)), uses_of(unscaled))
        then.outputs.insert(0, dataclasses.replace(make, body=then).flag("Identity", [at_once]))
        outputs = [("finite", ir.DataType.BOOL, ()), *((f"{v.name}.bound", v.dtype, v.shape) for v in step.outputs)]
        node = make.node("If", [at_once], outputs, attributes={"then_branch": then, "else_branch": otherwise})
        for old, new in zip(step.outputs, node.outputs[1:], strict=True):
            make.editor.replace(old, new, uses_of(old), "selected")
        graph.remove(step, safe=True)
        check.redirect_readers(make.editor, node.outputs[0], otherwise)
        graph.remove(list(factors), safe=True)
        graph.sort()


def _make_exact_branch(
    main: ScalarBuilder,
    check: FiniteCheck,
    scale: ir.Value,
    tests: Sequence[GradientTest],
    factors: Mapping[ir.Node, ir.Value],
    apply: ir.Graph,
    keep: ir.Graph,
) -> ir.Graph:
    """Make the branch that tests the gradients themselves, and divides those that are still scaled."""
    make, probes = main.within(f"{main.mark}.exact"), []
    for test in tests:
        old = unscaled = test.division.outputs[0]
        if test.division in factors:
            scaled, rest = operand_at(Use(test.division, 0)), make.op("Mul", [scale, factors[test.division]])
            unscaled = make.op("Div", [scaled, rest], like=scaled)
            replace_reads(old, unscaled, [use for use in uses_of(old) if use.node.graph is apply])
        probes.append(make.op("ReduceSum", [make.op("Mul", [unscaled, make.zero], like=unscaled)], keepdims=0))
    bad = make.flag("IsNaN", [make.total(probes)])
    finite = make.flag("And", [check.decision, make.flag("Not", [bad])])
    rename_nodes(make.editor, apply)
    outputs = [(f"{value.name}.exact", value.dtype, value.shape) for value in apply.outputs]
    node = make.node("If", [finite], outputs, attributes={"then_branch": apply, "else_branch": keep})
    return make.closed([finite, *node.outputs])
