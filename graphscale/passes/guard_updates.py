"""guard-updates: apply the step only if every gradient is finite."""

from __future__ import annotations

import dataclasses

import onnx_ir as ir

from graphscale.analysis.updates import Update
from graphscale.graph.builder import Editor
from graphscale.graph.order import restore_order
from graphscale.graph.types import dtype_of
from graphscale.operators import Trait, has_trait, written_inputs
from graphscale.passes.check_finite import CheckFinite
from graphscale.passes.guard_in_place import guard_accumulator, guard_optimizer, guard_written_input
from graphscale.passes.rewrite import Carried, Rewrite, RewritePass

__all__ = ["GuardUpdates"]

NAME = "guard-updates"

# ONNX Runtime has no kernel of Where for the first, and one that holds all of its values for the second.
_WIDER = {
    ir.DataType.BOOL: ir.DataType.UINT8,
    ir.DataType.INT8: ir.DataType.INT32,
    ir.DataType.INT16: ir.DataType.INT32,
    ir.DataType.UINT16: ir.DataType.INT32,
    ir.DataType.UINT32: ir.DataType.INT64,
}


@dataclasses.dataclass(frozen=True)
class GuardUpdates(RewritePass):
    """Let all carried state keep its old value on a step with a non-finite gradient.

    Before: `w.next = Sub(w, step)`
    After:  `w.next.unguarded = Sub(w, step); w.next = Where(all_finite, w.next.unguarded, w)`

    What reads `w.next` inside the graph goes on to read the unguarded value. Where the target writes state in place,
    float32 state that has an initializer is written there, and its output is gone. An in-place accumulator gets
    `Where(all_finite, gradient, -0.0)`: x + -0.0 is x, bit for bit.
    """

    name = NAME
    sign = "if"
    after = CheckFinite

    def rewrite(self, rewrite: Rewrite) -> bool:
        graph, applies = rewrite.training_graph, rewrite.applies
        changed = False
        for update in graph.updates:
            changed |= _carry(rewrite, update, applies)
        if applies is not None and rewrite.all_finite is not None:
            for node in graph.accumulators:
                guard_accumulator(rewrite, node, applies)
            for node in [node for node in graph.graph if has_trait(node, Trait.WRITES_INPUT)]:
                guard_optimizer(rewrite, node, applies)
                for i, o in written_inputs(node).items():
                    guard_written_input(rewrite, node, i, o, applies)
            # Guards that stand before what they read, and the check at the end: restore the order.
            restore_order(graph.graph)
            rewrite.bound.editor.output(rewrite.all_finite, "all_finite")
        return changed or applies is not None


def _carry(rewrite: Rewrite, update: Update, applies: ir.Value | None) -> bool:
    """Guard one piece of carried state, and write it in place where the target can; whether that changed anything."""
    editor, state, new = rewrite.bound.editor, update.input, rewrite.bound.editor.current_output(update.output)
    promoted = False
    if state.is_initializer() and not state.is_graph_input():
        editor.graph.inputs.append(state)
        promoted = True
    if applies is not None:
        guarded = _select(editor, applies, new, state)
        editor.take_over_output(new, guarded, "unguarded")
        new = guarded
    in_place = rewrite.bound.target.in_place and state.is_initializer() and state.dtype is ir.DataType.FLOAT
    # What is an output itself must still hold the old value when the step is over.
    in_place = in_place and not state.is_graph_output()
    if in_place:
        rewrite.bound.write_in_place(state, new, NAME)
        editor.graph.outputs.remove(new)
    rewrite.carried.append(Carried(state, new, in_place, update.how))
    return promoted or in_place or applies is not None


def _select(editor: Editor, applies: ir.Value, new: ir.Value, old: ir.Value) -> ir.Value:
    """`new` if the step is applied, else `old`; through a wider type where `Where` has no kernel for theirs."""
    build, dtype = editor.builder(NAME), dtype_of(new)
    wide = _WIDER.get(dtype, dtype)
    if wide is dtype:
        return build.op("Where", [applies, new, old], name=f"{new.name}.guarded", like=new, dtype=dtype)
    operands = [build.cast(value, wide, name=f"{value.name}.wide", like=new) for value in (new, old)]
    selected = build.op("Where", [applies, *operands], name=f"{new.name}.selected", like=new, dtype=wide)
    return build.cast(selected, dtype, name=f"{new.name}.guarded")
