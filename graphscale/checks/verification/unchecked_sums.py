"""Sums and roundings past the finite check in which finite gradients can overflow."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Set

import onnx_ir as ir

from graphscale.analysis.past_gradients import find_narrow_sums
from graphscale.analysis.updates import Update
from graphscale.checks.verification.pair import Pair
from graphscale.flow.degree import Degree
from graphscale.graph.values import inputs_of, uses_of
from graphscale.graph.walks import ancestors
from graphscale.operators import Trait, has_trait
from graphscale.policy.loss_scale import DynamicLossScale

__all__ = ["find_unchecked_sums"]


def find_unchecked_sums(
    pair: Pair,
    finite: ir.Value,
    gradients: Set[ir.Value],
    tested: Collection[ir.Value],
    degrees: Mapping[ir.Value, Degree],
    aside: Collection[ir.Node],
) -> Iterator[str]:
    """Yield the values of a small range that are applied, and not checked themselves.

    Args:
        pair: both graphs.
        finite: the finite flag.
        gradients: the checked gradients.
        tested: all values that the flag tests.
        degrees: the values that carry the scale.
        aside: the nodes of the update rule, and those that only delay a write.
    """
    graph, policy = pair.step.graph, pair.step.scale.policy
    ends = [value for value in graph.outputs if value is not finite]
    ends += [value for node in pair.step.graph if has_trait(node, Trait.ACCUMULATOR) for value in inputs_of(node)]
    applied = ancestors(ends, stop=lambda value: value is finite)
    nodes = [node for node in graph if node not in aside and not applied.isdisjoint(node.outputs)]
    inputs = {value.name: value for value in (*graph.inputs, *graph.initializers.values())}
    following = ((pair.counterpart(each.output), inputs.get(each.input.name)) for each in pair.analysis.states)
    states = [Update(output, state, "") for output, state in following if output is not None and state is not None]
    falls = isinstance(policy, DynamicLossScale) and policy.rule.min_loss_scale < 1
    # By a scale of at least 1, the quotient of a float16 number is one.
    exact = (
        set() if falls else {use.node.outputs[0] for value in gradients if _is_widened(value) for use in uses_of(value)}
    )
    exact |= degrees.keys()
    losses = [value for value in map(pair.counterpart, pair.analysis.losses) if value is not None]
    for value in find_narrow_sums(nodes, gradients, exact, losses, states):
        if value not in tested:
            yield f"{value.name!r} can overflow in float16 though all gradients are finite, and is not checked itself"


def _is_widened(value: ir.Value) -> bool:
    """Return whether a gradient is the quotient of a number that was cast to a wider type."""
    node = value.producer()
    operands = [] if node is None else inputs_of(node)
    makers = [each.producer() for each in operands]
    return any(maker is not None and has_trait(maker, Trait.CAST) for maker in makers)
