"""Rules on where the scale enters: GS101 to GS107; and what the flow of degrees finds on the way, GS201 to GS206."""

from __future__ import annotations

import math
from collections.abc import Iterator

import onnx_ir as ir

from graphscale.analysis.degrees import ZERO
from graphscale.checks.linting.flow import Event, Fault
from graphscale.checks.linting.lint_context import Rule, Subject, is_backward_operator
from graphscale.checks.linting.lint_report import Finding, found
from graphscale.checks.linting.view import initial_number
from graphscale.graph.values import is_scalar, node_name, op_name
from graphscale.graph.walks import source_by_trait
from graphscale.operators import Kind, Trait, has_trait, rule_of

__all__ = ["RULES"]


def _degrees(subject: Subject) -> Iterator[Finding]:
    for event in () if subject.flow is None else subject.flow.events:
        yield _DESCRIBE[event.fault](subject, event)


def _name(value: ir.Value | None) -> str:
    return "?" if value is None else repr(value.name)


def _names(values: tuple[ir.Value, ...]) -> str:
    return ", ".join(_name(value) for value in dict.fromkeys(values))


def _power(event: Event) -> str:
    degree = event.degree
    return "" if degree in (1, None) else f" to the power of {degree:g}"


def _mixed(subject: Subject, event: Event) -> Finding:
    node, scaled, others = event.node, event.scaled, event.others
    assert node is not None
    what = f"{op_name(node)} of {_names(scaled)}, which carries the loss scale{_power(event)}, and {_names(others)}"
    if _is_forward(subject, node) or all(_is_bookkeeping(subject, value) for value in scaled):
        if not _is_threshold(node):
            return _leak(subject, event)
    if _is_threshold(node) or all(_is_number(subject, value) for value in others):
        return found(
            "GS205", f"{what}, which does not: a threshold or a constant meets a scaled gradient", node, scaled[0]
        )
    missing = next((value for value in others if _misses_scale(subject, value)), None)
    if missing is not None:
        return found("GS101", f"{what}: that share of the gradient never met the loss scale", node, missing)
    return found("GS201", f"{what}, which does not: the gradient is not unscaled", node, scaled[0])


def _nonlinear(subject: Subject, event: Event) -> Finding:
    node, scaled = event.node, event.scaled
    assert node is not None
    what = f"{op_name(node)} reads {_names(scaled)}, which carries the loss scale{_power(event)}"
    if has_trait(node, Trait.EFFECT):
        return found("GS201", f"{what}: the gradient is not unscaled", node, scaled[0])
    if _is_forward(subject, node):
        return _leak(subject, event)
    return found("GS205", f"{what}, and is not linear", node, scaled[0] if scaled else None)


def _leak(subject: Subject, event: Event) -> Finding:
    node, scaled = event.node, event.scaled
    assert node is not None
    part = "the forward pass" if _is_forward(subject, node) else "a factor of the backward pass that is no gradient"
    return found("GS104", f"{op_name(node)}, {part}, reads {_names(scaled)} times the loss scale", node, scaled[0])


def _twice(subject: Subject, event: Event) -> Finding:
    message = f"{_names(event.scaled)} carries the loss scale already and is multiplied by it again"
    if not any(subject.carries_scale(value) for value in event.scaled):
        message = f"{_names(event.scaled)} is multiplied by the loss scale{_power(event)}"
    return found("GS103", message, event.node, event.scaled[0])


def _divided_again(subject: Subject, event: Event) -> Finding:
    message = f"{_names(event.scaled)} has been divided by the loss scale already and is divided again"
    return found("GS202", message, event.node, event.scaled[0])


def _never_scaled(subject: Subject, event: Event) -> Finding:
    message = f"{_names(event.scaled)} is divided by the loss scale, and nothing it depends on was multiplied by it"
    return found("GS203", message, event.node, event.scaled[0])


def _other_scale(subject: Subject, event: Event) -> Finding:
    assert subject.scale is not None
    symbol = _name(subject.scale.scalars.symbol)
    message = f"{_names(event.scaled)} carries the loss scale {symbol} and meets {_names(event.others)} instead of it"
    return found("GS204", message, event.node, event.scaled[0] if event.scaled else None)


def _unknown(subject: Subject, event: Event) -> Finding:
    assert event.node is not None
    message = (
        f"{op_name(event.node)} reads {_names(event.scaled)}, which carries the loss scale, and has no degree rule"
    )
    return found("GS206", message, event.node, event.scaled[0] if event.scaled else None)


def _output(subject: Subject, event: Event) -> Finding:
    value = event.scaled[0]
    node = value.producer()
    if _is_scaled_loss(subject, value):
        return found("GS105", f"output {_name(value)} is the loss times the loss scale", node, value)
    if subject.topology is not None and value in subject.topology.forward:
        return found("GS104", f"output {_name(value)}, of the forward pass, carries the loss scale", node, value)
    return found("GS201", f"output {_name(value)} carries the loss scale{_power(event)}", node, value)


_DESCRIBE = {
    Fault.MIXED: _mixed,
    Fault.NONLINEAR: _nonlinear,
    Fault.TWICE: _twice,
    Fault.NEGATIVE_AGAIN: _divided_again,
    Fault.NEVER_SCALED: _never_scaled,
    Fault.OTHER_SCALE: _other_scale,
    Fault.UNKNOWN: _unknown,
    Fault.OUTPUT: _output,
}


def _is_threshold(node: ir.Node) -> bool:
    rule = rule_of(node)
    return has_trait(node, Trait.BOUND) or (rule is not None and rule.kind is Kind.COMPARE)


def _is_forward(subject: Subject, node: ir.Node) -> bool:
    return subject.topology is not None and any(value in subject.topology.forward for value in node.outputs)


def _is_bookkeeping(subject: Subject, value: ir.Value) -> bool:
    return subject.scale is not None and value in subject.scale.scalars.values


def _is_number(subject: Subject, value: ir.Value) -> bool:
    """Whether a value is a constant, or bookkeeping, rather than a weight or a moment."""
    return subject.scale is not None and (subject.scale.scalars.is_constant(value) or _is_bookkeeping(subject, value))


def _misses_scale(subject: Subject, value: ir.Value) -> bool:
    """Whether a value is a share of a gradient that the scale never reached."""
    topology, flow = subject.topology, subject.flow
    if topology is None or flow is None or value in flow.touched:
        return False
    return topology.is_backward(value) and (value in topology.activation_dependent or value in topology.propagated)


def _is_scaled_loss(subject: Subject, value: ir.Value) -> bool:
    """Whether a value is a scalar that the scale had no effect on, times the scale."""
    flow = subject.flow
    assert flow is not None and subject.scale is not None
    node = source_by_trait(value, Trait.VIEW).producer()
    if node is None or node.op_type not in ("Mul", "Div") or not (value.shape is None or is_scalar(value)):
        return False
    factors = [v for v in node.inputs if v is not None and v not in subject.scale.scalars.values]
    backward = subject.topology is not None and any(subject.topology.is_backward(v) for v in factors)
    return len(factors) == 1 and factors[0] not in flow.touched and not backward


def _unprotected(subject: Subject) -> Iterator[Finding]:
    topology, flow = subject.topology, subject.flow
    if topology is None or flow is None or subject.scale is None:
        return
    missed = []
    for node in topology.nodes:
        if node not in topology.backward or not is_backward_operator(node):
            continue
        operands = list(topology.operands(node))
        if not any(operand in topology.activation_dependent for operand in operands):
            continue
        if not any(operand in flow.touched or flow.degree(operand) not in (0, ZERO) for operand in operands):
            missed.append(node)
    if missed:
        names = ", ".join(repr(node_name(node)) for node in missed[:3])
        more = f" and {len(missed) - 3} more" if len(missed) > 3 else ""
        yield found("GS102", f"{names}{more} of the backward pass: no operand carries the loss scale", missed[0])


def _float16_without_scale(subject: Subject) -> Iterator[Finding]:
    if subject.scale is not None or subject.stamp is not None or not subject.roots:
        return
    topology = subject.topology
    if topology is None:
        return
    low = [
        node
        for node in topology.nodes
        if node in topology.backward and is_backward_operator(node)
        if any(operand in topology.activation_dependent for operand in topology.operands(node))
        if _is_float16(subject, node)
    ]
    if low:
        message = f"{len(low)} operators of the backward pass compute in float16, {node_name(low[0])!r} first"
        yield found("GS106", message, low[0], low[0].outputs[0])


def _is_float16(subject: Subject, node: ir.Node) -> bool:
    """Whether a node's result is of float16, or, where float16 is emulated, rounded to it at once."""
    half = ir.DataType.FLOAT16
    readers = [use.node for value in node.outputs for use in value.uses()]
    casts = [reader for reader in readers if reader.op_type == "Cast"]
    return any(subject.dtype(value) is half for value in node.outputs) or any(
        subject.dtype(cast.outputs[0]) is half for cast in casts
    )


def _initial_value(subject: Subject) -> Iterator[Finding]:
    if subject.scale is None:
        return
    value = subject.scale.value
    number = initial_number(value) if value is subject.scale.scalars.symbol else None
    if number is not None and not (math.isfinite(number) and number >= 1):
        yield found("GS107", f"the loss scale {_name(value)} begins with {number:g}", value=value)


RULES = (
    Rule(("GS101", "GS103", "GS104", "GS105", "GS201", "GS202", "GS203", "GS204", "GS205", "GS206"), _degrees),
    Rule(("GS102",), _unprotected),
    Rule(("GS106",), _float16_without_scale),
    Rule(("GS107",), _initial_value),
)
