"""Degrees: the power of the scale in every value of a graph, by the rules of the operator table.

Multiply some values by a symbol S > 0; the degree of a value says by which power of S it is multiplied then. Integer
and half powers occur: a square has degree 2, its root degree 1, a reciprocal degree -1. Several symbols are powers of
one, far apart.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import onnx_ir as ir

from graphscale.flow.interpreter import Domain
from graphscale.graph.values import constant_number, is_known_zero, node_name, op_name
from graphscale.operators import ALL, Kind, Rule, rule_of

__all__ = [
    "ZERO",
    "Conflict",
    "Degree",
    "DegreeDomain",
    "Element",
    "Mixed",
    "degree_of",
    "is_small_zero",
]

# Larger tensors are weights, and not read.
_SMALL = 4096

# A test for a value known to be all zeros, without reading weights.
is_small_zero = functools.partial(is_known_zero, largest=_SMALL)


# None, ZERO, for a value known to be all zeros, which has every degree at once.
Degree: TypeAlias = float | None
ZERO: Degree = None


@dataclasses.dataclass(frozen=True)
class Conflict:
    """A node whose operands' degrees its rule does not allow.

    Attributes:
        node: the node; inside a subgraph, the inner one.
        operands: the input indices of `node` whose degree must become 0; none where its branches or rounds disagree.
        others: for a sum, the indices of the operands of degree 0, which could be scaled instead.
        unknown: True if the operator has no rule.
        degree: the degree of the result, apart from the conflict.
    """

    node: ir.Node
    operands: tuple[int, ...]
    others: tuple[int, ...] = ()
    unknown: bool = False
    degree: Degree = 0

    @property
    def scaled(self) -> tuple[ir.Value, ...]:
        """The operands whose degree must become 0."""
        return tuple(value for i in self.operands if (value := self.node.inputs[i]) is not None)

    @property
    def unscaled(self) -> tuple[ir.Value, ...]:
        """The operands of degree 0."""
        return tuple(value for i in self.others if (value := self.node.inputs[i]) is not None)

    def __str__(self) -> str:
        if self.unknown:
            from graphscale.operators.unruled import UNRULED

            reason = UNRULED.get((self.node.domain, self.node.op_type))
            why = "" if reason is None else f": {reason}"
            return f"operator {op_name(self.node)} of node {node_name(self.node)!r} has no degree rule{why}"
        if not self.operands:
            return f"the bodies of {op_name(self.node)} node {node_name(self.node)!r} disagree on the scale"
        names = ", ".join(repr(value.name) for value in self.scaled)
        return f"{op_name(self.node)} of node {node_name(self.node)!r} is not linear in {names}"


@dataclasses.dataclass(frozen=True)
class Mixed:
    """The top of the lattice: no power of the scales describes the value.

    Attributes:
        reason: the conflict that it comes from.
        degree: the degree apart from the conflict, with which a diagnosis goes on.
    """

    reason: Conflict
    degree: Degree


Element: TypeAlias = Degree | Mixed


def degree_of(element: Element) -> Degree:
    """Return the degree of an element, apart from conflicts above."""
    return element.degree if isinstance(element, Mixed) else element


class DegreeDomain(Domain[Element]):
    """The lattice ZERO < every power < MIXED.

    Args:
        is_zero: tests whether a value is known to be all zeros.

    Attributes:
        conflicts: the conflict of each node, in the order of visits.
    """

    default: Element = 0

    def __init__(self, is_zero: Callable[[ir.Value | None], bool] = is_known_zero) -> None:
        self.is_zero = is_zero
        self.conflicts: dict[ir.Node, Conflict] = {}

    def transfer(self, node: ir.Node, operands: Sequence[Element]) -> Sequence[Element]:
        is_mixed = Mixed in map(type, operands)
        plain: Iterable[Any] = map(degree_of, operands) if is_mixed else operands
        degrees = {i: e for i, (v, e) in enumerate(zip(node.inputs, plain, strict=True)) if v is not None}
        rule = rule_of(node)
        for i in () if rule is None else rule.ignored:
            degrees.pop(i, None)
        result = self.result(node, rule, degrees)
        if isinstance(result, Conflict):
            self.conflicts[node] = result
        elif self.conflicts and not is_mixed:
            # A round before met lower operands; a mixed one has the degree of the conflict, which hides it.
            self.conflicts.pop(node, None)
        above = {i: e for i, e in enumerate(operands) if i in degrees} if is_mixed else {}
        return self._outputs(node, rule, result, above)

    def opaque(self, node: ir.Node, operands: Sequence[Element]) -> Sequence[Element]:
        degree = _largest(dict(enumerate(map(degree_of, operands))), range(len(operands)))
        if not degree:
            return [0] * len(node.outputs)
        carrying = tuple(i for i, element in enumerate(operands[: len(node.inputs)]) if degree_of(element))
        self.conflicts[node] = conflict = Conflict(node, carrying, unknown=True, degree=degree)
        return [Mixed(conflict, degree)] * len(node.outputs)

    def result(self, node: ir.Node, rule: Rule | None, degrees: Mapping[int, Degree]) -> Degree | Conflict:
        """Return the degree of a node's results, or the conflict of its operands.

        Args:
            node: the node.
            rule: its rule.
            degrees: the degrees of its operands by their indices.
        """
        return _power_of(node, rule, degrees, self.is_zero)

    def reason(self, conflict: Conflict | None, operands: Mapping[int, Element]) -> Conflict | None:
        """Return the conflict that the result of a node comes from: the first one above, or its own.

        Args:
            conflict: the conflict of the node, if any.
            operands: the elements of its operands by their indices.
        """
        return next((e.reason for e in operands.values() if isinstance(e, Mixed)), conflict)

    def _outputs(
        self, node: ir.Node, rule: Rule | None, result: Degree | Conflict, operands: Mapping[int, Element]
    ) -> Sequence[Element]:
        """Return the elements of a node's outputs by its result."""
        element, own = (result.degree, result) if isinstance(result, Conflict) else (result, None)
        mixed: Element = element
        if own is not None or (element != 0 and element is not ZERO):
            reason = self.reason(own, operands)
            mixed = element if reason is None else Mixed(reason, element)
        if rule is None or rule.outputs == ALL:
            return [mixed] * len(node.outputs)
        return [mixed if i in rule.outputs else 0 for i in range(len(node.outputs))]

    def join(self, node: ir.Node, elements: Sequence[Element]) -> Element:
        first = elements[0]
        if isinstance(first, Mixed):
            return first
        distinct = [e for e in dict.fromkeys(elements) if e is not ZERO]
        mixed = next((e for e in distinct if isinstance(e, Mixed)), None)
        if mixed is None and len(distinct) > 1:
            conflict = Conflict(node, (), degree=max(map(_known, distinct), key=abs))
            mixed = Mixed(self.conflicts.setdefault(node, conflict), conflict.degree)
        return mixed if mixed is not None else distinct[0] if distinct else ZERO

    def pass_border(self, value: ir.Value, element: Element) -> Element:
        return ZERO if element == 0 and element is not ZERO and self.is_zero(value) else element


def _known(element: Element) -> float:
    return degree_of(element) or 0


def _power_of(
    node: ir.Node, rule: Rule | None, degrees: Mapping[int, Degree], is_zero: Callable[[ir.Value | None], bool]
) -> Degree | Conflict:
    """Return the degree of a node's results by the degrees of its operands, with every power allowed; see `Kind`."""
    carrying = tuple([i for i, degree in degrees.items() if degree])
    if not carrying and ZERO not in degrees.values():
        return 0
    if rule is None:
        return Conflict(node, carrying, unknown=True, degree=_largest(degrees, carrying)) if carrying else 0
    if rule.kind in (Kind.SHAPE, Kind.DEGREE_0):
        return 0
    if rule.kind is Kind.NONLINEAR:
        return Conflict(node, carrying, degree=_largest(degrees, carrying)) if carrying else 0
    data = tuple(degrees) if rule.data == ALL else tuple([i for i in rule.data if i in degrees])
    stray = tuple([i for i in carrying if i not in data and i not in rule.addends])
    if stray:
        return Conflict(node, stray, degree=_largest(degrees, carrying))
    if rule.kind is Kind.POWER:
        degree = degrees[data[0]]
        return ZERO if degree is ZERO and rule.power > 0 else (degree or 0) * rule.power
    if rule.kind is Kind.COMPARE:  # multiples of infinity are infinite
        data = tuple([i for i in data if not math.isinf(constant_number(node.inputs[i]) or 0)])
    if rule.kind in (Kind.LINEAR, Kind.COMPARE):
        agreed = agree(node, data, degrees, is_zero)
        return agreed if rule.kind is Kind.LINEAR or isinstance(agreed, Conflict) or not agreed else 0
    if any(degrees[i] is ZERO for i in data):
        added = [i for i in rule.addends if i in degrees]
        return agree(node, added, degrees, is_zero) if added else ZERO
    if rule.kind is Kind.QUOTIENT:
        return (degrees[data[0]] or 0) - (degrees[data[1]] or 0)
    factors, total = tuple(i for i in data if degrees[i]), sum((degrees[i] or 0 for i in data), start=0)
    added = [i for i in rule.addends if i in degrees and degrees[i] not in (ZERO, total)]
    added = [i for i in added if not is_zero(node.inputs[i])]
    if not added:
        return total
    if total == 0:
        return Conflict(node, tuple(added), others=data, degree=_largest(degrees, added))
    return Conflict(node, factors, others=tuple(added), degree=total)


def agree(
    node: ir.Node,
    data: Sequence[int],
    degrees: Mapping[int, Degree],
    is_zero: Callable[[ir.Value | None], bool],
) -> Degree | Conflict:
    """Return the common degree of some operands of a node, or their conflict."""
    present = {degrees[i] for i in data}
    present.discard(ZERO)
    if not present:
        return ZERO if data else 0
    if len(present) == 1:
        return present.pop()
    nonzero = [i for i in data if degrees[i] or (degrees[i] == 0 and not is_zero(node.inputs[i]))]
    present = {degrees[i] for i in nonzero}
    if len(present) == 1:
        return present.pop()
    high = tuple(i for i in nonzero if degrees[i])
    return Conflict(node, high, tuple(i for i in nonzero if degrees[i] == 0), degree=_largest(degrees, high))


def _largest(degrees: Mapping[int, Degree], indices: Sequence[int]) -> float:
    return max((degrees[i] or 0 for i in indices), key=abs, default=0)
