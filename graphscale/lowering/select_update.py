"""select-update: one branch for the whole update of the state, instead of a guard for each state.

ONNX Runtime's `Where` reads and writes its operands three times on a CPU. An `If` computes the next values in place, or
leaves the old ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import onnx_ir as ir

from graphscale.analysis.hazards import is_fresh
from graphscale.graph.builder import Builder, Editor
from graphscale.graph.values import Use, operand_at, subgraphs, uses_of
from graphscale.lowering.lowering_pass import LoweringPass
from graphscale.lowering.thresholds import count_elements, same_shape
from graphscale.operators import Trait, has_trait
from graphscale.step.training_step import Step

__all__ = ["SelectUpdate", "find_private_nodes"]


class SelectUpdate(LoweringPass):
    """Replace the guards of all states by one `If` that computes the next values, or returns the present ones.

    Before: `w.new = Sub(w, step); w.next = Where(all_finite, w.new, w); m.next = Where(all_finite, m.new, m)`
    After:  `w.next, m.next = If <then: Sub(w, step), Identity(m.new); else: Identity(w), Identity(m)> (all_finite)`

    The branch contains the optimizer, which only computes next values. A next value that is not computed there keeps
    its guard, since the branches must not read their own outputs. The If pays above a number of elements of all states.
    """

    name = "select-update"
    sign = "if"
    relies_on = "nothing"

    def lower(self, step: Step) -> bool:
        graph, decision = step.graph, step.guard
        assert decision is not None
        following = [*(each.next for each in step.carried), *(node.inputs[1] for node in step.accumulators)]
        producers = [value.producer() for value in following if value is not None]
        guards = [node for node in producers if node is not None and _is_guard(node, decision)]
        results = [node.outputs[0] for node in guards]
        if not guards or sum(map(count_elements, results)) < self.thresholds.branch_elements:
            return False
        editor = Editor(graph)
        build = self.builder(editor)
        optimizer = _find_optimizer(graph, guards)
        graph.remove(optimizer)
        branches = {
            "then_branch": _make_branch(build, "then_branch", guards, 1, optimizer),
            "else_branch": _make_branch(build, "else_branch", guards, 2, []),
        }
        chosen = [(f"{value.name}.chosen", value.dtype, value.shape) for value in results]
        node = build.node("If", [decision], chosen, attributes=branches)
        for old, new in zip(results, node.outputs, strict=True):
            editor.replace(old, new, uses_of(old), "selected")
        graph.remove(guards, safe=True)
        graph.sort()
        return True


def _is_guard(node: ir.Node, decision: ir.Value) -> bool:
    if (node.domain, node.op_type) != ("", "Where") or node.inputs[0] is not decision:
        return False
    new, old = operand_at(Use(node, 1)), operand_at(Use(node, 2))
    if not is_fresh(new) or not (old.is_graph_input() or old.is_initializer()):
        return False
    return same_shape(new, old) and same_shape(new, node.outputs[0])


def _find_optimizer(graph: ir.Graph, guards: Iterable[ir.Node]) -> list[ir.Node]:
    """Return the nodes with results only for the guards' new values, in execution order."""
    guarding = set(guards)

    def may_move(node: ir.Node) -> bool:
        return node not in guarding and node.domain == ""

    return find_private_nodes(graph, may_move, lambda use: use.node in guarding and use.idx == 1)


def find_private_nodes(
    graph: ir.Graph, may_move: Callable[[ir.Node], bool], is_meant: Callable[[Use], bool]
) -> list[ir.Node]:
    """Return the movable nodes with results only for some readers, in execution order."""
    found: dict[ir.Node, None] = {}
    for node in reversed(list(graph)):
        # Random numbers are drawn in every step, applied or not.
        if not may_move(node) or has_trait(node, Trait.RANDOM) or subgraphs(node):
            continue
        uses = [use for value in node.outputs for use in uses_of(value)]
        if not uses or any(value.is_graph_output() for value in node.outputs):
            continue
        if all(use.node in found or is_meant(use) for use in uses):
            found[node] = None
    return list(reversed(found))


def _make_branch(build: Builder, name: str, guards: Iterable[ir.Node], side: int, nodes: Sequence[ir.Node]) -> ir.Graph:
    """Make a branch of some nodes; its outputs are the guards' operands at an input."""
    own = {value for node in nodes for value in node.outputs}
    branch, outputs = build.within(f"{build.mark}.{name}", nodes), list[ir.Value]()
    for guard in guards:
        value = operand_at(Use(guard, side))
        if value not in own or value in outputs:
            value = branch.op("Identity", [value], name=f"{value.name}.{name}", like=value)
        outputs.append(value)
    return branch.closed(outputs)
