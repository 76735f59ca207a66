"""guard-updates: apply the step only if every gradient is finite."""

from __future__ import annotations

import dataclasses

import onnx_ir as ir

from graphscale.analysis.updates import Update
from graphscale.errors import UnsupportedModelError
from graphscale.graph.builder import Builder
from graphscale.graph.marks import LOWER_TRAINING_OPS, PASS_KEY
from graphscale.graph.types import dtype_of
from graphscale.operators import writing_nodes
from graphscale.passes.check_finite import CheckFinite
from graphscale.passes.step_pass import StepPass, carry
from graphscale.policy.names import ScaledValue
from graphscale.step.training_step import Carried, Step
from graphscale.targets import Target

__all__ = ["GuardUpdates"]

# ONNX Runtime has no kernel of Where for the first type, and one for the second, which can hold all its values.
_WIDER = {
    ir.DataType.BOOL: ir.DataType.UINT8,
    ir.DataType.BFLOAT16: ir.DataType.FLOAT,
    ir.DataType.INT8: ir.DataType.INT32,
    ir.DataType.INT16: ir.DataType.INT32,
    ir.DataType.UINT16: ir.DataType.INT32,
    ir.DataType.UINT32: ir.DataType.INT64,
}


@dataclasses.dataclass(frozen=True)
class GuardUpdates(StepPass):
    """Keep the old value of all carried state on a step with a non-finite gradient.

    Before: `w.next = Sub(w, step)`
    After:  `w.next.unguarded = Sub(w, step); w.next = Where(all_finite, w.next.unguarded, w)`

    Readers of `w.next` inside the graph read the unguarded value. Where the target writes state in place,
    float32 state that has an initializer is written there, and its output is gone. An in-place accumulator gets
    `Where(all_finite, gradient, -0.0)`: x + -0.0 is x, bit for bit. A kernel that overwrites its statistics reads a
    copy.
    """

    name = "guard-updates"
    sign = "if"
    after = CheckFinite

    def apply(self, step: Step, build: Builder) -> Step:
        applies, carried, changed = step.guard, [*step.carried], step.guard is not None
        for update in step.states:
            is_changed, pair = _carry(build, update, None if update.kept else applies, step.scale.target)
            carried.append(pair)
            changed = changed or is_changed
        if applies is not None and step.all_finite is not None:
            writers = writing_nodes(build.editor.index.nodes)
            if writers or step.accumulators:
                from graphscale.graph.order import restore_order
                from graphscale.passes.guard_in_place import guard_in_place  # few steps write in place

                carried += guard_in_place(build, step.accumulators, writers, applies)
                # These guards are inserted before their nodes, and the check at the end: restore the order.
                restore_order(step.graph)
            build.editor.output(step.all_finite, ScaledValue.ALL_FINITE.wanted)
        return dataclasses.replace(step, carried=tuple(carried), modified=changed)


def _carry(build: Builder, update: Update, applies: ir.Value | None, target: Target) -> tuple[bool, Carried]:
    """Guard a piece of carried state, and write it in place where the target can; report whether the graph changed."""
    editor, state, new = build.editor, update.input, build.editor.current_output(update.output)
    promoted = state.is_initializer() and not state.is_graph_input()
    if promoted:
        editor.graph.inputs.append(state)
    if applies is not None:
        guarded = _select(build, applies, new, _old_value(new, state))
        editor.take_over_output(new, guarded, "unguarded")
        new = guarded
    in_place = target.in_place and state.is_initializer() and state.dtype is ir.DataType.FLOAT
    # A state that is itself an output must keep the old value to the end of the step.
    in_place = in_place and not state.is_graph_output()
    if in_place:
        editor.graph.outputs.remove(new)
    carried = carry(build, state, new, update.how, in_place=in_place, guarded=not update.kept)
    return promoted or in_place or applies is not None, carried


def _old_value(new: ir.Value, state: ir.Value) -> ir.Value:
    """Return a state's value after a skipped step: its own, or that after the reset of an accumulator."""
    node = new.producer()
    if node is not None and node.op_type == "Add" and node.metadata_props.get(PASS_KEY) == LOWER_TRAINING_OPS:
        from graphscale.flow.resets import is_reset

        kept = node.inputs[0]
        if kept is not None and is_reset(kept, state):
            return kept
    return state


def _select(build: Builder, applies: ir.Value, new: ir.Value, old: ir.Value) -> ir.Value:
    """Add a select of `new` if the step is applied, else `old`; in a wider type where `Where` has no kernel."""
    if isinstance(new.type, ir.SequenceType):
        raise UnsupportedModelError(
            f"the state {old.name!r} is a sequence of tensors, and no operator selects between two sequences on a step "
            "that may be skipped; export the step with an input and an output for each tensor"
        )
    dtype = dtype_of(new)
    wide = _WIDER.get(dtype, dtype)
    if wide is dtype:
        return build.op("Where", [applies, new, old], name=f"{new.name}.guarded", like=new, dtype=dtype)
    operands = [build.cast(value, wide, name=f"{value.name}.wide", like=new) for value in (new, old)]
    selected = build.op("Where", [applies, *operands], name=f"{new.name}.selected", like=new, dtype=wide)
    return build.cast(selected, dtype, name=f"{new.name}.guarded")
