"""The search for the loss scale of a graph: by its metadata, its name, or its uses.

A loss scale by hand is a scalar that multiplies a value, and divides another value behind it, without effect on the
loss.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx_ir as ir

from graphscale.analysis.scales import Bookkeeping, find_candidates, find_supposed, sources_of
from graphscale.checks.linting.flow import Scale
from graphscale.checks.linting.state_search import State
from graphscale.checks.linting.view import View
from graphscale.errors import LossError, suggest
from graphscale.graph.cones import producers_of
from graphscale.graph.values import constant_tensor, is_float, is_scalar, value_label
from graphscale.graph.walks import is_contradiction, source_by_trait
from graphscale.operators import Trait, has_trait

__all__ = ["find_named_scale", "find_scale"]

# Number of candidates for a close look, the most promising first.
_CANDIDATES = 8


def find_named_scale(view: View, name: str) -> ir.Value:
    """Find the value that the user named as the loss scale.

    Raises:
        LossError: the value does not exist, or is no floating-point scalar.
    """
    value = view.values.get(name)
    if value is None:
        raise LossError(f"--scale {name}: the graph has no value of this name{suggest(name, view.values)}")
    if not is_float(value) or not (is_scalar(value) or value.shape is None):
        raise LossError(f"--scale {name}: {value_label(value)} is no floating-point scalar, and a loss scale must be")
    return value


def find_scale(
    view: View, states: Sequence[State], given: ir.Value | None, roles: Sequence[ir.Value], losses: Sequence[ir.Value]
) -> Scale | None:
    """Find the loss scale.

    The metadata or the user may name it (`given`), and the metadata the rest of its state (`roles`).
    """
    nexts = {state.value: state.next for state in states}
    if given is not None:
        return _complete(view, given, roles, nexts)
    numbers = view.numbers(frozenset(filter(is_scalar, sources_of(view.graph))))
    found = [each for each in find_supposed(view.graph, numbers) if each.divisions]
    # The likeliest first: values that are factors, no constants, and divide many others.
    found = sorted(found, key=lambda c: (constant_tensor(c.leaf) is not None, -len(c.divisions)))
    for candidate in sorted(found, key=lambda c: not c.products)[:_CANDIDATES]:
        if not candidate.products:
            if candidate.symbol is candidate.leaf and _is_tested(view, nexts.get(candidate.leaf)):
                return _complete(view, candidate.leaf, roles, nexts)
            continue
        reached = view.descendants(candidate.products)
        if all(reached.isdisjoint(node.outputs) for node in candidate.divisions):
            continue
        if losses and all(v in reached and source_by_trait(v, Trait.VIEW) not in candidate.products for v in losses):
            continue
        scale = _complete(view, candidate.leaf, roles, nexts, candidate.symbol)
        # A constant is a loss scale if it acts as one in every respect; a shared 2.0 does not.
        is_constant = constant_tensor(candidate.leaf) is not None
        if not is_constant or (scale.unscaled and not (scale.faults or scale.scaled_outputs)):
            return scale
    return None


def _complete(
    view: View,
    value: ir.Value,
    roles: Sequence[ir.Value],
    nexts: Mapping[ir.Value, ir.Value],
    symbol: ir.Value | None = None,
) -> Scale:
    leaves = {value, *roles} if value.producer() is None else {*roles}
    if not roles and value in nexts:
        # Its next value depends on gradients through flags alone, and on the rest of its state.
        others = view.numbers(frozenset(filter(is_scalar, nexts)))
        above = view.ancestors([nexts[value]], lambda each: each not in others)
        leaves.update(leaf for leaf in above if leaf in nexts and leaf in others)
    numbers = view.numbers(frozenset(v for v in (*leaves, symbol or value) if constant_tensor(v) is None))
    scalars = Bookkeeping(numbers, leaves, symbol or value)
    effective = _effective(scalars) if scalars.symbol is value else None
    scalars = scalars if effective is None else Bookkeeping(numbers, leaves, effective)
    return Scale(view, value, scalars, {leaf: nexts[leaf] for leaf in leaves if leaf in nexts})


def _effective(scalars: Bookkeeping) -> ir.Value | None:
    """Return the value, chosen from the scale's state, that multiplies data; None if it is the scale itself."""
    first, *others = find_candidates(scalars.symbol, {scalars.symbol: 1}, scalars.values)
    counts = {other.symbol: len(other.products) + len(other.divisions) for other in others}
    return None if first.products else max((v for v in counts if counts[v]), key=lambda v: counts[v], default=None)


def _is_tested(view: View, following: ir.Value | None) -> bool:
    """Return whether a scalar's next value depends on a test for finiteness: a loss scale without products."""
    # A flag that is never true only delays a write.
    above = () if following is None else view.ancestors([following], stop=is_contradiction)
    return any(has_trait(node, Trait.FINITENESS_TEST) for node in producers_of(above))
