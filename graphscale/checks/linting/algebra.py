"""Degrees through one node, all powers allowed: what `analysis.degrees` settles by unscaling first, lint works out.

The rules are those of `analysis.rules`. Beyond them, a square has degree 2, its root degree 1, a reciprocal degree -1:
a graph by hand may clip scaled gradients to a scaled threshold, and be right.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import onnx_ir as ir

from graphscale.analysis.degrees import ZERO
from graphscale.checks.linting.view import is_constant_zero, number_of
from graphscale.operators import Kind, Rule, rule_of

__all__ = ["Degree", "Mismatch", "evaluate"]

# The power of the loss scale that a value is multiplied by, a half among them; None (ZERO) for what is all zeros.
Degree = float | None


@dataclasses.dataclass(frozen=True)
class Mismatch:
    """A node whose operands' degrees do not go together.

    Attributes:
        scaled: the indices of the operands at fault, of a degree other than 0.
        others: in a sum or a comparison, the indices of the operands of another degree.
        unknown: the operator has no rule.
        degree: the degree to go on with.
    """

    scaled: tuple[int, ...]
    others: tuple[int, ...] = ()
    unknown: bool = False
    degree: Degree = 0


def evaluate(node: ir.Node, degrees: Sequence[Degree]) -> list[Degree] | Mismatch:
    """Return the degree of each output of a node without subgraphs, or why there is none.

    Args:
        node: the node.
        degrees: the degree of each input, 0 for one that is left out.
    """
    rule = rule_of(node)
    ignored = () if rule is None else rule.ignored
    carrying = tuple(i for i, degree in enumerate(degrees) if degree not in (0, ZERO) and i not in ignored)
    if rule is None:
        degree = _largest(degrees, carrying)
        return Mismatch(carrying, unknown=True, degree=degree) if carrying else [0] * len(node.outputs)
    result = _apply(node, rule, degrees, carrying)
    if isinstance(result, Mismatch):
        return result
    return [result if rule.has_degree(i) else 0 for i in range(len(node.outputs))]


def _apply(node: ir.Node, rule: Rule, degrees: Sequence[Degree], carrying: tuple[int, ...]) -> Degree | Mismatch:
    if rule.kind in (Kind.SHAPE, Kind.DEGREE_0):
        return 0
    if rule.kind is Kind.NONLINEAR:
        return _power(node, degrees, carrying)
    data = [i for i in rule.operands(len(degrees)) if node.inputs[i] is not None]
    stray = tuple(i for i in carrying if i not in data and i not in rule.addends)
    if stray:
        return Mismatch(stray, degree=_largest(degrees, carrying))
    if rule.kind in (Kind.LINEAR, Kind.COMPARE):
        agreed = _agree(node, data, degrees)
        return 0 if rule.kind is Kind.COMPARE and not isinstance(agreed, Mismatch) else agreed
    if any(degrees[i] is ZERO for i in data):
        return ZERO
    if rule.kind is Kind.QUOTIENT and len(data) == 2:
        return (degrees[data[0]] or 0) - (degrees[data[1]] or 0)
    total = sum(degrees[i] or 0 for i in data)
    added = [i for i in rule.addends if i < len(degrees) and node.inputs[i] is not None]
    added = [i for i in added if degrees[i] not in (ZERO, total) and not is_constant_zero(node.inputs[i])]
    if not added:
        return total
    if total == 0:
        return Mismatch(tuple(added), tuple(data), degree=_largest(degrees, added))
    return Mismatch(tuple(i for i in data if degrees[i] not in (0, ZERO)), tuple(added), degree=total)


def _agree(node: ir.Node, data: Sequence[int], degrees: Sequence[Degree]) -> Degree | Mismatch:
    present = {degrees[i] for i in data} - {ZERO}
    if len(present) > 1:
        data = [i for i in data if not (degrees[i] == 0 and is_constant_zero(node.inputs[i]))]
        present = {degrees[i] for i in data} - {ZERO}
    if not present:
        return ZERO if data else 0
    if len(present) == 1:
        return present.pop()
    scaled = tuple(i for i in data if degrees[i] not in (0, ZERO))
    others = tuple(i for i in data if degrees[i] == 0)
    return Mismatch(scaled, others, degree=_largest(degrees, scaled))


def _power(node: ir.Node, degrees: Sequence[Degree], carrying: tuple[int, ...]) -> Degree | Mismatch:
    """The operators that raise to a power; all others that are not homogeneous take no scaled operand."""
    if not carrying:
        return 0
    first = degrees[0] or 0
    if carrying == (0,) and node.domain in ("", "ai.onnx"):
        if node.op_type == "Pow":
            exponent = number_of(node.inputs[1])
            if exponent is not None:
                return first * exponent
        if node.op_type in _POWERS:
            return first * _POWERS[node.op_type]
    if node.op_type in ("SequenceConstruct", "SequenceInsert"):
        return _agree(node, [i for i, v in enumerate(node.inputs) if v is not None and i != _position(node)], degrees)
    return Mismatch(carrying, degree=_largest(degrees, carrying))


_POWERS = {"Sqrt": 0.5, "Reciprocal": -1.0, "ReduceL2": 1.0, "ReduceSumSquare": 2.0}


def _position(node: ir.Node) -> int | None:
    return 2 if node.op_type == "SequenceInsert" else None


def _largest(degrees: Sequence[Degree], indices: Sequence[int]) -> Degree:
    return max((degrees[i] or 0 for i in indices), key=abs, default=0)
