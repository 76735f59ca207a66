"""One selection for all states, instead of one for each: what a CPU does faster.

ONNX Runtime's `Where` goes over its operands three times on a CPU. An `If` copies the chosen ones once.
"""

from __future__ import annotations

from collections.abc import Iterable

import onnx_ir as ir

from graphscale.analysis.hazards import SELECTION, is_fresh
from graphscale.editing import PASS_KEY, Editor

__all__ = ["select_at_once"]

NAME = "session-selection"
# Elements of all states together: below, the If costs more than it saves.
_WORTH = 2**16


def select_at_once(graph: ir.Graph, decision: ir.Value, outputs: Iterable[ir.Value | None]) -> None:
    """Let one `If` give the next values of all states.

    Before: `w.next = Where(all_finite, w.new, w); m.next = Where(all_finite, m.new, m)`
    After:  `w.next, m.next = If <then: Identity(w.new), Identity(m.new); else: Identity(w), Identity(m)> (all_finite)`

    Args:
        graph: the main graph, which is changed.
        decision: whether the step is applied, a scalar bool value.
        outputs: the next values of states. A state that is handed on, not computed, keeps its guard: the branches must
            not read what they write.
    """
    producers = [value.producer() for value in outputs if value is not None]
    guards = [node for node in producers if node is not None and _is_guard(node, decision)]
    sizes = [value.shape.numpy() for node in guards if (value := node.outputs[0]).shape is not None]
    if not guards or len(sizes) < len(guards) or sum(_product(size) for size in sizes) < _WORTH:
        return
    editor = Editor(graph)
    branches = {
        name: _branch(editor, name, [node.inputs[side] for node in guards])
        for name, side in (("then_branch", 1), ("else_branch", 2))
    }
    results = [node.outputs[0] for node in guards]
    chosen = [(f"{value.name}.chosen", value.dtype, value.shape) for value in results]
    node = editor.node(NAME, "If", [decision], chosen, attributes=branches)
    node.metadata_props[SELECTION] = NAME
    for old, new in zip(results, node.outputs, strict=True):
        uses = tuple(old.uses())
        for user, index in uses:
            user.replace_input_with(index, new)
        if old.is_graph_output():
            editor.take_over_output(old, new, "selected")
    graph.remove(guards, safe=True)
    graph.sort()


def _is_guard(node: ir.Node, decision: ir.Value) -> bool:
    if (node.domain, node.op_type) != ("", "Where") or node.inputs[0] is not decision:
        return False
    new, old = node.inputs[1], node.inputs[2]
    if new is None or old is None or not is_fresh(new) or not (old.is_graph_input() or old.is_initializer()):
        return False
    shapes = [value.shape for value in (node.inputs[1], node.inputs[2], node.outputs[0]) if value is not None]
    return all(shape is not None and shape.is_static() and shape == shapes[0] for shape in shapes)


def _branch(editor: Editor, name: str, values: list[ir.Value | None]) -> ir.Graph:
    nodes = []
    for value in values:
        assert value is not None
        result = ir.Value(name=editor.unique(f"{value.name}.{name}"), type=value.type, shape=value.shape)
        node = ir.node("Identity", [value], outputs=[result], metadata_props={PASS_KEY: NAME})
        node.name = editor.unique(f"graphscale/{NAME}/{result.name}")
        nodes.append(node)
    return ir.Graph([], [node.outputs[0] for node in nodes], nodes=nodes, name=f"{NAME}.{name}")


def _product(sizes: tuple[int, ...]) -> int:
    found = 1
    for size in sizes:
        found *= int(size)
    return found
