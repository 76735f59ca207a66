"""The forms in which a graph keeps the old value of a state on a step that is skipped."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import numpy as np
import onnx_ir as ir

from graphscale.analysis.hazards import is_fresh
from graphscale.checks.patterns import assigns, input_at, producer, skip_ordering
from graphscale.graph.values import constant_tensor, node_name
from graphscale.operators import optimizer_of, overwritten_inputs

__all__ = ["find_guard_fault", "find_unprotected_operands", "find_write_fault"]


def find_guard_fault(value: ir.Value, state: ir.Value, conditions: Collection[ir.Value]) -> str | None:
    """Return the reason why a next value is not the state's on a skipped step, by these conditions; None if it is."""
    value = skip_ordering(value)
    selected = _behind(value, "Cast")
    node = producer(selected, "Where")
    if node is not None and not _holds(selected, state):
        return f"{node_name(node)!r} selects in {selected.dtype}, which does not hold all numbers of {state.dtype}"
    if node is None:
        return f"{value.name!r} is not selected by whether the step is applied"
    condition, new, old = node.inputs
    if condition not in conditions:
        return f"{node_name(node)!r} selects by {'?' if condition is None else condition.name!r}, not by that"
    if old is None or _behind(old, "Cast") is not state:
        return f"on a skipped step {node_name(node)!r} gives {'?' if old is None else old.name!r}, not the old value"
    if new is None or _behind(new, "Cast") is state:
        return f"on an applied step {node_name(node)!r} gives the old value, too"
    return None


def find_write_fault(node: ir.Node, conditions: Collection[ir.Value]) -> str | None:
    """Return the reason why an accumulator could change its buffer on a skipped step, None if it cannot."""
    state, value = node.inputs[0], node.inputs[1]
    flag = input_at(node, 2)
    assert state is not None and value is not None
    if assigns(node) or _is_not(flag, conditions):
        # It overwrites the buffer, always or on a skipped step: with what it holds.
        return find_guard_fault(value, state, conditions)
    selected = producer(value, "Where")
    if selected is None or selected.inputs[0] not in conditions:
        return f"{node_name(node)!r} adds {value.name!r} whether the step is applied or not"
    kept = constant_tensor(selected.inputs[2])
    addend = np.zeros(1) if kept is None else np.asarray(kept.numpy(), dtype=np.float64)
    if addend.any() or not np.signbit(addend).all():
        return f"{node_name(node)!r} adds something on a skipped step"
    if flag is None and node.op_type == "InPlaceAccumulatorV2":
        return f"{node_name(node)!r} turns -0.0 into 0.0 on a skipped step"
    return None


def find_unprotected_operands(graph: ir.Graph) -> Iterator[tuple[ir.Node, ir.Value]]:
    """Find operands that a kernel overwrites as it computes, and that are no copies."""
    for node in graph:
        written: list[int | None] = list(overwritten_inputs(node))
        if (optimizer := optimizer_of(node)) is not None:
            written += [optimizer.source(o) for o, value in enumerate(node.outputs) if value.name]
        for i in written:
            value = input_at(node, i)
            # A sum of one operand is a copy, in a buffer of its own.
            if value is not None and producer(value, "Sum") is None and not is_fresh(value):
                yield node, value


def _behind(value: ir.Value, op_type: str) -> ir.Value:
    node = producer(value, op_type)
    return value if node is None or node.inputs[0] is None else node.inputs[0]


def _holds(value: ir.Value, state: ir.Value) -> bool:
    """Return whether the type of a value holds every number of a state's."""
    if value.dtype is None or state.dtype is None or value.dtype is state.dtype:
        return value.dtype is state.dtype
    return np.can_cast(state.dtype.numpy(), value.dtype.numpy(), "safe")


def _is_not(flag: ir.Value | None, conditions: Collection[ir.Value]) -> bool:
    node = None if flag is None else producer(_behind(flag, "Reshape"), "Not")
    return node is not None and node.inputs[0] in conditions
