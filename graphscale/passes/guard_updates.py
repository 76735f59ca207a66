"""guard-updates: apply the step only if every gradient is finite."""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import InPlacePass, PassResult

from graphscale.analysis.optimizers import optimizer_of
from graphscale.analysis.types import dtype_of
from graphscale.analysis.updates import Update
from graphscale.analysis.values import constant_tensor
from graphscale.editing import Position, shape_like
from graphscale.passes.rewrite import Carried, Rewrite, rewrite_of

__all__ = ["WRITES_INPUTS", "GuardUpdates", "guard_written_input"]

NAME = "guard-updates"

# Operators that write a running statistic into the buffer of an input: {operator: {input: output}}.
WRITES_INPUTS = {("com.microsoft", "BatchNormInternal"): {3: 1, 4: 2}}


@dataclasses.dataclass(frozen=True)
class GuardUpdates(InPlacePass):
    """Let all carried state keep its old value on a step with a non-finite gradient.

    Before: `w.next = Sub(w, step)`
    After:  `w.next.unguarded = Sub(w, step); w.next = Where(all_finite, w.next.unguarded, w)`

    What reads `w.next` inside the graph goes on to read the unguarded value. Where the target writes state in place,
    float32 state that has an initializer is written there, and its output is gone. An in-place accumulator gets
    `Where(all_finite, gradient, -0.0)`: x + -0.0 is x, bit for bit.
    """

    def call(self, model: ir.Model) -> PassResult:
        rewrite = rewrite_of(model, NAME, after="check-finite")
        graph, finite = rewrite.training_graph, rewrite.all_finite
        changed = False
        for update in graph.updates:
            changed |= _carry(rewrite, update, finite)
        if finite is not None:
            for node in graph.accumulators:
                _guard_accumulator(rewrite, node, finite)
            for node in tuple(model.graph):
                _signal_optimizer(rewrite, node, finite)
                for i, o in WRITES_INPUTS.get((node.domain, node.op_type), {}).items():
                    guard_written_input(rewrite, node, i, o, finite)
            # Guards that stand before what they read, and the check at the end: restore the order.
            model.graph.sort()
            rewrite.bound.editor.output(finite, "all_finite")
        return PassResult(model, modified=changed or finite is not None)


def _carry(rewrite: Rewrite, update: Update, finite: ir.Value | None) -> bool:
    """Guard one piece of carried state, and write it in place where the target can; whether that changed anything."""
    editor, state, new = rewrite.bound.editor, update.input, rewrite.bound.editor.current(update.output)
    promoted = False
    if state.is_initializer() and not state.is_graph_input():
        editor.graph.inputs.append(state)
        promoted = True
    if finite is not None:
        outputs = [(f"{new.name}.guarded", dtype_of(new), shape_like(new))]
        guarded = editor.node(NAME, "Where", [finite, new, state], outputs).outputs[0]
        editor.take_over_output(new, guarded, "unguarded")
        new = guarded
    in_place = rewrite.bound.target.in_place and state.is_initializer() and state.dtype is ir.DataType.FLOAT
    if in_place:
        rewrite.bound.write_in_place(state, new, NAME)
        editor.graph.outputs.remove(new)
    rewrite.carried.append(Carried(state, new, in_place))
    return promoted or in_place or finite is not None


def _guard_accumulator(rewrite: Rewrite, node: ir.Node, finite: ir.Value) -> None:
    buffer, gradient = node.inputs[0], node.inputs[1]
    assert buffer is not None and gradient is not None
    editor, dtype = rewrite.bound.editor, dtype_of(gradient)
    overwrite = constant_tensor(node.inputs[2]) if len(node.inputs) > 2 else None
    if overwrite is not None and overwrite.numpy().all():
        kept = buffer
    else:
        name = f"graphscale/negative_zero.{dtype.name.lower()}"
        zero = editor.graph.initializers.get(name)
        kept = editor.constant(name, np.asarray(-0.0, dtype=dtype.numpy())) if zero is None else zero
    outputs = [(f"{gradient.name}.guarded", dtype, shape_like(gradient))]
    guarded = editor.node(NAME, "Where", [finite, gradient, kept], outputs, at=("before", node)).outputs[0]
    node.replace_input_with(1, guarded)


def _signal_optimizer(rewrite: Rewrite, node: ir.Node, finite: ir.Value) -> None:
    """Tell an optimizer operator to do nothing on a skipped step; kernels may write its states in place."""
    optimizer = optimizer_of(node)
    if optimizer is None or optimizer.update_signal is None:
        return
    editor, index = rewrite.bound.editor, optimizer.update_signal
    signal = finite
    at: Position = ("before", node)
    given = node.inputs[index] if index < len(node.inputs) else None
    if given is not None:
        outputs = [("update_signal", ir.DataType.BOOL, shape_like(given))]
        signal = editor.node(NAME, "And", [given, finite], outputs, at=at).outputs[0]
    elif optimizer.signal_shape:
        shape = editor.graph.initializers.get("graphscale/signal_shape")
        if shape is None:
            shape = editor.constant("graphscale/signal_shape", np.asarray(optimizer.signal_shape, dtype=np.int64))
        outputs = [("update_signal", ir.DataType.BOOL, ir.Shape(optimizer.signal_shape))]
        signal = editor.node(NAME, "Reshape", [finite, shape], outputs, at=at).outputs[0]
    node.resize_inputs(max(len(node.inputs), index + 1))
    node.replace_input_with(index, signal)


def guard_written_input(rewrite: Rewrite, node: ir.Node, i: int, o: int, finite: ir.Value) -> None:
    """Let the operator write into a copy, and write the copy back if the step is applied."""
    state, new = node.inputs[i], node.outputs[o] if o < len(node.outputs) else None
    if state is None or new is None or not new.name or not (state.is_graph_input() or state.is_initializer()):
        return
    editor, dtype, shape = rewrite.bound.editor, dtype_of(state), shape_like(state)
    # Sum of one operand copies; Identity would share the buffer.
    copy = editor.node(NAME, "Sum", [state], [(f"{state.name}.copy", dtype, shape)], at=("before", node)).outputs[0]
    node.replace_input_with(i, copy)
    outputs = [(f"{state.name}.guarded", dtype, shape)]
    guarded = editor.node(NAME, "Where", [finite, new, state], outputs).outputs[0]
    rewrite.bound.write_in_place(state, guarded, NAME)
    rewrite.carried.append(Carried(state, guarded, in_place=True))
