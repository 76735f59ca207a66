"""bound-gradients: prove gradients finite without reading them, and unscale them at no cost.

Where the scale is a power of two, dy or the learning rate can be divided by it instead of dw. Without an overflow the
results are the same, bit for bit, unless a number is subnormal on the way. Otherwise dw is divided.
"""

from __future__ import annotations

import dataclasses

import onnx_ir as ir

from graphscale.graph.builder import Editor, replace_inputs
from graphscale.graph.cones import descendants
from graphscale.graph.failures import cannot_fail
from graphscale.graph.values import Use, captured_values, operand_at, uses_of
from graphscale.lowering.delay_update import DelayUpdate
from graphscale.lowering.lowering_pass import LoweringPass
from graphscale.lowering.multiply_first import has_powers_of_two
from graphscale.lowering.nodes.bounds import OPSET, ScalarBuilder, add_tests
from graphscale.lowering.nodes.gradient_tests import GradientTest, find_scaled, find_total, plan_test
from graphscale.lowering.nodes.rates import find_rate
from graphscale.lowering.nodes.unscaling import unscale_ahead, unscale_at_once
from graphscale.lowering.select_update import SelectUpdate, find_private_nodes
from graphscale.passes import CheckFinite, UnscaleGradients
from graphscale.passes.nodes.write_order import add_never
from graphscale.step.training_step import Step

__all__ = ["BoundGradients"]


class BoundGradients(LoweringPass):
    """Test gradients by bounds of their operands, before they are computed.

    Before: `dw = Div(MatMul(x, dy), scale); finite = ...(dw)`
            `w.next = If <then: f(dw); else: w> (finite)`
    After:  `fits = Less(Mul(ReduceL1(x), ReduceL1(dy)), 1e36)`
            `finite, w.next = If <then: True, f(MatMul(x, Mul(dy, 1 / scale)));`
            `                     else: dw = Div(MatMul(x, dy), scale); ok = ...(dw);`
            `                           ok, If <then: f(dw); else: w> (ok)> (fits)`

    Values for the branches alone are computed there: a gradient is still in the caches when the update reads it. A
    table stays outside, since an index could fail: `ScatterND(zeros, indices, Mul(rows, Where(fits, 1 / scale, 1)))`.

    If the branch only multiplies the gradient by a scalar:
    Before: `dw = Div(MatMul(x, dy), scale); w.next = If <then: Sub(w, Mul(dw, rate)); else: w> (finite)`
    After:  `part = Mul(rate, 1 / scale); w.next = If <then: Sub(w, Mul(MatMul(x, dy), part)); ...`

    If the scale is no power of two, both branches divide.
    """

    name = "bound-gradients"
    sign = "≤"
    relies_on = "a scale that is a power of two, else gradients are divided as before; no subnormal number on the way"

    def lower(self, step: Step) -> bool:
        graph, scale, decision = step.graph, step.scale.value, step.guard
        update = next((node for node in graph if node.op_type == "If" and SelectUpdate.inserted(node)), None)
        assert decision is not None
        waiting = decision.producer()
        flag = operand_at(Use(waiting, 0)) if waiting is not None and DelayUpdate.inserted(waiting) else decision
        total = find_total(flag)
        # Other forms of the check add up several gradients first.
        first = next((node for node in graph if node.op_type == "Sum" and CheckFinite.inserted(node)), None)
        if update is None or not scale.is_graph_input() or total is None or total is not first:
            return False
        outcome = descendants((node for node in graph if node is not update), [flag])
        tests = self._plan_tests(step, scale, update, total) if outcome.isdisjoint(captured_values(update)) else []
        if not tests or graph.opset_imports.get("", 0) < OPSET:
            return False
        make = ScalarBuilder(Editor(graph), self.name, "bound", dtype=ir.DataType.FLOAT, shape=())
        fit = add_tests(make, scale, tests, self.thresholds)
        probes = {test.probe[-1].outputs[0] for test in tests}
        kept = [value for value in total.inputs if value is not None and value not in probes]
        replace_inputs(total, kept or [make.constant("zero")])
        graph.remove([node for test in tests for node in test.probe], safe=True)
        then = update.attributes["then_branch"].as_graph()
        moved = find_private_nodes(graph, cannot_fail, lambda use: use.node.graph is then)
        graph.remove(moved)
        then.insert_before(then[0], moved)
        for test in tests:
            unscale_ahead(make, test, fit)
        otherwise = _make_exact_branch(make, step, tests, moved, update)
        for test in tests:
            unscale_at_once(dataclasses.replace(make, body=then), test, fit)
        at_once = make.flag("And", [fit.flag, decision])
        then.outputs.insert(0, dataclasses.replace(make, body=then).flag("Identity", [at_once]))
        outputs = [("finite", ir.DataType.BOOL, ()), *((f"{v.name}.bound", v.dtype, v.shape) for v in update.outputs)]
        node = make.node("If", [at_once], outputs, attributes={"then_branch": then, "else_branch": otherwise})
        for old, new in zip(update.outputs, node.outputs[1:], strict=True):
            make.editor.replace(old, new, uses_of(old), "selected")
        graph.remove(update, safe=True)
        own = {at_once.producer(), *otherwise}
        finite = make.flag("Or", [node.outputs[0], add_never(make, [fit.flag], "first")])
        for value in {flag, decision}:
            uses = [use for use in uses_of(value) if use.node not in own and not DelayUpdate.inserted(use.node)]
            make.editor.replace(value, finite, uses, "others")
        graph.sort()
        return True

    def _plan_tests(self, step: Step, scale: ir.Value, update: ir.Node, total: ir.Node) -> list[GradientTest]:
        """Plan tests of large gradients; a gradient for the update alone may be unscaled early."""
        scaled, exact = find_scaled(step.graph, scale), has_powers_of_two(step.scale.policy)
        then, tests = update.attributes["then_branch"].as_graph(), []
        for division in filter(UnscaleGradients.inserted, step.graph):
            gradient = division.outputs[0]
            readers = [use.node for use in uses_of(gradient) if use.node.graph is not then]
            is_private = exact and len(readers) == 1 and not gradient.is_graph_output()
            found = plan_test(
                *(division, readers, total, scaled, self.thresholds),
                is_private=is_private,
                rate=find_rate(division, then),
            )
            tests.append(found)
        return [test for test in tests if test is not None]


def _make_exact_branch(
    main: ScalarBuilder, step: Step, tests: list[GradientTest], moved: list[ir.Node], update: ir.Node
) -> ir.Graph:
    """Make the branch that tests the gradients themselves, from copies of the moved nodes on."""
    then, keep = (update.attributes[name].as_graph() for name in ("then_branch", "else_branch"))
    apply = then.clone(allow_outer_scope_values=True)
    main.rename(apply)
    copies = list(apply)[: len(moved)]
    apply.remove(copies)
    make, probes = main.within(f"{main.mark}.exact", copies), []
    twins = dict(zip(moved, copies, strict=True))
    for test in tests:
        gradient = twins.get(test.division, test.division).outputs[0]
        product = make.op("Mul", [gradient, make.constant("zero")], like=gradient)
        probes.append(make.op("ReduceSum", [product], keepdims=0))
    bad = make.flag("IsNaN", [make.op("Sum", probes) if len(probes) > 1 else probes[0]])
    finite = make.flag("And", [step.guard, make.flag("Not", [bad])])
    outputs = [(f"{value.name}.exact", value.dtype, value.shape) for value in apply.outputs]
    node = make.node("If", [finite], outputs, attributes={"then_branch": apply, "else_branch": keep})
    return make.closed([finite, *node.outputs])
