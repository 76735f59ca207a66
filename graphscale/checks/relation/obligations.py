"""Obligations beside equal results: the scale reaches all backward contractions, and enters at no forward value."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import onnx_ir as ir

from graphscale.checks.relation.relate import Relation, Side
from graphscale.checks.relation.terms import Number
from graphscale.flow.degree import ZERO
from graphscale.graph.values import is_float, node_name
from graphscale.operators import Trait, has_trait

__all__ = ["find_misplaced", "find_unscaled"]


def find_unscaled(relation: Relation, contractions: Iterable[ir.Node]) -> Iterator[str]:
    """Yield the contractions of the first model that the second computes without the scale.

    Args:
        relation: an original and its scaled model.
        contractions: nodes of the original.
    """
    scaled = _find_scaled_terms(relation)
    for node in contractions:
        numbers = [number for value in node.outputs if value.name and (number := relation.first.named(value.name))]
        if not any(number.degree == ZERO or number.term in scaled for number in numbers):
            yield f"the loss scale does not reach {node_name(node)!r}: what it computes may underflow"


def _find_scaled_terms(relation: Relation) -> set[int]:
    """Find the terms that carry the scale in the second model.

    A sum in one operator with its contraction, such as a Gemm, has a value for the sum alone: terms without a value
    carry the scale with the value around them.
    """
    numbers = [number for _, number in relation.second.results]
    valued, found = {number.term for number in numbers}, {number.term for number in numbers if number.degree != 0}
    pending = [*found]
    for term in pending:
        more = {*relation.terms.operands(term)} - valued - found
        found |= more
        pending += more
    return found


def find_misplaced(
    relation: Relation, scale: str, data: Iterable[str], is_late: Callable[[str], bool]
) -> Iterator[str]:
    """Yield the places of the second model where the scale enters a forward pass.

    Args:
        relation: an original and its scaled model.
        scale: the name of the scale.
        data: the names of the original's values that depend on fed data.
        is_late: the predicate of names of values that depend on the tail of a loss, or on a target.
    """
    known = relation.first.terms_by_name()
    fed = {known[name] for name in data if name in known}
    late = {term for name, term in known.items() if is_late(name)}
    decided = set(known.values())
    for node, value, number in _find_entries(relation.second, scale):
        pending = [number.term]
        for term in pending:
            if term not in decided:
                pending += {*relation.terms.operands(term)}.difference(pending)
        if fed.intersection(pending) and late.isdisjoint(pending):
            yield f"the scale enters at {value.name!r} of {node_name(node)!r}, a value of a forward pass"


def _find_entries(side: Side, scale: str) -> Iterator[tuple[ir.Node, ir.Value, Number]]:
    """Yield the operands in the main graph that become multiples of the scale, with their readers.

    A seed of 1 times the scale is the scale by its number: the values that only view or cast it count.
    """
    alone = {scale}
    for node in side.graph:
        operands = [value for value in node.inputs if value is not None]
        first = operands[0].name if operands else None
        if first in alone and has_trait(node, Trait.EXACT | Trait.CAST | Trait.RESHAPE):
            alone.update(value.name or "" for value in node.outputs)
        elif side.of(node.outputs[0]).degree not in (0, ZERO) and any(v.name in alone for v in operands):
            numbers = ((v, side.of(v)) for v in operands)
            yield from ((node, v, number) for v, number in numbers if number.degree == 0 and is_float(v))
