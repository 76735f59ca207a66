"""The degrees of one node's results, by its rule in the table, subgraphs included."""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence

import onnx_ir as ir

from graphscale.graph.values import inner_nodes, is_float, is_known_zero, node_name, op_name, operands_of, subgraphs
from graphscale.graph.walks import carried_by
from graphscale.operators import ALL, UNRULED, Kind, Rule, rule_of

__all__ = ["ZERO", "Conflict", "Degree", "Degrees", "agree", "combine", "evaluate"]

# The degree of a value: its power of the scale S, or ZERO for a value known to be all zeros, which has every degree at
# once. This analysis allows the degrees 0 and 1; lint allows every power, roots included.
Degree = float | None
ZERO: Degree = None

_PATIENCE = 64  # average number of evaluations of the nodes of bodies until they count as in conflict


class Degrees:
    """The degrees of values, subgraphs included; a value that is not in `values` has degree 0."""

    def __init__(self, values: dict[ir.Value, Degree] | None = None, symbol: ir.Value | None = None) -> None:
        self.values: dict[ir.Value, Degree] = {} if values is None else values
        self._symbol = symbol

    def is_symbol(self, value: ir.Value | None) -> bool:
        """Return whether a value is the symbol S itself, or a cast of it, and may be divided out."""
        node = None if value is None else value.producer()
        if node is not None and node.op_type == "Cast":
            value = node.inputs[0]
        return value is not None and value is self._symbol

    def edge(self, node: ir.Node, index: int) -> Degree:
        """Return the degree with which a node reads its input."""
        value = node.inputs[index]
        return 0 if value is None else self.values.get(value, 0)

    def adopt(self, value: ir.Value, degree: Degree) -> None:
        """Record the degree of a value inside a subgraph."""
        self.values[value] = degree

    def edges(self, node: ir.Node) -> dict[int, Degree]:
        """Return the degrees with which a node reads its inputs, by their indices."""
        values = self.values
        return {i: values.get(value, 0) for i, value in enumerate(node.inputs) if value is not None}


@dataclasses.dataclass(frozen=True)
class Conflict:
    """A node whose operands' degrees its rule does not allow.

    Attributes:
        node: the node; inside a subgraph, the inner one.
        operands: the input indices of `node` whose degree must become 0.
        others: for a sum, the indices of the operands of degree 0, which could be scaled instead.
        unknown: True if the operator has no rule.
        degree: the degree of the result, apart from the conflict.
    """

    node: ir.Node
    operands: tuple[int, ...]
    others: tuple[int, ...] = ()
    unknown: bool = False
    degree: Degree = 0

    def __str__(self) -> str:
        if self.unknown:
            reason = UNRULED.get((self.node.domain, self.node.op_type))
            why = "" if reason is None else f": {reason}"
            return f"operator {op_name(self.node)} of node {node_name(self.node)!r} has no degree rule{why}"
        names = ", ".join(repr(v.name) for i in self.operands if (v := self.node.inputs[i]) is not None)
        return f"{op_name(self.node)} of node {node_name(self.node)!r} is not linear in {names}"


def evaluate(node: ir.Node, known: Degrees, effort: _Effort | None = None) -> Sequence[Degree] | Conflict:
    """Return the degree of each output of a node, or the conflict that prevents it.

    The degrees of values inside the node's subgraphs are added to `known`.

    Args:
        node: the node.
        known: the degrees of values.
        effort: the effort for the bodies around the node; None for a node of a main graph.
    """
    rule = rule_of(node)
    if rule is not None and rule.kind is Kind.BODY:
        return _evaluate_bodies(node, known, effort or _Effort(node))
    degrees = known.edges(node)
    for i in () if rule is None else rule.ignored:
        degrees.pop(i, None)
    carrying = tuple([i for i, degree in degrees.items() if degree])
    if not carrying and ZERO not in degrees.values():
        return [0] * len(node.outputs)
    if rule is None:
        return Conflict(node, carrying, unknown=True) if carrying else [0] * len(node.outputs)
    # A sign, a comparison, or a quotient of gradients has degree 0. But its effects depend on finite gradients, so that
    # the gradient is unscaled, and checked, as for a non-linear use.
    if carrying and rule.kind in (Kind.NONLINEAR, Kind.DEGREE_0):
        return Conflict(node, carrying)
    is_homogeneous = rule.kind not in (Kind.SHAPE, Kind.NONLINEAR, Kind.DEGREE_0)
    result = combine(node, rule, degrees, known.is_symbol) if is_homogeneous else 0
    if isinstance(result, Conflict):
        return result
    if result not in (0, ZERO) and any(rule.has_degree(i) and not is_float(v) for i, v in enumerate(node.outputs)):
        return Conflict(node, carrying)
    count = len(node.outputs)
    return [result] * count if rule.outputs == ALL else [result if i in rule.outputs else 0 for i in range(count)]


def combine(
    node: ir.Node,
    rule: Rule,
    degrees: Mapping[int, Degree],
    divides: Callable[[ir.Value | None], bool] | None,
    is_zero: Callable[[ir.Value | None], bool] = is_known_zero,
) -> Degree | Conflict:
    """Return the degree of a homogeneous node's result, or the conflict of its operands.

    Args:
        node: the node.
        rule: its rule.
        degrees: the degrees of its operands by their indices.
        divides: whether a value may be a divisor: the results then have degree 0 or 1; None to allow every power.
        is_zero: whether a value is known to be all zeros.
    """
    carrying = tuple([i for i, degree in degrees.items() if degree])
    data = tuple(degrees) if rule.data == ALL else tuple([i for i in rule.data if i in degrees])
    stray = tuple([i for i in carrying if i not in data and i not in rule.addends])
    if stray:
        return Conflict(node, stray, degree=_largest(degrees, carrying))
    if rule.kind in (Kind.LINEAR, Kind.COMPARE):
        agreed = agree(node, data, degrees, is_zero)
        if rule.kind is Kind.LINEAR or isinstance(agreed, Conflict) or not agreed:
            return agreed
        return 0 if divides is None else Conflict(node, carrying)
    if any(degrees[i] is ZERO for i in data):
        added = [i for i in rule.addends if i in degrees]
        return agree(node, added, degrees, is_zero) if added else ZERO
    if rule.kind is Kind.QUOTIENT:
        divisor = degrees[data[1]] or 0
        difference = (degrees[data[0]] or 0) - divisor
        if divides is None or (difference in (0, 1) and (not divisor or divides(node.inputs[data[1]]))):
            return difference
        return Conflict(node, carrying)
    factors, total = tuple(i for i in data if degrees[i]), sum(degrees[i] or 0 for i in data)
    if divides is not None and total > 1:
        return Conflict(node, factors)
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
    is_zero: Callable[[ir.Value | None], bool] = is_known_zero,
) -> Degree | Conflict:
    """Return the common degree of some operands of a node, or their conflict; see `combine`."""
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


def _largest(degrees: Mapping[int, Degree], indices: Iterable[int]) -> Degree:
    return max((degrees[i] or 0 for i in indices), key=abs, default=0)


class _Effort:
    """The remaining effort for the bodies of a node of a main graph; below 0, the degrees count as in conflict."""

    def __init__(self, node: ir.Node) -> None:
        self.left = _PATIENCE * sum(map(_size, inner_nodes(node)))


def _size(node: ir.Node) -> int:
    return 1 + len(node.inputs) + len(node.outputs)


def _evaluate_bodies(node: ir.Node, known: Degrees, effort: _Effort) -> Sequence[Degree] | Conflict:
    """Evaluate bodies: branches of an If must agree, and carried values keep the degree of the first round."""
    results: list[list[Degree]] = []
    for body in subgraphs(node):
        result = _evaluate_body(node, body, known, effort)
        if isinstance(result, Conflict):
            return dataclasses.replace(result, others=())
        results.append(result)
    outputs: list[Degree] = []
    for i, column in enumerate(zip(*results, strict=True)):
        distinct = set(column) - {ZERO}
        if len(distinct) > 1:
            # A branch with zeros in place of a gradient.
            leaving = zip(column, subgraphs(node), strict=True)
            distinct = {degree for degree, body in leaving if degree or not is_known_zero(body.outputs[i])} - {ZERO}
        if len(distinct) > 1:
            return _body_conflict(node, known)
        outputs.append(distinct.pop() if distinct else ZERO)
    return outputs


def _evaluate_body(node: ir.Node, body: ir.Graph, known: Degrees, effort: _Effort) -> list[Degree] | Conflict:
    first, count, ahead = carried_by(node)
    for i, value in enumerate(body.inputs):
        start = known.edge(node, i) if i >= first else 0
        known.adopt(value, ZERO if start == 0 and i >= first and is_known_zero(node.inputs[i]) else start)
    for inner in body:
        changed = _evaluate_inner(inner, known, effort)
        if isinstance(changed, Conflict):
            return changed
    leaving, carried = body.outputs[ahead:], body.inputs[first : first + count]
    conflict = _evaluate_rounds(node, body, dict(zip(carried, leaving, strict=False)), known, effort)
    if conflict is not None:
        return conflict
    # A loop without rounds returns its operands.
    return [known.values.get(value, 0) for value in (*carried, *leaving[len(carried) :])]


def _evaluate_inner(inner: ir.Node, known: Degrees, effort: _Effort) -> list[ir.Value] | Conflict:
    """Evaluate a node of a body, and return its outputs of changed degree."""
    effort.left -= _size(inner)
    result = evaluate(inner, known, effort)
    if isinstance(result, Conflict):
        return result
    before = [known.values.get(value, 0) for value in inner.outputs]
    for value, degree in zip(inner.outputs, result, strict=True):
        known.adopt(value, degree)
    return [value for value, degree in zip(inner.outputs, before, strict=True) if known.values[value] != degree]


def _evaluate_rounds(
    node: ir.Node, body: ir.Graph, carried: Mapping[ir.Value, ir.Value], known: Degrees, effort: _Effort
) -> Conflict | None:
    """Evaluate the changed parts of a body again, until the carried values keep their degrees.

    Args:
        node: the node.
        body: its body, evaluated once.
        carried: the output for each carried value of the next round.
        known: the degrees.
        effort: the effort so far.
    """
    following: dict[ir.Value, list[ir.Value]] = {}
    for value, after in carried.items():
        following.setdefault(after, []).append(value)
    changed, readers = list(following), None
    while True:
        updates = [(value, known.values.get(after, 0)) for after in changed for value in following.get(after, ())]
        changed = []
        for value, degree in updates:
            before = known.values[value]
            if before is ZERO and degree is not ZERO:
                known.values[value] = degree
                changed.append(value)
            elif degree not in (before, ZERO):
                return _body_conflict(node, known)
        if not changed:
            return None
        readers = _readers_in(body) if readers is None else readers
        conflict = _evaluate_readers(readers, changed, known, effort)
        if conflict is not None:
            return conflict
        if effort.left < 0:
            return _body_conflict(node, known)


_Readers = dict[ir.Value, dict[int, ir.Node]]


def _readers_in(body: ir.Graph) -> _Readers:
    """Return the readers of each value in a body, nested bodies included, by position."""
    readers: _Readers = {}
    for i, node in enumerate(body):
        for value in operands_of(node):
            readers.setdefault(value, {})[i] = node
    return readers


def _evaluate_readers(readers: _Readers, changed: list[ir.Value], known: Degrees, effort: _Effort) -> Conflict | None:
    """Evaluate the readers of changed values in order, and append newly changed values."""
    pending: dict[int, ir.Node] = {}
    for value in changed:
        pending.update(readers.get(value, {}))
    queue = sorted(pending)
    while queue and effort.left >= 0:
        result = _evaluate_inner(pending.pop(heapq.heappop(queue)), known, effort)
        if isinstance(result, Conflict):
            return result
        changed += result
        for i, node in (pair for value in result for pair in readers.get(value, {}).items()):
            if i not in pending:
                pending[i] = node
                heapq.heappush(queue, i)
    return None


def _body_conflict(node: ir.Node, known: Degrees) -> Conflict:
    return Conflict(node, tuple(i for i in range(len(node.inputs)) if known.edge(node, i) not in (0, ZERO)))
