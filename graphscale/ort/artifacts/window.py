"""accumulation-window: one decision of the loss scale for each window of accumulated gradients."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping

import numpy as np
import onnx_ir as ir

from graphscale.analysis.report import STATE_OF_SCALE
from graphscale.errors import InvalidLossScaleError
from graphscale.graph.builder import Builder, Names, replace_reads, shape_like
from graphscale.graph.types import dtype_of
from graphscale.graph.values import uses_of
from graphscale.ort.artifacts.folder import LAZY_RESET_GRAD
from graphscale.passes import CheckFinite, Rewrite, RewritePass, UnscaleGradients, UpdateLossScale
from graphscale.passes.nodes.finite import all_finite
from graphscale.passes.nodes.graph_scale import GraphScale
from graphscale.passes.nodes.update_rule import add_update_rule
from graphscale.policy.dynamic_rule import LOSS_SCALE, STUCK, DynamicRule
from graphscale.policy.loss_scale import DynamicLossScale, LossScale

__all__ = ["AccumulationWindow", "initial_states"]

WINDOW_FINITE = "window_finite"


@dataclasses.dataclass
class AccumulationWindow(RewritePass):
    """Run the update rule where a window begins, on what the window before left behind.

    Before: `fc_grad = Div(fc_grad.scaled, current_loss_scale)`
            `fc_grad.accumulation.out = InPlaceAccumulatorV2(fc_grad.accumulation.buffer, fc_grad, lazy_reset_grad)`
    After:  `updates = And(lazy_reset_grad, window_finite >= 0)`
            `next_scale, next_count = UpdateLossScale(current_loss_scale, good_steps, window_finite > 0)`
            `window_loss_scale = Where(updates, next_scale, current_loss_scale)`, written to `current_loss_scale`
            `fc_grad = Div(fc_grad.scaled, window_loss_scale)`
            `window_finite` is assigned whether the accumulated gradients are all finite: 1 or 0

    Before the first window `window_finite` is -1. The scale is constant within a window. A non-finite gradient stays
    in its buffer to the window's end, so that the optimizer model, which looks at the buffers, skips the window.

    Attributes:
        taken: names that the state must not get: those in the eval model and the checkpoint.
        states: the state by its role, graph inputs without initializers, float32 scalars; after the pass has run.
        loss_scale: the scale throughout the present window; None for a fixed one.
        all_finite: whether the gradients accumulated in the window so far are all finite, a scalar bool value; None
            for a fixed scale.
    """

    name = "accumulation-window"
    after = UnscaleGradients

    taken: Collection[str] = ()
    states: dict[str, ir.Value] = dataclasses.field(default_factory=dict)
    loss_scale: ir.Value | None = None
    all_finite: ir.Value | None = None

    def rewrite(self, rewrite: Rewrite, build: Builder) -> bool:
        """Rewrite the training model, in which the loss scale is bound and the gradients are unscaled."""
        bound = rewrite.bound
        policy = bound.policy
        if not isinstance(policy, DynamicLossScale):
            return False
        if policy.rule.on_stuck == "accept":
            raise InvalidLossScaleError(
                'on_stuck="accept" has no effect in a training session, whose optimizer model sees the gradients '
                'alone; choose "hold", "flag" or "reset"'
            )
        reads = uses_of(bound.loss_scale)
        self.states = dict(bound.states)
        for role, number in initial_states(policy).items():
            if role not in self.states:
                self.states[role] = bound.editor.state(role, np.asarray(number, dtype=np.float32))
        for state in self.states.values():
            self._make_plain(bound, state)
        updating = UpdateLossScale.builder(bound.editor, shape=())
        self.loss_scale = _begin(updating, rewrite, policy.rule, self.states)
        replace_reads(bound.loss_scale, self.loss_scale, reads)
        gradients = [_accumulated(rewrite, node) for node in rewrite.training_graph.accumulators]
        self.all_finite = all_finite(CheckFinite.builder(bound.editor), gradients, bound.target)
        finite = self.states[WINDOW_FINITE]
        number = build.cast(self.all_finite, ir.DataType.FLOAT, name=f"{finite.name}.next")
        rewrite.carry(updating, finite, number, STATE_OF_SCALE, in_place=True, guarded=False)
        bound.graph.sort()
        return True

    def _make_plain(self, bound: GraphScale, state: ir.Value) -> None:
        """Leave the state's value to the checkpoint."""
        assert state.name is not None
        del bound.graph.initializers[state.name]
        state.const_value = None
        wanted = state.name
        if wanted in self.taken:
            state.name = Names([*self.taken, *(value.name or "" for value in bound.graph.inputs)]).reserve(wanted)
            bound.editor.refresh()
            bound.editor.renamed.append((wanted, state.name))


def initial_states(policy: LossScale | None) -> dict[str, float]:
    """Return the states of a loss scale and its window at the beginning, by their role; none for a fixed scale."""
    if not isinstance(policy, DynamicLossScale):
        return {}
    states = policy.rule.carried(policy.state) | {WINDOW_FINITE: -1.0}
    return states if policy.rule.on_stuck == "hold" else states | {STUCK: 0.0}


def _begin(build: Builder, rewrite: Rewrite, rule: DynamicRule, states: Mapping[str, ir.Value]) -> ir.Value:
    """Run the update rule if a window begins and there was one before; return the scale of the window."""
    bound, editor, finite = rewrite.bound, rewrite.bound.editor, states[WINDOW_FINITE]
    resets = next(value for value in bound.graph.inputs if value.name == LAZY_RESET_GRAD)
    shape = editor.constant("graphscale/scalar_shape", np.asarray([], dtype=np.int64))
    zero = editor.constant("graphscale/no_window", np.asarray(0, dtype=np.float32))
    flag, real = ir.DataType.BOOL, ir.DataType.FLOAT
    begins = build.op("Reshape", [resets, shape], name="window_begins", dtype=flag)
    first = build.op("Less", [finite, zero], name="first_window", dtype=flag)
    later = build.op("Not", [first], name="not_first_window", dtype=flag)
    updates = build.op("And", [begins, later], name="updates_loss_scale", dtype=flag)
    was_finite = build.op("Greater", [finite, zero], name="last_window_finite", dtype=flag)
    updated = add_update_rule(build, bound.model, rule, bound.states, was_finite, in_place=True)
    following = dict(updated.next)
    if updated.stuck is not None:
        following[STUCK] = build.cast(updated.stuck, real, name="stuck.number")
    window = {
        role: build.op("Where", [updates, value, states[role]], name=f"window_{role}", dtype=real)
        for role, value in following.items()
    }
    for role, value in window.items():
        rewrite.carry(build, states[role], value, STATE_OF_SCALE, in_place=True, guarded=False)
    return window[LOSS_SCALE]


def _accumulated(rewrite: Rewrite, node: ir.Node) -> ir.Value:
    """Return the accumulator's second output: its buffer, after the gradient was added."""
    buffer = node.inputs[0]
    assert buffer is not None
    if len(node.outputs) < 2:
        node.resize_outputs(2)
    value = node.outputs[1]
    if not value.name:
        value.name = rewrite.bound.editor.unique(f"{buffer.name}.sum")
        value.type = ir.TensorType(dtype_of(buffer))
        value.shape = shape_like(buffer)
    return value
