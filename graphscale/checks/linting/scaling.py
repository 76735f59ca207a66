"""Rules on the places where the scale enters, GS101 to GS106, and on the flow of degrees, GS201 to GS206."""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from graphscale.analysis.proof import scaled_contractions
from graphscale.analysis.training_result import copies_elements
from graphscale.checks.linting.flow import Fault, Misuse, Scale
from graphscale.checks.linting.lint_context import LintContext, rule
from graphscale.checks.linting.lint_report import Finding, report
from graphscale.checks.patterns import is_comparison
from graphscale.flow.degree import Conflict, Degree
from graphscale.graph.values import is_scalar, node_name, op_name
from graphscale.graph.walks import source_by_trait
from graphscale.operators import Trait, has_trait

__all__: list[str] = []


@rule("GS101", "GS103", "GS104", "GS105", "GS201", "GS202", "GS203", "GS204", "GS205", "GS206")
def _degrees(context: LintContext) -> Iterator[Finding]:
    if context.scale is None:
        return
    for fault in context.scale.faults:
        code, message, value = _explain(context, context.scale, fault)
        yield report(code, message, fault.node, value)
    for value in context.scale.scaled_outputs:
        code, message = _explain_output(context, context.scale, value)
        yield report(code, message, value.producer(), value)


def _names(values: tuple[ir.Value, ...]) -> str:
    return ", ".join(repr(value.name) for value in dict.fromkeys(values))


def _power(degree: Degree) -> str:
    return "" if degree in (1, None) else f" to the power of {degree:g}"


def _explain(context: LintContext, scale: Scale, fault: Conflict) -> tuple[str, str, ir.Value]:
    """Return the code, the message and the value of a finding."""
    names, value, node = _names(fault.scaled), fault.scaled[0], fault.node
    scalars, others, power = scale.scalars, fault.unscaled, _power(fault.degree)
    match fault.misuse if isinstance(fault, Fault) else None:
        case Misuse.TWICE if any(map(scale.carries, fault.scaled)):
            return "GS103", f"{names} carries the loss scale already and is multiplied by it again", value
        case Misuse.TWICE:
            return "GS103", f"{names} is multiplied by the loss scale{power}", value
        case Misuse.DIVIDED if not scale.touched.isdisjoint(fault.scaled):
            return "GS202", f"{names} has been divided by the loss scale already and is divided again", value
        case Misuse.DIVIDED:
            message = f"{names} is divided by the loss scale, and nothing it depends on was multiplied by it"
            return "GS203", message, value
        case Misuse.OTHER_SCALE:
            message = f"{names} carries the loss scale {scalars.symbol.name!r} and meets {_names(others)} instead of it"
            return "GS204", message, value
    operator = op_name(node)
    if fault.unknown:
        return "GS206", f"{operator} reads {names}, which carries the loss scale, and has no degree rule", value
    carried = f"{names}, which carries the loss scale{power}"
    forward = () if context.topology is None else context.topology.forward
    is_forward, is_effect = any(value in forward for value in node.outputs), has_trait(node, Trait.EFFECT)
    is_nonlinear, is_threshold = not others, has_trait(node, Trait.BOUND) or is_comparison(node)
    if is_nonlinear:
        is_leak = is_forward and not is_effect
    else:
        is_leak = not is_threshold and (is_forward or scalars.values.issuperset(fault.scaled))
    if is_leak:
        part = "the forward pass" if is_forward else "a factor of the backward pass that is no gradient"
        return "GS104", f"{operator}, {part}, reads {names} times the loss scale", value
    if is_nonlinear and is_effect:
        return "GS201", f"{operator} reads {carried}: the gradient is not unscaled", value
    if is_nonlinear:
        return "GS205", f"{operator} reads {carried}, and is not linear", value
    message = f"{operator} of {carried}, and {_names(others)}"
    # A constant or bookkeeping, not a weight or a moment.
    is_bound = all(scalars.is_constant(other) or other in scalars.values for other in others)
    if is_threshold or is_bound:
        return "GS205", f"{message}, which does not: a threshold or a constant meets a scaled gradient", value
    missing = next((other for other in others if _misses_scale(context, scale, other)), None)
    if missing is not None:
        return "GS101", f"{message}: that share of the gradient never met the loss scale", missing
    return "GS201", f"{message}, which does not: the gradient is not unscaled", value


def _explain_output(context: LintContext, scale: Scale, value: ir.Value) -> tuple[str, str]:
    if _is_scaled_loss(context, scale, value):
        return "GS105", f"output {value.name!r} is the loss times the loss scale"
    if context.topology is not None and value in context.topology.forward:
        return "GS104", f"output {value.name!r}, of the forward pass, carries the loss scale"
    return "GS201", f"output {value.name!r} carries the loss scale{_power(scale.degree(value))}"


def _misses_scale(context: LintContext, scale: Scale, value: ir.Value) -> bool:
    """Return whether a value is a term of a gradient that the scale never reached."""
    topology = context.topology
    if topology is None or value in scale.touched:
        return False
    return topology.is_backward(value) and (value in topology.activation_dependent or value in topology.propagated)


def _is_scaled_loss(context: LintContext, scale: Scale, value: ir.Value) -> bool:
    """Return whether a value is the scale times a scalar without an effect of the scale."""
    node = source_by_trait(value, Trait.VIEW).producer()
    if node is None or node.op_type not in ("Mul", "Div") or not (value.shape is None or is_scalar(value)):
        return False
    factors = [v for v in node.inputs if v is not None and v not in scale.scalars.values]
    backward = context.topology is not None and any(context.topology.is_backward(v) for v in factors)
    return len(factors) == 1 and factors[0] not in scale.touched and not backward


@rule("GS102")
def _unprotected(context: LintContext) -> Iterator[Finding]:
    topology, scale = context.topology, context.scale
    if topology is None or scale is None or _is_covered(context, scale):
        return
    missed = [
        node
        for node in context.backward_operators
        if not any(v in scale.touched or scale.carries(v) for v in topology.operands(node))
        and not copies_elements(node)
    ]
    if missed:
        names = ", ".join(repr(node_name(node)) for node in missed[:3])
        more = f" and {len(missed) - 3} more" if len(missed) > 3 else ""
        yield report("GS102", f"{names}{more} of the backward pass: no operand carries the loss scale", missed[0])


def _is_covered(context: LintContext, scale: Scale) -> bool:
    """Return whether the contractions that carry the scale are as many as in the report of the scaling.

    Others, in a warning of the report, may change state without a gradient: a codebook, a memory, a second pass.
    """
    report = {} if context.stamp is None else context.stamp.report
    if not report.get("contractions"):
        return False
    scaled = sum(1 for _ in scaled_contractions(context.nodes, scale.degrees))
    return scaled >= int(report["contractions"]) - len(report.get("missed", ()))


@rule("GS106")
def _float16_without_scale(context: LintContext) -> Iterator[Finding]:
    if context.scale is not None or context.step.scales or not context.roots:
        return
    low = [node for node in context.backward_operators if _is_float16(context, node)]
    if low:
        message = f"{len(low)} operators of the backward pass compute in float16, {node_name(low[0])!r} first"
        yield report("GS106", message, low[0], low[0].outputs[0])


def _is_float16(context: LintContext, node: ir.Node) -> bool:
    """Return whether a node's result is float16, or, in emulation, immediately rounded to it."""
    uses = (use for value in node.outputs for use in value.uses())
    rounded = (use.node.outputs[0] for use in uses if use.node.op_type == "Cast")
    return any(context.dtypes.get(value) is ir.DataType.FLOAT16 for value in (*node.outputs, *rounded))
