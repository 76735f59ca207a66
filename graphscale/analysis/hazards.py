"""The write-after-read hazard of in-place state.

ONNX Runtime runs nodes in any order that respects data edges. A node that overwrites a state buffer may run before a
node that still wants the old value, unless that reader is an ancestor of the written value.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import onnx_ir as ir

from graphscale.analysis.buffers import is_choice, may_overwrite, views_of
from graphscale.graph.values import cannot_fail, is_source, main_node, main_nodes, operands_of, reads_shape, subgraphs
from graphscale.graph.walks import descendants, nodes_above, reach
from graphscale.operators import Trait, has_trait, nodes_with

__all__ = [
    "find_in_place_writes",
    "find_late_failures",
    "find_late_readers",
    "find_unordered_readers",
    "find_writable_states",
]

# Its kernels read an element of each operand before they write that element of the result, and never again; and ONNX
# Runtime fuses it into nothing that does not.
_SELECT = "Where"


def find_in_place_writes(graph: ir.Graph) -> Iterator[ir.Node]:
    """Yield the nodes that assign to a state of the graph: `InPlaceAccumulatorV2` on an input or initializer."""
    for node in nodes_with(graph, Trait.ACCUMULATOR):
        state = node.inputs[0]
        if node.op_type == "InPlaceAccumulatorV2" and state is not None and is_source(state):
            yield node


def find_unordered_readers(graph: ir.Graph) -> Iterator[tuple[ir.Node, list[ir.Node]]]:
    """Yield each in-place write with the readers of its state that need not have run before it."""
    writes = [(node, state) for node in find_in_place_writes(graph) if (state := node.inputs[0]) is not None]
    for (write, _), readers in zip(writes, find_late_readers(graph, writes), strict=True):
        if readers:
            yield write, readers


def find_writable_states(
    graph: ir.Graph,
    pairs: Mapping[ir.Value, ir.Value],
    decision: ir.Value | None,
    trusted: Callable[[ir.Node], bool],
) -> set[ir.Value]:
    """Find the states whose next value can be written over the present one.

    The node that gives the next value must come after all other readers of the state, must itself read no element
    after it has written it (a `Where` of the output's shape), and must come after every node that could fail, so that
    a step that fails leaves the state as it was.

    Args:
        graph: the main graph.
        pairs: each state, a graph input, with its next value, a graph output.
        decision: whether the step is applied; None where every step is.
        trusted: returns whether a node cannot fail, whatever its operator.
    """
    outputs = Counter(graph.outputs)
    writes = [
        (node, state)
        for state, new in pairs.items()
        if (node := new.producer()) is not None and node.graph is graph and outputs[new] == 1
        if _writes_elementwise(node, state, new)
    ]
    late = find_late_readers(graph, writes)
    waiting = [write for write, readers in zip(writes, late, strict=True) if not readers]
    if find_late_failures(graph, {node for node, _ in waiting}, decision, trusted):
        return set()
    return {state for _, state in waiting}


def find_late_failures(
    graph: ir.Graph,
    writes: Collection[ir.Node],
    decision: ir.Value | None,
    trusted: Callable[[ir.Node], bool],
) -> list[ir.Node]:
    """Find the nodes that could fail after one of these has overwritten a state.

    Those are none if every write waits for all such nodes, or for the decision whether the step is applied, and that
    for all such nodes.

    Args:
        graph: the main graph.
        writes: the nodes that overwrite state.
        decision: whether the step is applied; None where every step is.
        trusted: returns whether a node cannot fail, whatever its operator.
    """
    if not writes:
        return []
    before = _before_all(graph, writes)
    if decision is not None:
        waiting = descendants(graph, [decision])
        if not any(waiting.isdisjoint(write.outputs) for write in writes):
            before |= nodes_above(decision)
    return [node for node in graph if node not in before and not (trusted(node) or cannot_fail(node))]


def _before_all(graph: ir.Graph, writes: Collection[ir.Node]) -> set[ir.Node]:
    """Find the common ancestors of some nodes: each of these is a bit, which goes up to its operands."""
    bits = {write: 1 << i for i, write in enumerate(writes)}
    reached: dict[ir.Node, int] = {}
    for node in reversed(list(graph)):
        mask = reached.get(node, 0) | bits.get(node, 0)
        for value in operands_of(node) if mask else ():
            producer = value.producer()
            if producer is not None:
                reached[producer] = reached.get(producer, 0) | mask
    return {node for node, mask in reached.items() if mask == (1 << len(bits)) - 1}


def _writes_elementwise(node: ir.Node, state: ir.Value, new: ir.Value) -> bool:
    static = state.shape is not None and state.shape.is_static() and state.shape == new.shape
    if state.is_graph_output() or state.dtype != new.dtype or not static:
        return False
    if is_choice(node):
        return all(may_overwrite(branch, state, branch.outputs[new.index() or 0]) for branch in subgraphs(node))
    return node.domain == "" and node.op_type == _SELECT


def find_late_readers(graph: ir.Graph, writes: Sequence[tuple[ir.Node, ir.Value]]) -> list[list[ir.Node]]:
    """Find, for each node that overwrites a state, the other readers of the state that need not have run before it.

    Every pair of a state and a reader is a bit; each value carries the bits of the pairs among its ancestors. A
    node that reads a value's shape alone does not wait for the value: runtimes fold known shapes into constants.
    """
    if not writes:
        return []
    owners = main_nodes(graph)
    pairs: dict[ir.Node, list[int]] = {}
    wanted: list[dict[int, ir.Node]] = []
    bit = 1
    for write, state in writes:
        wanted.append({})
        for reader in dict.fromkeys(_readers(state, owners, write)):
            pairs.setdefault(reader, []).append(bit)
            wanted[-1][bit] = reader
            bit <<= 1
    nodes = {write for write, _ in writes}
    before: dict[ir.Value, int] = {}
    seen_by: dict[ir.Node, int] = {}
    for node in graph:
        seen = sum(pairs.get(node, ()))
        for value in () if reads_shape(node) else operands_of(node):
            seen |= before.get(value, 0)
        before.update((value, seen) for value in node.outputs)
        if node in nodes:
            seen_by[node] = seen
    return [
        [reader for reader_bit, reader in readers.items() if not seen_by[write] & reader_bit]
        for (write, _), readers in zip(writes, wanted, strict=True)
    ]


def _readers(state: ir.Value, owners: Mapping[ir.Graph, ir.Node], write: ir.Node) -> Iterator[ir.Node]:
    """Yield the nodes that read a state's buffer before `write`, directly or through a possible view of it."""

    def uses(value: ir.Value) -> Iterator[tuple[ir.Node, ir.Node, list[ir.Value]]]:
        for node, index in value.uses():
            owner = main_node(owners, node)
            if owner is not write:
                yield node, owner, views_of(node, index) + (list(owner.outputs) if owner is not node else [])

    for value in reach([state], lambda value: [view for _, _, views in uses(value) for view in views]):
        for node, owner, views in uses(value):
            # A view that nothing else needs is read where it is made; a sequence cannot be looked into.
            if not has_trait(node, Trait.SHARES_BUFFER) or any(v.is_graph_output() for v in views):
                yield owner
