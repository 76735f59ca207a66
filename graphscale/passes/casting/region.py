"""Which nodes of a training graph may run in float16 at all: forward and backward, without the loss and its seed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import onnx_ir as ir

from graphscale.analysis.training_graph import TrainingGraph
from graphscale.graph.values import is_scalar, subgraphs
from graphscale.graph.walks import source_of

__all__ = ["LOSS", "OPTIMIZER", "SEED", "leading_to", "nodes_of", "pinned"]

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


def leading_to(found: TrainingGraph, *values: ir.Value) -> set[ir.Node]:
    """The nodes of the main graph that some of its values depend on."""
    wanted, leading = set(values), set()
    for node, operands in reversed(tuple(found.reads.items())):
        if not wanted.isdisjoint(node.outputs):
            leading.add(node)
            wanted.update(operands)
    return leading


def pinned(
    found: TrainingGraph, forward: set[ir.Node], on_allow_list: set[ir.Node], on_clear_list: set[ir.Node]
) -> dict[ir.Node, str]:
    """The nodes of the main graph that stay float32 wherever they are on the lists, with the reason.

    Args:
        found: the analysis of the graph.
        forward: the nodes that the loss depends on.
        on_allow_list: the nodes that are.
        on_clear_list: likewise; the numbers of the seed may be moved about in a small type.
    """
    allowed = set(_contractions(found, on_allow_list))
    giver = _giver(found.loss, on_clear_list)
    if giver is not None:
        allowed.discard(giver)
    nodes = found.nodes
    backward = leading_to(found, *found.gradients)
    reasons = {node: OPTIMIZER for node in nodes if node not in forward and node not in backward}
    reasons |= dict.fromkeys(_head(found, [node for node in nodes if node in forward], allowed), LOSS)
    reasons |= {node: SEED for node in _seed(found, allowed) if node not in forward and node not in on_clear_list}
    return reasons


def _giver(value: ir.Value, on_clear_list: set[ir.Node]) -> ir.Node | None:
    """The node that computes a value, which others may only have moved since."""
    return source_of(value, lambda node: node.inputs[0] if node in on_clear_list and node.inputs else None).producer()


def _contractions(found: TrainingGraph, on_allow_list: set[ir.Node]) -> Iterator[ir.Node]:
    """The allowed nodes of the main graph: one with bodies is what these are; one that gives a scalar is a sum."""
    for node in found.nodes:
        if node in on_allow_list:
            if not any(is_scalar(value) for value in node.outputs):
                yield node
        elif found.owners and any(inner in on_allow_list for body in subgraphs(node) for inner in nodes_of(body)):
            yield node


def _head(found: TrainingGraph, forward: Sequence[ir.Node], allowed: set[ir.Node]) -> Iterator[ir.Node]:
    """The nodes of the forward pass behind its last allowed ones."""
    leading: set[ir.Node] = set()
    leads_on: set[ir.Value] = set()
    for node in reversed(forward):
        if node in allowed or not leads_on.isdisjoint(node.outputs):
            leading.add(node)
            leads_on.update(found.reads[node])
    depends: set[ir.Value] = set()
    for node in forward:
        if node in allowed:
            depends.update(node.outputs)
        elif not depends.isdisjoint(found.reads[node]):
            depends.update(node.outputs)
            if node not in leading:
                yield node


def _seed(found: TrainingGraph, allowed: set[ir.Node]) -> Iterator[ir.Node]:
    """The nodes between the places where a loss scale enters and the first allowed ones.

    What an allowed one gave, joined to the seed by a residual connection, say, is the seed no longer.
    """
    seed: set[ir.Value | None] = {place.value for place in found.places if place.edge is None}
    edges = {place.edge.node for place in found.places if place.edge is not None}
    for place in found.places:
        producer = place.value.producer()
        if place.edge is None and producer is not None:
            yield producer
    beyond: set[ir.Value | None] = set()
    for node in found.nodes:
        reads_seed = node in edges or not seed.isdisjoint(node.inputs)
        if (reads_seed and node in allowed) or not beyond.isdisjoint(node.inputs):
            beyond.update(node.outputs)
        elif reads_seed:
            seed.update(node.outputs)
            yield node
