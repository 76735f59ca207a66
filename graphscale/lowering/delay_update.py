"""delay-update: overwrite no state before every node that can fail has run."""

from __future__ import annotations

import onnx_ir as ir

from graphscale.graph.builder import Editor, replace_reads
from graphscale.graph.cones import descendants, nodes_above, producers_of
from graphscale.graph.failures import cannot_fail
from graphscale.graph.marks import DELAY_UPDATE
from graphscale.graph.values import operands_of, uses_of
from graphscale.lowering.lowering_pass import LoweringPass, is_inserted
from graphscale.passes import OrderWrites
from graphscale.passes.nodes.write_order import add_never, add_reader_flag
from graphscale.step.training_step import Step

__all__ = ["DelayUpdate"]

_MOST_WAITS = 64  # nodes to wait for one by one


class DelayUpdate(LoweringPass):
    """Delay the decision on the step until all nodes that can fail, such as those of the loss, have run.

    Before: `w.next = Where(all_finite, w.new, w)`
    After:  `seen = IsNaN(loss); never = And(seen, Not(seen)); last = Or(all_finite, never)`
            `w.next = Where(last, w.new, w)`
    """

    name = DELAY_UPDATE
    sign = "1·2"
    relies_on = "nothing"

    def lower(self, step: Step) -> bool:
        graph, decision, loss = step.graph, step.guard, step.loss
        assert decision is not None
        late = _find_late(graph, decision)
        # A flag with axes would add them to all states.
        is_fit = loss.shape is not None and not loss.shape.dims
        values = [loss] if is_fit and late & nodes_above(loss) else []
        remaining = late.difference(*(nodes_above(value) for value in values))
        last = _find_last(graph, remaining)
        if not (values or last) or len(last) > _MOST_WAITS:
            return False
        editor = Editor(graph)
        uses, build = uses_of(decision), self.builder(editor, dtype=ir.DataType.BOOL, shape=())
        flags = [build.op("IsNaN", [value], name="fence") for value in values]
        flags += [add_reader_flag(OrderWrites.builder(editor), node) for node in last]
        waits = build.op("Or", [decision, add_never(build, flags, "fence")], name="fence")
        replace_reads(decision, waits, uses)
        graph.sort()
        return True


def _find_late(graph: ir.Graph, decision: ir.Value) -> set[ir.Node]:
    """Return the nodes that can fail, neither before nor after the decision."""
    after = descendants(graph, [decision])
    aside = set(graph) - nodes_above(decision) - producers_of(after - {decision})
    return {node for node in aside if not is_inserted(node) and not cannot_fail(node)}


def _find_last(graph: ir.Graph, nodes: set[ir.Node]) -> list[ir.Node]:
    """Return the nodes that no other one of them depends on."""
    behind = nodes_above(*(value for node in nodes for value in operands_of(node)))
    return [node for node in graph if node in nodes and node not in behind]
