"""Putting the readers of a state before the write that overwrites it."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from graphscale.analysis.hazards import find_unordered_readers
from graphscale.graph.builder import Editor
from graphscale.graph.values import operands_of

__all__ = ["glance", "order_writes", "restore_order"]

NAME = "order-writes"


def order_writes(editor: Editor) -> bool:
    """Make each value that is written in place depend on all readers of the old value; whether any did not.

    One element of a reader's result is led to the written value in a way that cannot change it:
    `seen = IsNaN(first element of r); never = And(seen, Not(seen)); w.ordered = Where(never, state, w)`.
    """
    found = list(find_unordered_readers(editor.graph))
    # One look at each reader: its result may be a view of several states, and to look at it is to read them all.
    looks: dict[ir.Node, ir.Value] = {}
    for write, readers in found:
        looks.update((reader, glance(editor, reader)) for reader in readers if reader not in looks)
        _order(editor, write, [looks[reader] for reader in readers])
    if found:
        restore_order(editor.graph)
    return bool(found)


def restore_order(graph: ir.Graph) -> None:
    """Sort a graph if a node in it stands before what it reads; to look costs a tenth of sorting."""
    seen: set[ir.Node] = set()
    for node in graph:
        for value in operands_of(node):
            producer = value.producer()
            if producer is not None and producer not in seen:
                graph.sort()
                return
        seen.add(node)


def _order(editor: Editor, write: ir.Node, flags: list[ir.Value]) -> None:
    state, value = write.inputs[0], write.inputs[1]
    assert state is not None and value is not None
    never = flags[0]
    for flag in flags[1:]:
        never = _bool(editor, "Or", [never, flag])
    never = _bool(editor, "And", [never, _bool(editor, "Not", [never])])
    outputs = [(f"{value.name}.ordered", ir.DataType.FLOAT, value.shape)]
    ordered = editor.node(NAME, "Where", [never, state, value], outputs, at=("before", write)).outputs[0]
    write.replace_input_with(1, ordered)


def glance(editor: Editor, reader: ir.Node) -> ir.Value:
    """A scalar bool value that depends on a node's first output, at the cost of one element."""
    value = next(output for output in reader.outputs if output.name)
    flat, one, zero = (_indices(editor, name, [n]) for name, n in (("flat", -1), ("one", 1), ("zero", 0)))
    outputs = [("order.flat", value.dtype, None)]
    row = editor.node(NAME, "Reshape", [value, flat], outputs).outputs[0]
    outputs = [("order.first", value.dtype, None)]
    first = editor.node(NAME, "Slice", [row, zero, one], outputs).outputs[0]
    to = {"to": ir.DataType.FLOAT}
    real = editor.node(NAME, "Cast", [first], [("order.real", ir.DataType.FLOAT, None)], attributes=to).outputs[0]
    keep = {"keepdims": 0}
    total = editor.node(NAME, "ReduceSum", [real], [("order.scalar", ir.DataType.FLOAT, [])], attributes=keep).outputs[
        0
    ]
    return _bool(editor, "IsNaN", [total])


def _bool(editor: Editor, op_type: str, inputs: list[ir.Value]) -> ir.Value:
    return editor.node(NAME, op_type, inputs, [("order.flag", ir.DataType.BOOL, [])]).outputs[0]


def _indices(editor: Editor, name: str, numbers: list[int]) -> ir.Value:
    return editor.shared_constant(f"graphscale/{name}", np.asarray(numbers, dtype=np.int64))
