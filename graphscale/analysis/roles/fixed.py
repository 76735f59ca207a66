"""Outputs with a role independent of the inputs' roles: the loss, constants, signals; predictions."""

from __future__ import annotations

import collections
from collections.abc import Iterator

import onnx_ir as ir

from graphscale.analysis.roles.nearness import likeness
from graphscale.analysis.roles.role_table import Assigned, Role
from graphscale.analysis.roles.step_interface import Interface
from graphscale.analysis.updates import NEXT_STATE, find_coefficients, is_constant_view, same_type
from graphscale.graph.values import constant_tensor, inputs_of, is_float, is_known_zero, is_scalar
from graphscale.graph.walks import reach
from graphscale.operators import Kind, Trait, has_trait, optimizer_of, rule_of

__all__ = ["assign_fixed_roles", "assign_predictions", "doubt_constants"]


def assign_fixed_roles(step: Interface) -> None:
    """Assign a role to each open output that cannot be state."""
    for value in step.open_outputs():
        if (known := _role(step, value)) is not None:
            step.outputs[value] = Assigned(*known)


def assign_predictions(step: Interface) -> None:
    """Treat as metrics the open outputs that the loss compares with a target, averages or adds up."""
    for value in step.open_outputs():
        if value in step.topology.tail and not is_scalar(value) and _is_unreduced_loss(step, value):
            step.outputs[value] = Assigned(Role.METRIC, "the loss is its mean or its sum")
        elif value not in step.behind_gradients and not is_scalar(value) and _meets_target(step, value):
            step.outputs[value] = Assigned(Role.METRIC, "it is compared with a target")


def _role(step: Interface, value: ir.Value) -> tuple[Role, str] | None:
    node, forward = value.producer(), value not in step.behind_gradients
    if value in step.topology.losses:
        return Role.LOSS, "the backward pass differentiates it"
    if forward and _is_decay(step, value):
        return Role.GRADIENT, "the gradient of weight decay alone"
    if node is None:
        return None if step.may_be_shifted(value) else (Role.CONSTANT, "an input or a constant itself")
    if is_constant_view(value) or (not any(map(ir.Value.is_graph_input, step.held(value))) and is_known_zero(value)):
        return Role.CONSTANT, "a constant"
    optimizer = optimizer_of(node)
    if has_trait(node, Trait.EFFECT) and (optimizer is None or optimizer.source(value.index() or 0) is None):
        return Role.METRIC, "the signal of an operator that writes into its inputs"
    return None


def doubt_constants(step: Interface) -> None:
    """Doubt constants that may be the next values of inputs: a flag of the first step, an unchanged rate."""
    constants = [o for o, assigned in step.outputs.items() if assigned.role is Role.CONSTANT and not assigned.is_named]
    fitting = {output: _find_states_of_constant(step, output) for output in constants}
    claims = collections.Counter(value for values in fitting.values() for value in values)
    for output, values in fitting.items():
        left, source = [value for value in values if value not in step.inputs], step.copied_input(output)
        if left:
            likely = max(left, key=lambda value, output=output: likeness(value, output))  # type: ignore[misc]
            # A value without readers is the same under either constant, and so is an input that is an output.
            is_handed_through = likely is source
            certain = len(values) == claims[likely] == 1 and (is_handed_through or not likely.uses())
            evidence = f"a constant, and {likely.name!r} has its type"
            if is_float(likely) and not is_handed_through and not _is_flag(likely):
                step.outputs[output] = Assigned(Role.CONSTANT, evidence, certain=False)  # beside a rate, say
            else:
                step.pair(output, likely, evidence, certain)
        elif source in step.inputs and not step.inputs[source].certain:
            evidence = f"it hands {source.name!r} through, for which another output is proposed"
            step.outputs[output] = Assigned(Role.CONSTANT, evidence, certain=False)


def _is_flag(number: ir.Value) -> bool:
    """Return whether all readers of a number compare it."""
    rules = (rule_of(node) for node, _ in number.uses())
    return all(rule is not None and rule.kind is Kind.COMPARE for rule in rules)


def _find_states_of_constant(step: Interface, output: ir.Value) -> list[ir.Value]:
    """Find the inputs whose next value a constant may be: those outside the loss, or the constant itself, if read.

    Zeros may be the gradient of a weight outside the loss.
    """
    source = step.copied_input(output)
    if source is not None and source.is_graph_input():
        return []
    others = [value for value in step.open_inputs_like(output) if value not in (source, output)]
    values = [value for value in others if step.is_ignored(value) or not value.uses()]
    # A flag, or an operand of the constant.
    stored = [v for v in (*step.flags, *step.held_possibly(output)) if v not in (source, output, *values)]
    values += [v for v in stored if v not in step.inputs and not v.is_graph_input() and same_type(output, v)]
    # An initializer that is an output itself does not change.
    if source is None or source is output or source in step.inputs or not same_type(output, source):
        return values
    views = step.views(output)
    is_read = any(node.outputs[0] not in views for node in step.topology.consumers(source))
    is_gradient = is_known_zero(source) and bool(step.weights_like(output))
    return [*values, source] if is_read and not is_gradient else values


def _is_decay(step: Interface, value: ir.Value) -> bool:
    """Return whether a value is a share of one weight, of less than a half."""
    sources = [v for v in step.sources_of(value) if constant_tensor(v) is None]
    if len(sources) != 1 or sources[0] not in step.topology.forward or not same_type(value, sources[0]):
        return False
    return 0 < find_coefficients(value, sources, step.factors, least=0.0).get(sources[0], 0.0) < NEXT_STATE


def _meets_target(step: Interface, value: ir.Value) -> bool:
    """Return whether a node reads a value beside a target, masked or not, or subtracts one from the other."""
    topology, targets = step.topology, step.topology.targets
    readers = [*topology.consumers(value)]
    if any(operand in targets for node in readers for operand in topology.operands(node)):
        return True
    compared = [node for node in readers if node.op_type == "Sub" and node.outputs[0] in topology.tail]
    others = (each for node in compared for each in inputs_of(node) if each is not value and each.shape == value.shape)
    is_compared = value.shape is not None and any(_is_of_batch(step, other) for other in others)
    return is_compared and value in topology.activation_dependent


def _is_of_batch(step: Interface, value: ir.Value) -> bool:
    """Return whether a value is computed from a batch element by element."""
    above = step.topology.ancestors([value])
    nodes = [node for each in above if (node := each.producer()) is not None]
    is_elementwise = bool(nodes) and all(has_trait(node, Trait.ELEMENTWISE) for node in nodes)
    return is_elementwise and any(each.is_graph_input() and not is_scalar(each) for each in above)


def _is_unreduced_loss(step: Interface, value: ir.Value) -> bool:
    """Return whether a loss is only a mean or a sum of a value, times numbers."""

    def below(each: tuple[ir.Value, bool]) -> Iterator[tuple[ir.Value, bool]]:
        for node in step.topology.consumers(each[0]):
            others = [operand for operand in inputs_of(node) if operand is not each[0]]
            is_total = node.op_type in ("ReduceMean", "ReduceSum")
            is_scaled = node.op_type in ("Mul", "Div") and [*map(is_scalar, others)] == [True]
            is_linear = is_total or is_scaled or node.op_type == "Neg" or has_trait(node, Trait.VIEW)
            if is_linear and node.outputs[0] in step.topology.forward:
                yield node.outputs[0], each[1] or is_total

    return any(is_reduced and each in step.topology.losses for each, is_reduced in reach([(value, False)], below))
