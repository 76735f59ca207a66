"""Batches that a step changes before the network reads them, in contrast to carried state."""

from __future__ import annotations

import onnx_ir as ir

from graphscale.analysis.roles.step_interface import Interface
from graphscale.analysis.updates import same_type
from graphscale.graph.values import constant_tensor, inputs_of, is_float, is_known_zero, is_scalar

__all__ = ["is_running_statistic", "may_be_batch"]


def may_be_batch(step: Interface, output: ir.Value, value: ir.Value) -> bool:
    """Return whether an output may be a changed batch that the network reads, or an activation added to it."""
    if output in step.behind_gradients or not value.is_graph_input() or is_scalar(value) or not is_float(value):
        return False
    if is_running_statistic(step, output, value):
        return False
    if value not in step.topology.forward:
        return step.held(output)[value] == 1 and step.multiplies_batch(output, value)
    if step.copied_input(output) is value or _adds_nothing(output, value):
        return False  # A guard would change nothing.
    above = step.topology.ancestors([output])
    others = [v for v in above if v.is_graph_input() and not is_scalar(v) and v is not value]
    if output not in step.topology.forward:
        return not others or (step.held(output)[value] >= 1 and step.may_predict(output, value))
    alike = [other for other in others if same_type(other, value)]
    if alike and len(alike) == len(others):
        return not all(other in step.inputs for other in others)  # a target network, which follows the weights
    readers = {n.op_type for n in step.topology.consumers(value) if any(result in above for result in n.outputs)}
    is_average = step.held(output)[value] < 1 and readers <= {"Add", "Sub", "Mul"}
    return not others or bool(alike) or not is_average


def is_running_statistic(step: Interface, output: ir.Value, value: ir.Value) -> bool:
    """Return whether an output averages a value with a statistic of a batch, without rows.

    The share of the value is less than one: it is multiplied, or subtracted from the statistic.
    """
    above = step.topology.ancestors([output])
    readers = [node for node in step.topology.consumers(value) if any(result in above for result in node.outputs)]
    is_share = any(n.op_type == "Mul" or (n.op_type == "Sub" and n.inputs[1] is value) for n in readers)
    return is_share and step.holds_a_share(output, value) and any(_is_over_rows(v, value) for v in above)


def _is_over_rows(statistic: ir.Value, like: ir.Value) -> bool:
    """Return whether a value with the shape of another one reduces the first axis of a larger value."""
    node = statistic.producer()
    if node is None or not node.op_type.startswith("Reduce") or statistic.shape is None or like.shape is None:
        return False
    whole, *others = inputs_of(node)
    axes = constant_tensor(others[0]) if others else None
    if axes is None or whole.shape is None or not axes.size or len(whole.shape) <= len(like.shape):
        return False
    shapes = ([dim for dim in value.shape or () if dim != 1] for value in (statistic, like))
    return 0 in {int(axis) % len(whole.shape) for axis in axes.numpy().flat} and next(shapes) == next(shapes)


def _adds_nothing(output: ir.Value, value: ir.Value) -> bool:
    node = output.producer()
    if node is None or node.op_type not in ("Add", "Sub") or node.inputs[0] is not value:
        return False
    return is_known_zero(node.inputs[1])
