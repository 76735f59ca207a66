"""The write-after-read hazard of in-place state.

ONNX Runtime runs nodes in any order that respects data edges. A node that overwrites a state buffer may run before a
node that still wants the old value, unless that reader is an ancestor of what is written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import onnx_ir as ir

from graphscale.analysis.rules import MICROSOFT
from graphscale.analysis.values import captured_values, main_node, main_nodes

__all__ = ["in_place_writes", "unordered_readers"]

_VIEWS = {"Identity", "Reshape", "Squeeze", "Unsqueeze", "Flatten", "Transpose"}


def in_place_writes(graph: ir.Graph) -> Iterator[ir.Node]:
    """The nodes that assign to a state of the graph: `InPlaceAccumulatorV2` on an input or initializer."""
    for node in graph:
        if (node.domain, node.op_type) == (MICROSOFT, "InPlaceAccumulatorV2"):
            state = node.inputs[0]
            if state is not None and (state.is_graph_input() or state.is_initializer()):
                yield node


def unordered_readers(graph: ir.Graph) -> Iterator[tuple[ir.Node, list[ir.Node]]]:
    """Each in-place write with the readers of its state that need not have run before it.

    Every pair of a state and a reader is a bit; each value carries the bits of the pairs among its ancestors.
    """
    writes = list(in_place_writes(graph))
    owners = main_nodes(graph) if writes else {}
    pairs: dict[ir.Node, list[int]] = {}
    wanted: dict[ir.Node, dict[int, ir.Node]] = {}
    bit = 1
    for write in writes:
        state = write.inputs[0]
        assert state is not None
        readers = dict.fromkeys(_readers(state, owners))
        for reader in readers:
            if reader is not write:
                pairs.setdefault(reader, []).append(bit)
                wanted.setdefault(write, {})[bit] = reader
                bit <<= 1
    before: dict[ir.Value, int] = {}
    late: dict[ir.Node, list[ir.Node]] = {}
    for node in graph:
        seen = sum(pairs.get(node, ()))
        for value in (*node.inputs, *captured_values(node)):
            if value is not None:
                seen |= before.get(value, 0)
        before.update((value, seen) for value in node.outputs)
        if node in wanted:
            late[node] = [reader for reader_bit, reader in wanted[node].items() if not seen & reader_bit]
    for write in writes:
        if late.get(write):
            yield write, late[write]


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
