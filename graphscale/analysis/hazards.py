"""The write-after-read hazard of in-place state, and the buffers that values share.

ONNX Runtime runs nodes in any order that respects data edges. A node that overwrites a state buffer may run before a
reader of the old value, unless that reader is an ancestor of the written value. Values share a buffer where a runtime
reuses one or removes a node.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import onnx_ir as ir

from graphscale.graph.cones import descendants, nodes_above
from graphscale.graph.failures import cannot_fail
from graphscale.graph.marks import PASS_KEY
from graphscale.graph.values import (
    constant_tensor,
    is_source,
    main_node,
    main_nodes,
    operands_of,
    reads_shape,
    subgraphs,
)
from graphscale.graph.walks import reach
from graphscale.operators import Trait, has_trait, nodes_with

__all__ = [
    "Branches",
    "find_in_place_writes",
    "find_late_failures",
    "find_unordered_readers",
    "find_writable_states",
    "is_fresh",
    "may_overwrite",
]


def find_in_place_writes(graph: ir.Graph) -> Iterator[ir.Node]:
    """Yield the nodes that assign to a state of the graph: `InPlaceAccumulatorV2` on an input or initializer."""
    for node in nodes_with(graph, Trait.ACCUMULATOR):
        state = node.inputs[0]
        if node.op_type == "InPlaceAccumulatorV2" and state is not None and is_source(state):
            yield node


def find_unordered_readers(graph: ir.Graph) -> Iterator[tuple[ir.Node, list[ir.Node]]]:
    """Yield each in-place write with the readers of its state that may run after it."""
    writes = [(node, state) for node in find_in_place_writes(graph) if (state := node.inputs[0]) is not None]
    for (write, _), readers in zip(writes, _find_late_readers(graph, writes), strict=True):
        if readers:
            yield write, readers


def find_writable_states(
    graph: ir.Graph, pairs: Mapping[ir.Value, ir.Value], decision: ir.Value | None, trusted: Callable[[ir.Node], bool]
) -> set[ir.Value]:
    """Find the states whose next value can be written over the present one.

    The node of the next value must come after all other readers of the state, and after every node that could fail, so
    that a failed step leaves the state unchanged. The node must read no element after its write: it is a `Where` of the
    output's shape.

    Args:
        graph: the main graph.
        pairs: each state, a graph input, with its next value, a graph output.
        decision: the value that decides whether the step is applied; None where every step is.
        trusted: returns whether a node cannot fail, whatever its operator.
    """
    outputs = Counter(graph.outputs)
    branches = Branches()
    writes = [
        (node, state)
        for state, new in pairs.items()
        if (node := new.producer()) is not None and node.graph is graph and outputs[new] == 1
        if _writes_elementwise(node, state, new, branches)
    ]
    late = _find_late_readers(graph, writes)
    waiting = [write for write, readers in zip(writes, late, strict=True) if not readers]
    if find_late_failures(graph, {node for node, _ in waiting}, decision, trusted):
        return set()
    return {state for _, state in waiting}


def find_late_failures(
    graph: ir.Graph, writes: Collection[ir.Node], decision: ir.Value | None, trusted: Callable[[ir.Node], bool]
) -> list[ir.Node]:
    """Find the nodes that could fail after a write of a state.

    There are none if every write waits for all nodes that could fail, or for the decision, which itself waits for them.

    Args:
        graph: the main graph.
        writes: the nodes that overwrite state.
        decision: the value that decides whether the step is applied; None where every step is.
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
    """Find the common ancestors of some nodes: each node has a bit, which goes up to its operands."""
    bits = {write: 1 << i for i, write in enumerate(writes)}
    reached: dict[ir.Node, int] = {}
    for node in reversed(list(graph)):
        mask = reached.get(node, 0) | bits.get(node, 0)
        for value in operands_of(node) if mask else ():
            producer = value.producer()
            if producer is not None:
                reached[producer] = reached.get(producer, 0) | mask
    return {node for node, mask in reached.items() if mask == (1 << len(bits)) - 1}


class Branches(dict[ir.Graph, tuple[bool, Mapping[ir.Graph, ir.Node]]]):
    """For each body, whether none of its nodes can fail, and its node around each graph nested in it."""

    def __missing__(self, body: ir.Graph) -> tuple[bool, Mapping[ir.Graph, ir.Node]]:
        is_safe = all(_is_choice(node) or cannot_fail(node) for node in body.all_nodes())
        self[body] = facts = (is_safe, main_nodes(body))
        return facts


def _writes_elementwise(node: ir.Node, state: ir.Value, new: ir.Value, branches: Branches) -> bool:
    static = state.shape is not None and state.shape.is_static() and state.shape == new.shape
    if state.is_graph_output() or state.dtype != new.dtype or not static:
        return False
    if _is_choice(node):
        index = new.index() or 0
        return all(may_overwrite(branch, state, branch.outputs[index], branches) for branch in subgraphs(node))
    # Its kernels read an element of each operand before they write that element of the result, and never again. ONNX
    # Runtime fuses it into no kernel without this property.
    return node.domain == "" and node.op_type == "Where"


def _find_late_readers(graph: ir.Graph, writes: Sequence[tuple[ir.Node, ir.Value]]) -> list[list[ir.Node]]:
    """Find, for each node that overwrites a state, the other readers of the state that may run after it.

    Every reader is a bit; each value carries the bits of the readers above. A node that reads only a value's shape does
    not wait for the value: runtimes fold known shapes into constants.
    """
    owners = main_nodes(graph) if writes else {}
    readers = [dict.fromkeys(_readers(state, owners, write)) for write, state in writes]
    bits = {reader: 1 << i for i, reader in enumerate(dict.fromkeys(itertools.chain(*readers)))}
    before: dict[ir.Value, int] = {}
    for node in graph if bits else ():
        seen = bits.get(node, 0)
        for value in () if reads_shape(node) else operands_of(node):
            seen |= before.get(value, 0)
        before.update(dict.fromkeys(node.outputs, seen))
    # A write is no reader of the state that it writes.
    seen_by = [before.get(write.outputs[0], 0) for write, _ in writes]
    return [[r for r in own if not seen & bits[r]] for own, seen in zip(readers, seen_by, strict=True)]


def _readers(state: ir.Value, owners: Mapping[ir.Graph, ir.Node], write: ir.Node) -> Iterator[ir.Node]:
    """Yield the nodes that read a state's buffer before `write`, directly or through a possible view of it."""

    def uses(value: ir.Value) -> Iterator[tuple[ir.Node, ir.Node, list[ir.Value]]]:
        for node, index in value.uses():
            owner = main_node(owners, node)
            if owner is not write:
                yield node, owner, _views_of(node, index) + (list(owner.outputs) if owner is not node else [])

    for value in reach([state], lambda value: [view for _, _, views in uses(value) for view in views]):
        for node, owner, views in uses(value):
            # A view without other readers is read where it is made; the elements of a sequence are unknown.
            if not has_trait(node, Trait.SHARES_BUFFER) or any(v.is_graph_output() for v in views):
                yield owner


def _views_of(node: ir.Node, index: int) -> list[ir.Value]:
    """Return the results of a node that may share the buffer of an operand, because a runtime may remove the node."""
    if has_trait(node, Trait.REMOVABLE_BY_FACTOR) and len(node.inputs) == 2:
        shares = constant_tensor(node.inputs[1 - index]) is not None
    elif has_trait(node, Trait.REMOVABLE_BY_CONDITION):
        shares = constant_tensor(node.inputs[0]) is not None
    else:
        shares = has_trait(node, Trait.SHARES_BUFFER | Trait.REMOVABLE)
    return list(node.outputs) if shares else []


def is_fresh(value: ir.Value, depth: int = 8) -> bool:
    """Return whether a value has a buffer of its own: it is no input, and no view of another value.

    All operands of a select with a constant condition must be fresh.
    """
    node = value.producer()
    if node is None or node.domain != "" or depth == 0:
        return False
    viewed = [v for i, v in enumerate(node.inputs) if v is not None and _views_of(node, i)]
    if node.op_type == "Where":
        return all(is_fresh(v, depth - 1) for v in viewed if v is not node.inputs[0])
    return not viewed


def _is_choice(node: ir.Node) -> bool:
    """Return whether a node is an `If` of a pass: a runtime cannot know its condition, and remove it."""
    return node.domain == "" and node.op_type == "If" and PASS_KEY in node.metadata_props


def may_overwrite(branch: ir.Graph, state: ir.Value, new: ir.Value, branches: Branches) -> bool:
    """Return whether a branch may write a result over a state of an outer scope.

    All readers of the state in the branch must work element by element, and must come before the node of the result, or
    be that node. No node of the branch may fail: a failed step leaves the state unchanged.

    Args:
        branch: the branch of an If.
        state: the state.
        new: the result, an output of the branch.
        branches: facts about bodies that are known already.
    """
    readers, last = _readers_in(branch, state, branches), new.producer()
    if last is None or last.graph is not branch or not branches[branch][0]:
        return False
    if _is_choice(last):
        index, inner = new.index() or 0, readers - {last}
        return not inner and all(may_overwrite(body, state, body.outputs[index], branches) for body in subgraphs(last))
    if readers == {last} and last.op_type == "Identity" and last.inputs[0] is state:
        return True  # a copy onto itself
    return all(_is_elementwise(node, state) and _leads_to(node, last) for node in readers)


def _readers_in(branch: ir.Graph, state: ir.Value, branches: Branches) -> set[ir.Node]:
    """Return the nodes of a branch that read a state, or a possible view of it, also in their bodies."""
    buffers = reach([state], lambda value: [view for node, i in value.uses() for view in _views_of(node, i)])
    readers = {main_node(branches[branch][1], node) for value in buffers for node, _ in value.uses()}
    return {node for node in readers if node.graph is branch}


def _is_elementwise(node: ir.Node, state: ir.Value) -> bool:
    if not has_trait(node, Trait.READS_FIRST) or node.outputs[0].shape != state.shape:
        return False
    # ONNX Runtime fuses a contraction with a following sum; the fused kernel reads its operands repeatedly.
    producers = [value.producer() for value in node.inputs if value is not None]
    return all(p is None or p.graph is not node.graph or has_trait(p, Trait.READS_FIRST) for p in producers)


def _leads_to(node: ir.Node, last: ir.Node) -> bool:
    """Return whether a node is another one of its branch, or an ancestor of it there."""

    def readers(one: ir.Node) -> list[ir.Node]:
        return [user for value in one.outputs for user, _ in value.uses() if user.graph is last.graph]

    return node is last or last in reach([node], readers)
