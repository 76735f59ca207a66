"""The region of mixed precision: between the loss with its seed and the optimizer, which stay float32."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import onnx_ir as ir

from graphscale.graph.cones import nodes_above
from graphscale.graph.values import inner_nodes, is_scalar, operands_of
from graphscale.graph.walks import source_of
from graphscale.step.training_step import Step

__all__ = ["LOSS", "OPTIMIZER", "SEED", "pin_nodes"]

OPTIMIZER = "the optimizer stays float32"
LOSS = "the loss stays float32"
# A loss scale of 2**24 alone would overflow float16.
SEED = "the seed of the backward pass stays float32"


def pin_nodes(
    step: Step, forward: set[ir.Node], on_allow_list: set[ir.Node], on_clear_list: set[ir.Node]
) -> dict[ir.Node, str]:
    """Find the nodes of the main graph that stay float32 regardless of lists, with the reason.

    Args:
        step: the step, before any cast.
        forward: the nodes that the loss depends on.
        on_allow_list: the nodes on the allow list.
        on_clear_list: the nodes on the clear list; they may move the numbers of the seed in a small type.
    """
    # Clear nodes may have moved the computed loss.
    moved = source_of(step.loss, lambda node: node.inputs[0] if node in on_clear_list and node.inputs else None)
    allowed = set(_contractions(step, on_allow_list)) - {moved.producer()}
    nodes = tuple(step.graph)
    backward = nodes_above(*step.gradients)
    reasons = {node: OPTIMIZER for node in nodes if node not in forward and node not in backward}
    reasons |= dict.fromkeys(_head(step, [node for node in nodes if node in forward], allowed), LOSS)
    reasons |= {node: SEED for node in _seed(step, allowed) if node not in forward and node not in on_clear_list}
    return reasons


def _contractions(step: Step, on_allow_list: set[ir.Node]) -> Iterator[ir.Node]:
    """Yield the allowed nodes of the main graph, by their bodies if they have some, without sums to scalars."""
    for node in step.graph:
        if node in on_allow_list:
            if not any(is_scalar(value) for value in node.outputs):
                yield node
        elif any(inner in on_allow_list for inner in inner_nodes(node)):
            yield node


def _head(step: Step, forward: Sequence[ir.Node], allowed: set[ir.Node]) -> Iterator[ir.Node]:
    """Yield the nodes of the forward pass behind its last allowed ones."""
    leading: set[ir.Node] = set()
    leads_on: set[ir.Value] = set()
    for node in reversed(forward):
        if node in allowed or not leads_on.isdisjoint(node.outputs):
            leading.add(node)
            leads_on.update(operands_of(node))
    depends: set[ir.Value] = set()
    for node in forward:
        if node in allowed:
            depends.update(node.outputs)
        elif not depends.isdisjoint(operands_of(node)):
            depends.update(node.outputs)
            if node not in leading:
                yield node


def _seed(step: Step, allowed: set[ir.Node]) -> Iterator[ir.Node]:
    """Yield the nodes between the places where a loss scale enters and the first allowed ones.

    A sum of the seed and an allowed node's result, by a residual connection, is no seed.
    """
    seed: set[ir.Value | None] = {place.value for place in step.places if place.edge is None}
    edges = {place.edge.node for place in step.places if place.edge is not None}
    for place in step.places:
        producer = place.value.producer()
        if place.edge is None and producer is not None:
            yield producer
    beyond: set[ir.Value | None] = set()
    for node in step.graph:
        reads_seed = node in edges or not seed.isdisjoint(node.inputs)
        if (reads_seed and node in allowed) or not beyond.isdisjoint(node.inputs):
            beyond.update(node.outputs)
        elif reads_seed:
            seed.update(node.outputs)
            yield node
