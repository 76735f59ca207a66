"""Guards of in-place writes of accumulators, optimizers and running statistics. Used by guard-updates."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

import numpy as np
import onnx_ir as ir

from graphscale.analysis.hazards import is_fresh
from graphscale.analysis.report import WRITTEN_IN_PLACE
from graphscale.graph.builder import Builder
from graphscale.graph.types import dtype_of
from graphscale.graph.values import constant_tensor
from graphscale.operators import Optimizer, optimizer_of, overwritten_inputs, written_inputs
from graphscale.passes.step_pass import carry
from graphscale.step.training_step import Carried

__all__ = ["guard_in_place", "guard_optimizer", "guard_written_input"]


def guard_in_place(
    build: Builder, accumulators: Iterable[ir.Node], writers: Iterable[ir.Node], applies: ir.Value
) -> Iterator[Carried]:
    """Guard the nodes that write in place, and yield the running statistics among the states."""
    for node in accumulators:
        _guard_accumulator(build, node, applies)
    for node in writers:
        guard_optimizer(build, node, applies)
        written = written_inputs(node)
        for i in overwritten_inputs(node):
            if i not in written:
                _copy_overwritten_input(build, node, i)
            elif (state := guard_written_input(build, node, i, written[i], applies)) is not None:
                yield state


def _guard_accumulator(build: Builder, node: ir.Node, applies: ir.Value) -> None:
    """Make an accumulator add -0.0 on a skipped step: x + -0.0 is x, bit for bit."""
    buffer, gradient = node.inputs[0], node.inputs[1]
    assert buffer is not None and gradient is not None
    build, dtype = dataclasses.replace(build, at=("before", node)), dtype_of(gradient)
    flag = node.inputs[2] if len(node.inputs) > 2 else None
    overwrite = constant_tensor(flag)
    if overwrite is not None and overwrite.numpy().all():
        kept = buffer
    elif flag is None and node.op_type == "InPlaceAccumulatorV2":
        # This kernel turns -0.0 into 0.0 when it adds: overwrite the buffer with itself instead.
        kept = buffer
        skipped = build.op("Not", [applies], name="skipped", dtype=ir.DataType.BOOL, shape=())
        _set_input(node, 2, _as_vector(build, skipped))
    else:
        name = f"graphscale/negative_zero.{dtype.name.lower()}"
        kept = build.editor.shared_constant(name, np.asarray(-0.0, dtype=dtype.numpy()))
    guarded = build.op("Where", [applies, gradient, kept], name=f"{gradient.name}.guarded", like=gradient, dtype=dtype)
    node.replace_input_with(1, guarded)


def _set_input(node: ir.Node, index: int, value: ir.Value) -> None:
    node.resize_inputs(max(len(node.inputs), index + 1))
    node.replace_input_with(index, value)


def _as_vector(build: Builder, flag: ir.Value, name: str = "", shape: str = "flag_shape") -> ir.Value:
    wanted = build.editor.shared_constant(f"graphscale/{shape}", np.asarray([1], dtype=np.int64))
    return build.op("Reshape", [flag, wanted], name=name or f"{flag.name}.vector", dtype=ir.DataType.BOOL, shape=[1])


def guard_optimizer(build: Builder, node: ir.Node, applies: ir.Value, **names: str) -> None:
    """Stop an optimizer operator on a skipped step; kernels may write its states in place.

    `name` is the name of the signal as a vector, and `shape` that of the constant with its shape.
    """
    optimizer = optimizer_of(node)
    if optimizer is None:
        return
    build = dataclasses.replace(build, at=("before", node))
    _protect_states(build, node, optimizer, applies)
    if optimizer.update_signal is None:
        return
    index, signal = optimizer.update_signal, applies
    original = node.inputs[index] if index < len(node.inputs) else None
    if original is not None:
        signal = build.op("And", [original, applies], name="update_signal", like=original, dtype=ir.DataType.BOOL)
    elif optimizer.signal_shape:
        signal = _as_vector(build, applies, **names)
    _set_input(node, index, signal)


def _protect_states(build: Builder, node: ir.Node, optimizer: Optimizer, applies: ir.Value) -> None:
    """Give an optimizer copies of its states: CPU kernels overwrite them, and the guard needs the old."""
    for o in range(len(node.outputs)):
        i = optimizer.source(o)
        state = node.inputs[i] if i is not None and i < len(node.inputs) else None
        if i is None or state is None:
            continue
        # A select between equal operands copies; Identity would share the buffer.
        copy = build.op("Where", [applies, state, state], name=f"{state.name}.copy", like=state, dtype=dtype_of(state))
        node.replace_input_with(i, copy)


def _copy_overwritten_input(build: Builder, node: ir.Node, i: int) -> None:
    """Make the operator overwrite a copy, unless its operand has a buffer of its own."""
    state = node.inputs[i]
    if state is not None and not is_fresh(state):
        build = dataclasses.replace(build, dtype=dtype_of(state))
        # Sum of one operand copies; Identity would share the buffer.
        copy = build.op("Sum", [state], name=f"{state.name}.copy", like=state, at=("before", node))
        node.replace_input_with(i, copy)


def guard_written_input(build: Builder, node: ir.Node, i: int, o: int, applies: ir.Value) -> Carried | None:
    """Make the operator write into a copy, and write the copy back if the step is applied; return the state, if any."""
    state, new = node.inputs[i], node.outputs[o] if o < len(node.outputs) else None
    if state is None or new is None or not new.name or not (state.is_graph_input() or state.is_initializer()):
        return None
    _copy_overwritten_input(build, node, i)
    build = dataclasses.replace(build, dtype=dtype_of(state))
    guarded = build.op("Where", [applies, new, state], name=f"{state.name}.guarded", like=state)
    return carry(build, state, guarded, WRITTEN_IN_PLACE, in_place=True, guarded=True)
