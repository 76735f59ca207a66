"""In-place writes of states, and the order of a state's readers before the write."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from graphscale.analysis.hazards import find_unordered_readers
from graphscale.graph.builder import Builder
from graphscale.graph.order import restore_order
from graphscale.graph.values import Use, operand_at

__all__ = ["add_never", "add_reader_flag", "order_writes", "write_in_place"]


def write_in_place(build: Builder, state: ir.Value, value: ir.Value, constant: str = "graphscale/overwrite") -> ir.Node:
    """Add a node that assigns a float32 value to a state initializer, within the session."""
    overwrite = build.editor.shared_constant(constant, np.asarray([True]))
    outputs = [(f"{state.name}.written", ir.DataType.BOOL, [1])]
    return build.node("InPlaceAccumulatorV2", [state, value, overwrite], outputs, domain="com.microsoft")


def order_writes(build: Builder) -> bool:
    """Make each value written in place depend on all readers of the old value; return whether the graph changed.

    One element of a reader's result becomes an operand of the written value, without effect:
    `seen = IsNaN(first element of r); never = And(seen, Not(seen)); w.ordered = Where(never, state, w)`.
    """
    # One flag for each reader: its result may be a view of several states, and the flag reads all of them.
    looks: dict[ir.Node, ir.Value] = {}
    is_changed = _order_once(build, looks)
    while is_changed and _order_once(build, looks):
        pass  # the flags are new readers of states
    return is_changed


def _order_once(build: Builder, looks: dict[ir.Node, ir.Value]) -> bool:
    hazards = list(find_unordered_readers(build.editor.graph))
    for write, readers in hazards:
        for reader in readers:
            if reader not in looks:
                looks.update(_look_at(build, reader))
        never = add_never(build, [*dict.fromkeys(looks[reader] for reader in readers)], "order.flag")
        state, value = operand_at(Use(write, 0)), operand_at(Use(write, 1))
        name, dtype = f"{value.name}.ordered", ir.DataType.FLOAT
        ordered = build.op("Where", [never, state, value], name=name, like=value, dtype=dtype, at=("before", write))
        write.replace_input_with(1, ordered)
    if hazards:
        restore_order(build.editor.graph)
    return bool(hazards)


def _look_at(build: Builder, reader: ir.Node) -> dict[ir.Node, ir.Value]:
    """Add the flag of a reader; map the reader, and each node between them, to the flag."""
    flag = add_reader_flag(build, reader)
    looks, node = {reader: flag}, flag.producer()
    while node is not None and node is not reader:
        looks[node] = flag
        node = operand_at(Use(node, 0)).producer()
    return looks


def add_never(build: Builder, flags: Sequence[ir.Value], name: str) -> ir.Value:
    """Add a flag that is always false, and depends on some flags."""
    build = dataclasses.replace(build, dtype=ir.DataType.BOOL, shape=())
    seen = flags[0]
    for flag in flags[1:]:
        seen = build.op("Or", [seen, flag], name=name)
    return build.op("And", [seen, build.op("Not", [seen], name=name)], name=name)


def add_reader_flag(build: Builder, reader: ir.Node) -> ir.Value:
    """Add a scalar bool value that depends on a node's first output, at the cost of one element."""
    value = next(output for output in reader.outputs if output.name)
    flat, one, zero = (
        build.editor.shared_constant(f"graphscale/{name}", np.asarray([n], dtype=np.int64))
        for name, n in (("flat", -1), ("one", 1), ("zero", 0))
    )
    row = build.op("Reshape", [value, flat], name="order.flat", dtype=value.dtype)
    first = build.op("Slice", [row, zero, one], name="order.first", dtype=value.dtype)
    real = build.cast(first, ir.DataType.FLOAT, name="order.real")
    total = build.op("ReduceSum", [real], name="order.scalar", dtype=ir.DataType.FLOAT, shape=(), keepdims=0)
    return build.op("IsNaN", [total], name="order.flag", dtype=ir.DataType.BOOL, shape=())
