"""The flow through nodes with subgraphs: the values that each single output depends on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import onnx_ir as ir

from graphscale.graph.values import inputs_of, subgraphs
from graphscale.graph.walks import reach

__all__ = ["sources_of"]


def sources_of(value: ir.Value) -> Iterable[ir.Value]:
    """Return the values that the node of a value computes it from, in its own graph or around it.

    Of a node with subgraphs, one output may depend on less than the node reads: on the values that its branches compute
    this output from; in a Loop or Scan, on those that the body computes it from in any round, and on the number of
    rounds. The length of what is scanned counts as no dependence, as all shapes.
    """
    node = value.producer()
    if node is None:
        return ()
    bodies = subgraphs(node)
    if not bodies:
        return inputs_of(node)
    index = value.index() or 0
    if node.op_type == "If":
        leaving = [body.outputs[index] for body in bodies]
        captured = (v for body, left in zip(bodies, leaving, strict=True) for v in _entering(body, [left]))
        return dict.fromkeys((*inputs_of(node), *captured))
    if node.op_type in ("Loop", "Scan"):
        return _sources_in_rounds(node, bodies[0], index)
    return (*inputs_of(node), *(v for body in bodies for v in _entering(body, body.outputs)))


def _sources_in_rounds(node: ir.Node, body: ir.Graph, index: int) -> Iterable[ir.Value]:
    # A Loop's body gives whether it goes on before all else, and is given the round and this flag.
    ahead, first = (1, 2) if node.op_type == "Loop" else (0, 0)
    scanned = node.attributes["num_scan_inputs"].as_int() if node.op_type == "Scan" else 0
    carried = body.inputs[first : len(body.inputs) - scanned]
    following = dict(zip(carried, body.outputs[ahead:], strict=False))
    given = dict(zip(body.inputs, node.inputs, strict=False))
    if index < len(carried):
        # Without a round it stays as it comes.
        start = [carried[index]]
    else:
        start = [body.outputs[index + ahead]]
    flags = [*body.inputs[:first], *body.outputs[:ahead]]

    def above(value: ir.Value) -> Sequence[ir.Value]:
        return [following[value]] if value in following else list(_entering(body, [value]))

    found = reach([*flags, *start], lambda value: above(value) if value.graph is body else ())
    outer = (given.get(value, value) if value.graph is body else value for value in found)
    return dict.fromkeys(value for value in outer if value is not None and value.graph is not body)


def _entering(body: ir.Graph, values: Iterable[ir.Value]) -> Iterable[ir.Value]:
    """Yield the inputs of a body, and the values around it, that some values depend on."""
    found = reach(values, lambda value: sources_of(value) if value.graph is body else ())
    return (value for value in found if value.graph is not body or value.producer() is None)
