"""The write-after-read hazard of in-place state.

ONNX Runtime runs nodes in any order that respects data edges. A node that overwrites a state buffer may run before a
node that still wants the old value, unless that reader is an ancestor of what is written.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

import onnx_ir as ir

from graphscale.analysis.rules import MICROSOFT, Kind
from graphscale.analysis.values import captured_values, main_node, main_nodes, rule_of

__all__ = ["in_place_writes", "late_readers", "may_share_buffer", "unordered_readers"]

# Operators that read an element of each operand before they write that element of the result, and never again.
_ELEMENTWISE = {"Where", "Add", "Sub", "Mul", "Div"}

_VIEWS = {"Identity", "Reshape", "Squeeze", "Unsqueeze", "Flatten", "Transpose"}


def in_place_writes(graph: ir.Graph) -> Iterator[ir.Node]:
    """The nodes that assign to a state of the graph: `InPlaceAccumulatorV2` on an input or initializer."""
    for node in graph:
        if (node.domain, node.op_type) == (MICROSOFT, "InPlaceAccumulatorV2"):
            state = node.inputs[0]
            if state is not None and (state.is_graph_input() or state.is_initializer()):
                yield node


def unordered_readers(graph: ir.Graph) -> Iterator[tuple[ir.Node, list[ir.Node]]]:
    """Each in-place write with the readers of its state that need not have run before it."""
    writes = {node: state for node in in_place_writes(graph) if (state := node.inputs[0]) is not None}
    for write, readers in late_readers(graph, writes).items():
        if readers:
            yield write, readers


def may_share_buffer(graph: ir.Graph, pairs: Mapping[ir.Value, ir.Value]) -> set[ir.Value]:
    """The states whose next value can be written over the present one.

    The node that gives the next value must come after all other readers of the state, and must itself read no element
    after it has written it: an elementwise operator on operands of the output's shape.

    Args:
        graph: the main graph.
        pairs: each state, a graph input, with its next value, a graph output.
    """
    outputs = Counter(graph.outputs)
    writes = {}
    for state, new in pairs.items():
        node = new.producer()
        if node is not None and node.graph is graph and outputs[new] == 1 and _writes_elementwise(node, state, new):
            writes[node] = state
    late = late_readers(graph, writes)
    return {state for node, state in writes.items() if not late[node]}


def _writes_elementwise(node: ir.Node, state: ir.Value, new: ir.Value) -> bool:
    if node.domain != "" or node.op_type not in _ELEMENTWISE or len(node.outputs) != 1:
        return False
    if state.dtype != new.dtype or not _same_static_shape(state, new):
        return False
    # A narrower operand is read again and again; only what is read directly can be told.
    return all(operand is not None for operand in node.inputs)


def _same_static_shape(one: ir.Value, other: ir.Value) -> bool:
    shapes = [value.shape for value in (one, other)]
    if any(shape is None or not shape.is_static() for shape in shapes):
        return False
    return shapes[0] == shapes[1]


def late_readers(graph: ir.Graph, writes: Mapping[ir.Node, ir.Value]) -> dict[ir.Node, list[ir.Node]]:
    """For each node that overwrites a state, the other readers of the state that need not have run before it.

    Every pair of a state and a reader is a bit; each value carries the bits of the pairs among its ancestors. What
    depends on a value's shape alone does not wait for the value: runtimes fold known shapes into constants.
    """
    owners = main_nodes(graph) if writes else {}
    pairs: dict[ir.Node, list[int]] = {}
    wanted: dict[ir.Node, dict[int, ir.Node]] = {}
    bit = 1
    for write, state in writes.items():
        wanted[write] = {}
        for reader in dict.fromkeys(_readers(state, owners)):
            if reader is not write:
                pairs.setdefault(reader, []).append(bit)
                wanted[write][bit] = reader
                bit <<= 1
    before: dict[ir.Value, int] = {}
    late: dict[ir.Node, list[ir.Node]] = {}
    for node in graph:
        seen = sum(pairs.get(node, ()))
        rule = rule_of(node)
        if rule is None or rule.kind is not Kind.SHAPE:
            for value in (*node.inputs, *captured_values(node)):
                if value is not None:
                    seen |= before.get(value, 0)
        before.update((value, seen) for value in node.outputs)
        if node in wanted:
            late[node] = [reader for reader_bit, reader in wanted[node].items() if not seen & reader_bit]
    return late


def _readers(state: ir.Value, owners: Mapping[ir.Graph, ir.Node]) -> Iterator[ir.Node]:
    """The nodes that read a state's buffer, directly or through a view of it.

    ONNX Runtime lets a view share the buffer of its input, and removes pairs of Transpose.
    """
    pending = [state]
    while pending:
        for node, index in pending.pop().uses():
            if node.op_type in _VIEWS and node.domain == "" and index == 0:
                pending.extend(node.outputs)
                if not node.outputs[0].is_graph_output():
                    continue
            yield main_node(owners, node)
