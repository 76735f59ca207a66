"""The survival of infinities in a product, by the signs of its other factors."""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

from graphscale.flow.degree import is_small_zero
from graphscale.graph.values import constant_number
from graphscale.operators import LOST, Fate, Kind, Survival, Trait, has_trait, rule_of, survival_of
from graphscale.operators.columns import KEPT, NEGATED, UNDEFINED

__all__ = ["survival_at"]


def survival_at(node: ir.Node, index: int, is_positive: Callable[[ir.Value], bool] = lambda _: False) -> Survival:
    """Return the survival in an operand of a node, by the signs of the factors beside it."""
    survival, rule = survival_of(node, index), rule_of(node)
    if rule is None or rule.kind not in (Kind.PRODUCT, Kind.QUOTIENT) or survival == LOST:
        return survival
    data = rule.operands(len(node.inputs))
    if index not in data or (rule.kind is Kind.QUOTIENT and index != data[0]):
        return survival
    others = [value for i in data if i != index and (value := node.inputs[i]) is not None]
    if rule.kind is Kind.PRODUCT and any(map(is_small_zero, others)):
        return UNDEFINED.with_fate(survival.plus & Fate.GONE)  # infinity times zero
    signs = [_sign(value, is_positive) for value in others] if has_trait(node, Trait.ELEMENTWISE) else [0]
    return survival if 0 in signs else NEGATED if signs.count(-1) % 2 else KEPT


def _sign(value: ir.Value, is_positive: Callable[[ir.Value], bool]) -> int:
    """Return the sign of a factor, 0 if unknown."""
    number = constant_number(value)
    if number:
        return 1 if number > 0 else -1
    return 1 if number is None and is_positive(value) else 0
