"""Loss scaling in the training model of an artifact folder: one decision for each window of accumulated gradients."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence

import numpy as np
import onnx_ir as ir

from graphscale.analysis.hints import Hints
from graphscale.analysis.proof import prove
from graphscale.analysis.report import STATE_OF_SCALE, Report
from graphscale.errors import GradientError, InvalidLossScaleError
from graphscale.graph.builder import Builder, Editor, Names, replace_reads
from graphscale.graph.cones import descendants
from graphscale.graph.types import dtype_of
from graphscale.graph.values import uses_of
from graphscale.graph.walks import ancestors
from graphscale.operators import written_inputs
from graphscale.ort.artifacts.folder import (
    EVAL_MODEL,
    LAZY_RESET_GRAD,
    TRAINING_MODEL,
    ArtifactFolder,
    buffer_of,
    watched_outputs,
)
from graphscale.passes import (
    CheckFinite,
    GuardUpdates,
    OrderWrites,
    ScaleLoss,
    UnscaleGradients,
    UpdateLossScale,
    scale_nodes,
)
from graphscale.passes.guard_in_place import guard_written_input
from graphscale.passes.nodes.finite import all_finite
from graphscale.passes.nodes.update_rule import add_update_rule
from graphscale.passes.nodes.write_order import order_writes
from graphscale.passes.step_pass import carry
from graphscale.pipeline import complete_report
from graphscale.policy.dynamic_rule import DynamicRule
from graphscale.policy.loss_scale import DynamicLossScale, LossScale
from graphscale.policy.names import ScaledValue
from graphscale.step.training_step import Carried, Step
from graphscale.targets import Target

__all__ = ["initial_states", "scale_training_model"]


def scale_training_model(
    artifacts: ArtifactFolder, policy: LossScale, target: Target, loss: str | Sequence[str] | None, skip_nonfinite: bool
) -> tuple[dict[str, float], dict[str, str], Report]:
    """Add loss scaling to the training model of a folder, in place; the options are those of `scale_artifacts`.

    Returns:
        `{name: initial value}` of the state, in the order of the model's inputs, none for a fixed scale; the names of
        the loss, the scale and the state, for the stamp; findings and changes.

    Raises:
        GraphscaleError: the model is not acceptable.
    """
    model, checkpoint = artifacts.models[TRAINING_MODEL], artifacts.checkpoint
    nodes_before = len(model.graph)
    _describe_gradients(model.graph)
    roles = watched_outputs(model, loss)
    begin = ScaleLoss(policy, target=target.name, skip_nonfinite=skip_nonfinite).begin
    step = UnscaleGradients().run(begin(model, Hints(loss, roles=roles)))
    statistics = [node for node in model.graph if written_inputs(node)]
    if statistics:
        step = CheckFinite().run(step)
    _check_accumulated(step, checkpoint.trainable, str(artifacts.path / TRAINING_MODEL))
    # A training session feeds the parameters of the training model, including the state, to the eval model.
    taken = {*checkpoint.parameters, *ir.convenience.create_value_mapping(artifacts.models[EVAL_MODEL].graph)}
    editor = step.editor
    assert editor is not None
    step, window_finite = _add_windows(step, editor, taken)
    written = list[Carried | None]()
    if step.all_finite is not None:
        guard, finite = GuardUpdates.builder(editor), step.all_finite
        for node in statistics:
            written += (guard_written_input(guard, node, i, o, finite) for i, o in written_inputs(node).items())
        model.graph.sort()
    step = dataclasses.replace(step, carried=(*step.carried, *filter(None, written)))
    order_writes(OrderWrites.builder(editor))
    scale, own = step.scale.value, scale_nodes(model.graph)
    step.prove(own)
    if window_finite is not None:
        prove(model.graph, scale, step.loss, checked=step.checked, all_finite=window_finite, rule_nodes=own)
    report = complete_report(step, model.graph, nodes_before)
    names = {role.value: value.name or "" for role, value in step.scale.states.items()}
    states = {names[role]: number for role, number in initial_states(policy).items()}
    return states, {ScaledValue.LOSS.value: step.loss.name or "", **names}, report


def _describe_gradients(graph: ir.Graph) -> None:
    """Add the type and shape of their buffers to the gradients, which ONNX Runtime omits."""
    for node in graph:
        if node.op_type == "InPlaceAccumulatorV2":
            buffer, gradient = node.inputs[:2]
            if buffer is not None and gradient is not None and gradient.dtype is None:
                gradient.type, gradient.shape = ir.TensorType(dtype_of(gradient)), _copy_shape(buffer)


def _check_accumulated(step: Step, trainable: Collection[str], name: str) -> None:
    """Check that every trainable parameter's gradient is accumulated and scaled, and nothing else is scaled."""
    accumulated: dict[str, ir.Value] = {}
    for node in step.accumulators:
        buffer, gradient = node.inputs[:2]
        if node.op_type == "InPlaceAccumulatorV2" and buffer is not None and gradient is not None:
            accumulated[buffer.name or ""] = gradient
    gradients = {quotient.value for quotient in step.quotients}
    traced = descendants(step.graph, gradients)
    for parameter in trainable:
        if accumulated.get(buffer_of(parameter)) not in traced:
            raise GradientError(
                f"{name} does not accumulate the gradient of {parameter!r} in {buffer_of(parameter)!r}, or the "
                "gradient cannot be traced to the loss; make the folder with generate_artifacts"
            )
    reach = ancestors(accumulated.values())
    for found in step.quotients:
        if not reach.issuperset(found.checked):
            raise GradientError(
                f"{name} does not accumulate the gradient {found.name!r}: "
                "no step would be skipped for it; remove it from the outputs"
            )


def _add_windows(step: Step, editor: Editor, taken: Collection[str]) -> tuple[Step, ir.Value | None]:
    """Run the update rule at the beginning of a window, on the state of the last window.

    Before: `fc_grad = Div(fc_grad.scaled, current_loss_scale)`
            `fc_grad.accumulation.out = InPlaceAccumulatorV2(fc_grad.accumulation.buffer, fc_grad, lazy_reset_grad)`
    After:  `updates = And(lazy_reset_grad, window_finite >= 0)`
            `next_scale, next_count = UpdateLossScale(current_loss_scale, good_steps, window_finite > 0)`
            `window_loss_scale = Where(updates, next_scale, current_loss_scale)`, written to `current_loss_scale`
            `fc_grad = Div(fc_grad.scaled, window_loss_scale)`
            `window_finite` is assigned 1 if all accumulated gradients are finite, else 0

    Before the first window `window_finite` is -1. The scale is constant within a window. A non-finite gradient stays
    in its buffer to the window's end, so that the optimizer model, which reads the buffers, skips the window.

    Args:
        step: the step, with a loss scale and unscaled gradients.
        editor: the editor of its graph.
        taken: the names in the eval model and the checkpoint, which the state must not get.

    Returns:
        the step, with the scale throughout the present window and all state, graph inputs without initializers; a
        scalar bool value, true if all gradients accumulated so far in the window are finite, None for a fixed scale.
    """
    bound, policy = step.scale, step.scale.policy
    if not isinstance(policy, DynamicLossScale):
        return step, None
    if policy.rule.on_stuck == "accept":
        raise InvalidLossScaleError(
            'on_stuck="accept" has no effect in a training session, whose optimizer model sees the gradients '
            'alone; choose "hold", "flag", "stop" or "reset"'
        )
    reads, states = uses_of(bound.value), dict(bound.states)
    for role, number in initial_states(policy).items():
        if role not in states:
            states[role] = editor.state(role.wanted, np.asarray(number, dtype=np.float32))
    for state in states.values():
        _make_plain(editor, state, taken)
    build = UpdateLossScale.builder(editor, shape=())
    scale, carried = _begin(build, step, policy.rule, states)
    replace_reads(bound.value, scale, reads)
    gradients = [_accumulated(editor, node) for node in step.accumulators]
    decision = all_finite(CheckFinite.builder(editor), gradients, bound.target)
    finite = states[ScaledValue.WINDOW_FINITE]
    following = editor.builder("accumulation-window").cast(decision, ir.DataType.FLOAT, name=f"{finite.name}.next")
    carried.append(carry(build, finite, following, STATE_OF_SCALE, in_place=True, guarded=False))
    editor.graph.sort()
    window = dataclasses.replace(bound, value=scale, states=states)
    return dataclasses.replace(step, scales=(window,), carried=tuple(carried)), decision


def _make_plain(editor: Editor, state: ir.Value, taken: Collection[str]) -> None:
    """Remove the state's value, which is in the checkpoint."""
    wanted = state.name or ""
    del editor.graph.initializers[wanted]
    state.const_value = None
    if wanted in taken:
        state.name = Names([*taken, *(value.name or "" for value in editor.graph.inputs)]).reserve(wanted)
        editor.refresh()
        editor.renamed.append((wanted, state.name))


def initial_states(policy: LossScale | None) -> dict[ScaledValue, float]:
    """Return the states of a loss scale and its window at the beginning, by their role; none for a fixed scale."""
    if not isinstance(policy, DynamicLossScale):
        return {}
    further = [ScaledValue.WINDOW_FINITE, *([] if policy.rule.on_stuck == "hold" else [ScaledValue.STUCK])]
    return policy.rule.carried(policy.state) | {role: float(role.default) for role in further}


def _begin(
    build: Builder, step: Step, rule: DynamicRule, states: Mapping[ScaledValue, ir.Value]
) -> tuple[ir.Value, list[Carried]]:
    """Run the update rule at the beginning of a window after another; return the scale of the window, and its state."""
    editor, finite = build.editor, states[ScaledValue.WINDOW_FINITE]
    resets = next(value for value in editor.graph.inputs if value.name == LAZY_RESET_GRAD)
    shape = editor.constant("graphscale/scalar_shape", np.asarray([], dtype=np.int64))
    zero = editor.constant("graphscale/no_window", np.asarray(0, dtype=np.float32))
    flag, real = ir.DataType.BOOL, ir.DataType.FLOAT
    begins = build.op("Reshape", [resets, shape], name="window_begins", dtype=flag)
    first = build.op("Less", [finite, zero], name="first_window", dtype=flag)
    later = build.op("Not", [first], name="not_first_window", dtype=flag)
    updates = build.op("And", [begins, later], name="updates_loss_scale", dtype=flag)
    was_finite = build.op("Greater", [finite, zero], name="last_window_finite", dtype=flag)
    updated = add_update_rule(build, step.model, rule, step.scale.states, was_finite, in_place=True)
    following = dict(updated.next)
    if updated.stuck is not None:
        following[ScaledValue.STUCK] = build.cast(updated.stuck, real, name="stuck.number")
    window = {
        role: build.op("Where", [updates, value, states[role]], name=f"window_{role}", dtype=real)
        for role, value in following.items()
    }
    carried = [
        carry(build, states[role], value, STATE_OF_SCALE, in_place=True, guarded=False)
        for role, value in window.items()
    ]
    return window[ScaledValue.LOSS_SCALE], carried


def _accumulated(editor: Editor, node: ir.Node) -> ir.Value:
    """Return the accumulator's second output: its buffer with the gradient added."""
    buffer = node.inputs[0]
    assert buffer is not None
    if len(node.outputs) < 2:
        node.resize_outputs(2)
    value = node.outputs[1]
    if not value.name:
        value.name = editor.unique(f"{buffer.name}.sum")
        value.type = ir.TensorType(dtype_of(buffer))
        value.shape = _copy_shape(buffer)
    return value


def _copy_shape(value: ir.Value) -> ir.Shape | None:
    """Return a value's shape for another value."""
    return None if value.shape is None else value.shape.copy()
