"""A loss scale as values of a graph: its state, and the update rule that writes the next state."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from graphscale.graph.builder import Builder, Editor
from graphscale.passes.nodes.update_rule import UpdatedScale, add_update_rule
from graphscale.passes.nodes.write_order import write_in_place
from graphscale.policy.loss_scale import DynamicLossScale, FixedLossScale, LossScale
from graphscale.policy.names import ScaledValue
from graphscale.targets import get_target

__all__ = ["GraphScale"]


class GraphScale:
    """A loss scale with its state in a graph.

    Args:
        policy: a `FixedLossScale` or a `DynamicLossScale`; its current state becomes the initial state.
        graph: the main graph, or a model: then the update rule is a model-local function, called by one node, if the
            model's IR version has functions. In a bare graph, the rule is written as nodes.
        target: the runtime that executes the graph.

    Attributes:
        loss_scale: the scale: a scalar float32 initializer, for a dynamic scale also a graph input.
        states: all state by its role, including `loss_scale`; counts are int64, float32 where the target writes them in
            place. Empty for a fixed loss scale.
        updated: after `write`, the results of the update rule.
        alone: True if no other code adds nodes to the graph meanwhile, so that its names are known.
    """

    def __init__(self, policy: LossScale, graph: ir.Graph | ir.Model, target: str = "onnx") -> None:
        if not isinstance(policy, FixedLossScale | DynamicLossScale):
            raise TypeError(f"only FixedLossScale and DynamicLossScale have a graph mode; got {policy!r}")
        self.policy = policy
        self.target = get_target(target)
        self.model = graph if isinstance(graph, ir.Model) else None
        self.editor = Editor(graph.graph if isinstance(graph, ir.Model) else graph)
        self.updated: UpdatedScale | None = None
        self.alone = False
        self.states: dict[ScaledValue, ir.Value] = {}
        if isinstance(policy, FixedLossScale):
            array = np.asarray(policy(), dtype=np.float32)
            self.loss_scale = self.editor.constant(ScaledValue.LOSS_SCALE.wanted, array)
            return
        for role, value in policy.rule.carried(policy.state).items():
            array = np.asarray(value, role.dtype(in_place=self.target.in_place))
            self.states[role] = self.editor.state(role.wanted, array)
        self.loss_scale = self.states[ScaledValue.LOSS_SCALE]

    @property
    def good_steps(self) -> ir.Value | None:
        """The count of good steps, a scalar initializer and graph input; None for a fixed loss scale."""
        return self.states.get(ScaledValue.GOOD_STEPS)

    @property
    def next_state(self) -> dict[ir.Value, ir.Value]:
        """The next value of each state value, after `write`."""
        return {} if self.updated is None else {self.states[role]: value for role, value in self.updated.next.items()}

    def __call__(self) -> ir.Value:
        """Return the current loss scale, a scalar float32 value of the graph."""
        return self.loss_scale

    def write(self, build: Builder, finite: ir.Value) -> ir.Node:
        """Add the update rule, and write the new state to graph outputs, or in place. Return the node of the new state.

        Args:
            build: the builder of the nodes.
            finite: the result of the finite check, a scalar bool value.
        """
        assert isinstance(self.policy, DynamicLossScale)
        in_place = self.target.in_place
        self.updated = updated = add_update_rule(
            build, self.model, self.policy.rule, self.states, finite, in_place=in_place
        )
        for state, value in self.next_state.items():
            self.editor.output(value, f"{state.name}.next")
        if updated.stuck is not None:
            self.editor.output(updated.stuck, ScaledValue.STUCK.wanted)
        if not in_place:
            return updated.node
        writes = [write_in_place(build, state, value) for state, value in self.next_state.items()]
        return writes[0]

    def applies(self, build: Builder, finite: ir.Value) -> ir.Value:
        """Return the scalar bool value that decides, after `write`, whether the step is applied: for finite gradients.

        A step is also applied where the scale is stuck and the policy accepts the step.
        """
        stuck = None if self.updated is None else self.updated.stuck
        if stuck is None or not isinstance(self.policy, DynamicLossScale) or self.policy.rule.on_stuck != "accept":
            return finite
        return build.op("Or", [finite, stuck], name="applies", like=finite)

    def look_for_names(self) -> None:
        """Reserve names that other code may have added to the graph since."""
        if not self.alone:
            self.editor.refresh()
