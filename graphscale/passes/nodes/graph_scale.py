"""A loss scale in a graph: its state, the update rule that writes the next state, and the decision about a step."""

from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np
import onnx_ir as ir

from graphscale.errors import InvalidLossScaleError
from graphscale.graph.builder import Builder, Editor
from graphscale.graph.types import dtype_of
from graphscale.graph.values import constant_tensor
from graphscale.graph.walks import source_by_trait
from graphscale.operators import Trait
from graphscale.passes.nodes.update_rule import add_update_rule
from graphscale.policy.loss_scale import DynamicLossScale, FixedLossScale, LossScale
from graphscale.policy.names import ScaledValue
from graphscale.step.training_step import Scale
from graphscale.targets import Target

__all__ = ["add_decision", "add_rule", "add_scale", "refuse_infinite_seed"]


def add_scale(editor: Editor, policy: LossScale, target: Target) -> Scale:
    """Add a loss scale to a graph, with the present state of its policy.

    The scale is a scalar float32 initializer, and so is a dynamic one's state, which is also a graph input: counts are
    int64, float32 where the target writes them in place.
    """
    if isinstance(policy, FixedLossScale):
        array = np.asarray(policy(), dtype=np.float32)
        return Scale(policy, target, editor.constant(ScaledValue.LOSS_SCALE.wanted, array))
    if not isinstance(policy, DynamicLossScale):
        raise TypeError(f"only FixedLossScale and DynamicLossScale have a graph mode; got {policy!r}")
    states = {
        role: editor.state(role.wanted, np.asarray(number, dtype=role.dtype(in_place=target.in_place)))
        for role, number in policy.rule.carried(policy.state).items()
    }
    return Scale(policy, target, states[ScaledValue.LOSS_SCALE], states)


def add_rule(build: Builder, model: ir.Model | None, scale: Scale, finite: ir.Value) -> tuple[Scale, ir.Node]:
    """Add the update rule of a dynamic scale, and write the new state to graph outputs, or in place.

    Args:
        build: the builder of the nodes.
        model: the model, which gets the rule as a function where it has functions; None for a bare graph.
        scale: the scale.
        finite: the result of the finite check, a scalar bool value.

    Returns:
        the scale with its next state, and the node of the new state.
    """
    assert isinstance(scale.policy, DynamicLossScale)
    in_place = scale.target.in_place
    updated = add_update_rule(build, model, scale.policy.rule, scale.states, finite, in_place=in_place)
    for role, value in updated.next.items():
        build.editor.output(value, f"{scale.states[role].name}.next")
    if updated.stuck is not None:
        build.editor.output(updated.stuck, ScaledValue.STUCK.wanted)
    node = updated.node
    if in_place:
        from graphscale.passes.nodes.write_order import write_in_place  # few targets do

        node, *_ = [write_in_place(build, scale.states[role], value) for role, value in updated.next.items()]
    return dataclasses.replace(scale, next=updated.next, stuck=updated.stuck), node


def add_decision(build: Builder, scale: Scale, finite: ir.Value) -> ir.Value:
    """Return the scalar bool value that decides, after `add_rule`, whether the step is applied: for finite gradients.

    A step is also applied where the scale is stuck and the policy accepts the step.
    """
    policy = scale.policy
    if scale.stuck is None or not isinstance(policy, DynamicLossScale) or policy.rule.on_stuck != "accept":
        return finite
    return build.op("Or", [finite, scale.stuck], name="applies", like=finite)


def refuse_infinite_seed(value: ir.Value, policy: LossScale) -> None:
    """Refuse a fixed scale whose product with a constant seed is infinite in the seed's type."""
    seed = constant_tensor(source_by_trait(value, Trait.VIEW | Trait.REPEAT))
    if seed is None or seed.size == 0 or not isinstance(policy, FixedLossScale):
        return
    limit = float(ml_dtypes.finfo(dtype_of(value).numpy()).max)  # type: ignore[no-untyped-call]
    size = float(np.abs(seed.numpy()).max())
    if size * policy() > limit:
        raise InvalidLossScaleError(
            f"the constant seed {value.name!r} times the fixed loss scale {policy():g} is infinite in "
            f'{dtype_of(value).name}, so that no gradient is finite; pass at most {limit / size:g}, or "dynamic"'
        )
