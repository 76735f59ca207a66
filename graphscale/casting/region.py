"""Which nodes of a training graph may run in float16 at all: forward and backward, without the loss and its seed."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import onnx_ir as ir

from graphscale.analysis.hazards import ancestors
from graphscale.analysis.training_graph import TrainingGraph
from graphscale.analysis.values import captured_values, is_scalar, subgraphs

__all__ = ["LOSS", "OPTIMIZER", "SEED", "nodes_of", "pinned"]

OPTIMIZER = "the optimizer stays float32"
LOSS = "the loss stays float32"
# So that a loss scale of 2**24 does not overflow float16 by itself.
SEED = "the seed of the backward pass stays float32"


def nodes_of(graph: ir.Graph) -> Iterator[ir.Node]:
    """All nodes in execution order, those of bodies after the node that has them."""
    for node in graph:
        yield node
        for body in subgraphs(node):
            yield from nodes_of(body)


def pinned(
    found: TrainingGraph, on_allow_list: Callable[[ir.Node], bool], on_clear_list: Callable[[ir.Node], bool]
) -> dict[ir.Node, str]:
    """The nodes of the main graph that stay float32 wherever they are on the lists, with the reason.

    Args:
        found: the analysis of the graph.
        on_allow_list: whether a node is.
        on_clear_list: likewise; the numbers of the seed may be moved about in a small type.
    """

    chosen = set(_contractions(found.graph, on_allow_list))
    giver = _giver(found.loss, on_clear_list)
    if giver is not None:
        chosen.discard(giver)

    def allowed(node: ir.Node) -> bool:
        return node in chosen

    forward = ancestors(found.loss)
    backward = ancestors(*found.gradients)
    reasons = {node: OPTIMIZER for node in found.graph if node not in forward and node not in backward}
    reasons |= dict.fromkeys(_head(found.graph, forward, allowed), LOSS)
    reasons |= {node: SEED for node in _seed(found, allowed) if node not in forward and not on_clear_list(node)}
    return reasons


def _giver(value: ir.Value, on_clear_list: Callable[[ir.Node], bool]) -> ir.Node | None:
    """The node that computes a value, which others may only have moved since."""
    node = value.producer()
    while node is not None and on_clear_list(node) and node.inputs and node.inputs[0] is not None:
        node = node.inputs[0].producer()
    return node


def _contractions(graph: ir.Graph, on_allow_list: Callable[[ir.Node], bool]) -> Iterator[ir.Node]:
    """The allowed nodes of the main graph: one with bodies is what these are; one that gives a scalar is a sum."""
    for node in graph:
        if on_allow_list(node):
            if not any(is_scalar(value) for value in node.outputs):
                yield node
        elif any(on_allow_list(inner) for body in subgraphs(node) for inner in nodes_of(body)):
            yield node


def _head(graph: ir.Graph, forward: set[ir.Node], allowed: Callable[[ir.Node], bool]) -> Iterator[ir.Node]:
    """The nodes of the forward pass behind its last allowed ones."""
    leads_on: set[ir.Value] = set()
    for node in reversed(list(graph)):
        if node not in forward:
            continue
        operands = [value for value in (*node.inputs, *captured_values(node)) if value is not None]
        if allowed(node) or any(value in leads_on for value in node.outputs):
            leads_on.update(operands)
    depends: set[ir.Value] = set()
    for node in graph:
        if node in forward:
            if allowed(node) or any(v in depends for v in (*node.inputs, *captured_values(node)) if v is not None):
                depends.update(node.outputs)
                if not allowed(node) and not any(value in leads_on for value in node.outputs):
                    yield node


def _seed(found: TrainingGraph, allowed: Callable[[ir.Node], bool]) -> Iterator[ir.Node]:
    """The nodes between the places where a loss scale enters and the first allowed ones.

    What an allowed one gave, joined to the seed by a residual connection, say, is the seed no longer.
    """
    seed = {place.value for place in found.places if place.edge is None}
    edges = {place.edge.node for place in found.places if place.edge is not None}
    for place in found.places:
        producer = place.value.producer()
        if place.edge is None and producer is not None:
            yield producer
    beyond: set[ir.Value] = set()
    for node in found.graph:
        reads_seed = node in edges or any(value in seed for value in node.inputs if value is not None)
        if (reads_seed and allowed(node)) or any(value in beyond for value in node.inputs):
            beyond.update(node.outputs)
        elif reads_seed:
            seed.update(node.outputs)
            yield node
