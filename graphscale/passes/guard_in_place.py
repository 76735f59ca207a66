"""Guards of what operators write in place: accumulators, optimizers, running statistics. Used by guard-updates."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from graphscale.analysis.report import WRITTEN_IN_PLACE
from graphscale.graph.builder import Editor, Position, shape_like
from graphscale.graph.types import dtype_of
from graphscale.graph.values import constant_tensor
from graphscale.operators import Optimizer, optimizer_of
from graphscale.passes.rewrite import Carried, Rewrite

__all__ = ["guard_accumulator", "guard_optimizer", "guard_written_input"]

NAME = "guard-updates"


def guard_accumulator(rewrite: Rewrite, node: ir.Node, applies: ir.Value) -> None:
    """Let an accumulator add nothing on a skipped step: -0.0, since x + -0.0 is x, bit for bit."""
    buffer, gradient = node.inputs[0], node.inputs[1]
    assert buffer is not None and gradient is not None
    editor, dtype = rewrite.bound.editor, dtype_of(gradient)
    given = node.inputs[2] if len(node.inputs) > 2 else None
    overwrite = constant_tensor(given)
    if overwrite is not None and overwrite.numpy().all():
        kept = buffer
    elif given is None and node.op_type == "InPlaceAccumulatorV2":
        # This kernel turns -0.0 into 0.0 when it adds: overwrite the buffer with itself instead.
        kept = buffer
        _set_flag(editor, node, 2, applies)
    else:
        name = f"graphscale/negative_zero.{dtype.name.lower()}"
        kept = editor.shared_constant(name, np.asarray(-0.0, dtype=dtype.numpy()))
    outputs = [(f"{gradient.name}.guarded", dtype, shape_like(gradient))]
    guarded = editor.node(NAME, "Where", [applies, gradient, kept], outputs, at=("before", node)).outputs[0]
    node.replace_input_with(1, guarded)


def _set_flag(editor: Editor, node: ir.Node, index: int, applies: ir.Value) -> None:
    at: Position = ("before", node)
    skipped = editor.node(NAME, "Not", [applies], [("skipped", ir.DataType.BOOL, ir.Shape([]))], at=at).outputs[0]
    node.resize_inputs(max(len(node.inputs), index + 1))
    node.replace_input_with(index, _as_vector(editor, skipped, at))


def _as_vector(editor: Editor, flag: ir.Value, at: Position) -> ir.Value:
    shape = editor.shared_constant("graphscale/flag_shape", np.asarray([1], dtype=np.int64))
    outputs = [(f"{flag.name}.vector", ir.DataType.BOOL, ir.Shape([1]))]
    return editor.node(NAME, "Reshape", [flag, shape], outputs, at=at).outputs[0]


def guard_optimizer(rewrite: Rewrite, node: ir.Node, applies: ir.Value) -> None:
    """Tell an optimizer operator to do nothing on a skipped step; kernels may write its states in place."""
    optimizer = optimizer_of(node)
    if optimizer is None:
        return
    _protect_states(rewrite, node, optimizer, applies)
    if optimizer.update_signal is None:
        return
    editor, index = rewrite.bound.editor, optimizer.update_signal
    signal = applies
    at: Position = ("before", node)
    given = node.inputs[index] if index < len(node.inputs) else None
    if given is not None:
        outputs = [("update_signal", ir.DataType.BOOL, shape_like(given))]
        signal = editor.node(NAME, "And", [given, applies], outputs, at=at).outputs[0]
    elif optimizer.signal_shape:
        signal = _as_vector(editor, applies, at)
    node.resize_inputs(max(len(node.inputs), index + 1))
    node.replace_input_with(index, signal)


def _protect_states(rewrite: Rewrite, node: ir.Node, optimizer: Optimizer, applies: ir.Value) -> None:
    """Give an optimizer copies of its states: CPU kernels overwrite what they read, and the guard needs the old."""
    for o in range(len(node.outputs)):
        i = optimizer.source(o)
        state = node.inputs[i] if i is not None and i < len(node.inputs) else None
        if i is None or state is None:
            continue
        outputs = [(f"{state.name}.copy", dtype_of(state), shape_like(state))]
        # A select of twice the same copies; Identity would share the buffer.
        copy = rewrite.bound.editor.node(NAME, "Where", [applies, state, state], outputs, at=("before", node))
        node.replace_input_with(i, copy.outputs[0])


def guard_written_input(rewrite: Rewrite, node: ir.Node, i: int, o: int, applies: ir.Value) -> None:
    """Let the operator write into a copy, and write the copy back if the step is applied."""
    state, new = node.inputs[i], node.outputs[o] if o < len(node.outputs) else None
    if state is None or new is None or not new.name or not (state.is_graph_input() or state.is_initializer()):
        return
    editor, dtype, shape = rewrite.bound.editor, dtype_of(state), shape_like(state)
    # Sum of one operand copies; Identity would share the buffer.
    copy = editor.node(NAME, "Sum", [state], [(f"{state.name}.copy", dtype, shape)], at=("before", node)).outputs[0]
    node.replace_input_with(i, copy)
    outputs = [(f"{state.name}.guarded", dtype, shape)]
    guarded = editor.node(NAME, "Where", [applies, new, state], outputs).outputs[0]
    rewrite.bound.write_in_place(state, guarded, NAME)
    rewrite.carried.append(Carried(state, guarded, True, WRITTEN_IN_PLACE))
