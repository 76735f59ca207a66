"""Whether a branch can write a result over a state: the order of its nodes, and what they read."""

from __future__ import annotations

import onnx_ir as ir

from graphscale.analysis.failures import cannot_fail
from graphscale.analysis.views import views_of
from graphscale.graph.marks import SELECTION
from graphscale.graph.values import operands_of, subgraphs
from graphscale.graph.walks import producers_of, reach
from graphscale.operators import Trait, has_trait

__all__ = ["may_overwrite"]


def may_overwrite(branch: ir.Graph, state: ir.Value, new: ir.Value) -> bool:
    """Whether a branch may write a result over a state of an outer scope that it reads.

    All that reads the state in the branch must work element by element, and must come before the node that gives the
    result, or be that node. No node of the branch may fail: a step that fails leaves the state as it was.

    Args:
        branch: the branch of an If.
        state: the state.
        new: the result, an output of the branch.
    """
    readers, last = _readers(branch, state), new.producer()
    if last is None or not all(cannot_fail(node) or SELECTION in node.metadata_props for node in branch):
        return False
    if SELECTION in last.metadata_props:
        index = new.index() or 0
        return not readers and all(may_overwrite(inner, state, inner.outputs[index]) for inner in subgraphs(last))
    if readers == {last} and last.op_type == "Identity" and last.inputs[0] is state:
        return True  # a copy onto itself
    return all(_is_elementwise(node, state) for node in readers) and readers <= _before(last, branch)


def _readers(branch: ir.Graph, state: ir.Value) -> set[ir.Node]:
    """The nodes of a branch that read a state, or what may be a view of it."""
    buffers = reach([state], lambda value: [view for node, i in value.uses() for view in views_of(node, i)])
    return {node for value in buffers for node, _ in value.uses() if node.graph is branch}


def _is_elementwise(node: ir.Node, state: ir.Value) -> bool:
    if not has_trait(node, Trait.READS_FIRST) or node.outputs[0].shape != state.shape:
        return False
    # ONNX Runtime fuses a sum with the contraction that it adds to, which reads its operands again and again.
    producers = [value.producer() for value in node.inputs if value is not None]
    return all(p is None or p.graph is not node.graph or has_trait(p, Trait.READS_FIRST) for p in producers)


def _before(last: ir.Node, branch: ir.Graph) -> set[ir.Node]:
    """A node of a branch, and all others of the branch that it depends on."""
    return set(reach([last], lambda node: [p for p in producers_of(operands_of(node)) if p.graph is branch]))
