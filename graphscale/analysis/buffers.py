"""The buffers of values: shared, because a runtime hands one on or removes a node, and written over by a branch."""

from __future__ import annotations

import onnx_ir as ir

from graphscale.graph.marks import PASS_KEY
from graphscale.graph.values import cannot_fail, constant_tensor, main_node, main_nodes, operands_of, subgraphs
from graphscale.graph.walks import producers_of, reach
from graphscale.operators import Trait, has_trait

__all__ = ["is_choice", "is_fresh", "may_overwrite", "views_of"]


def views_of(node: ir.Node, index: int) -> list[ir.Value]:
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

    All that a select with a constant condition may choose must be fresh.
    """
    node = value.producer()
    if node is None or node.domain != "" or depth == 0:
        return False
    viewed = [v for i, v in enumerate(node.inputs) if v is not None and views_of(node, i)]
    if node.op_type == "Where":
        return all(is_fresh(v, depth - 1) for v in viewed if v is not node.inputs[0])
    return not viewed


def is_choice(node: ir.Node) -> bool:
    """Return whether a node is an `If` that a pass inserted: a runtime cannot know its condition, and put it away."""
    return node.domain == "" and node.op_type == "If" and PASS_KEY in node.metadata_props


def may_overwrite(branch: ir.Graph, state: ir.Value, new: ir.Value) -> bool:
    """Return whether a branch may write a result over a state of an outer scope that it reads.

    All readers of the state in the branch must work element by element, and must come before the node that gives the
    result, or be that node. No node of the branch may fail: a step that fails leaves the state as it was.

    Args:
        branch: the branch of an If.
        state: the state.
        new: the result, an output of the branch.
    """
    readers, last = _readers(branch, state), new.producer()
    if last is None or last.graph is not branch or not all(is_choice(n) or cannot_fail(n) for n in branch.all_nodes()):
        return False
    if is_choice(last):
        index, inner = new.index() or 0, readers - {last}
        return not inner and all(may_overwrite(body, state, body.outputs[index]) for body in subgraphs(last))
    if readers == {last} and last.op_type == "Identity" and last.inputs[0] is state:
        return True  # a copy onto itself
    return all(_is_elementwise(node, state) for node in readers) and readers <= _before(last, branch)


def _readers(branch: ir.Graph, state: ir.Value) -> set[ir.Node]:
    """Return the nodes of a branch that read a state, or a possible view of it, themselves or in their bodies."""
    buffers = reach([state], lambda value: [view for node, i in value.uses() for view in views_of(node, i)])
    owners = main_nodes(branch)
    readers = {main_node(owners, node) for value in buffers for node, _ in value.uses()}
    return {node for node in readers if node.graph is branch}


def _is_elementwise(node: ir.Node, state: ir.Value) -> bool:
    if not has_trait(node, Trait.READS_FIRST) or node.outputs[0].shape != state.shape:
        return False
    # ONNX Runtime fuses a sum with the contraction that it adds to, which reads its operands again and again.
    producers = [value.producer() for value in node.inputs if value is not None]
    return all(p is None or p.graph is not node.graph or has_trait(p, Trait.READS_FIRST) for p in producers)


def _before(last: ir.Node, branch: ir.Graph) -> set[ir.Node]:
    """Return a node of a branch, and all others of the branch that it depends on."""
    return set(reach([last], lambda node: [p for p in producers_of(operands_of(node)) if p.graph is branch]))
