"""The rule on gradients that become finite on their way to the finite check: GS306."""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from graphscale.checks.linting.check import Check
from graphscale.checks.linting.lint_context import LintContext, rule
from graphscale.checks.linting.lint_report import Finding, report
from graphscale.checks.linting.survival import BOTH, NOTHING, Kinds, survivors
from graphscale.graph.values import inputs_of, is_float, is_scalar, op_name, reads_shape
from graphscale.operators import Kind, Trait, has_trait, rule_of

__all__: list[str] = []


@rule("GS306")
def _hidden(context: LintContext) -> Iterator[Finding]:
    """Find the nodes that lose NaN or infinity of a gradient before a check sees what they give."""
    if context.check is None or context.flow is None or context.window_check is not None:
        return
    seen = _shown(context, context.check)
    excused: dict[ir.Value, Kinds] = {}
    for node in context.view.nodes:
        if reads_shape(node) or context.check.needed.isdisjoint(node.outputs):
            continue
        if any(context.is_bookkeeping(value) for value in node.outputs):
            continue
        operands = [value for value in context.view.operands(node) if value in context.sources]
        above = BOTH if context.check.dependent.intersection(node.outputs) else NOTHING
        for value in operands:
            known = seen.get(value, NOTHING)
            if _adds_none(context, value):
                known |= excused.get(value, NOTHING)
            above |= known
            result = NOTHING.union(*(seen.get(output, NOTHING) for output in node.outputs))
            lost = result - survivors(node, value, result, of_all=False) - known
            if lost and is_float(value) and _is_gradient(context, value):
                kinds = " and ".join(sorted(lost))
                message = (
                    f"{op_name(node)} makes {kinds} in {value.name!r} finite, and {context.check.value.name!r} tests"
                )
                yield report("GS306", f"{message} the result", node, value)
                above |= BOTH
        for output in node.outputs:
            excused[output] = excused.get(output, NOTHING) | above


def _adds_none(context: LintContext, value: ir.Value) -> bool:
    """Return whether only numbers of a gradient above are not finite: it is a view, a norm, or an optimizer's own."""
    node, flow = value.producer(), context.flow
    if node is None or flow is None:
        return False
    is_quotient_of_scale = node.op_type == "Div" and node.inputs[0] in context.roots
    if value in flow.unscaled and not is_quotient_of_scale:
        return False
    rule = rule_of(node)
    is_norm = rule is not None and rule.kind is Kind.NONLINEAR
    return flow.degree(value) != 1 or is_norm or has_trait(node, Trait.EXACT)


def _is_gradient(context: LintContext, value: ir.Value) -> bool:
    """Return whether a value is computed from the scale and data, and is no sum over all of a tensor."""
    return not context.is_bookkeeping(value) and value not in context.roots and not is_scalar(value)


def _shown(context: LintContext, check: Check) -> dict[ir.Value, Kinds]:
    """Return the kinds of numbers that reach a value that the check tests, from wherever they are."""
    shown: dict[ir.Value, Kinds] = {}
    for node in reversed(context.view.nodes):
        for value in node.outputs:
            shown[value] = shown.get(value, NOTHING) | check.sees.get(value, NOTHING)
        # A flag shows nothing by itself: it selects.
        kinds = NOTHING.union(*(shown[value] for value in node.outputs if value not in context.view.flags))
        for value in () if reads_shape(node) or not kinds else inputs_of(node):
            shown[value] = shown.get(value, NOTHING) | survivors(node, value, kinds, of_all=False)
    return shown
