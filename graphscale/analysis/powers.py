"""Degrees of every power through one node: squares, roots and reciprocals of a graph's own loss scale."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

import onnx_ir as ir

from graphscale.analysis.degrees import ZERO, Conflict, Degree, agree, combine
from graphscale.graph.values import constant_number, is_known_zero
from graphscale.operators import Kind, rule_of

__all__ = ["evaluate_powers", "is_zero"]

# Larger tensors are weights, and not read.
_SMALL = 4096
_POWERS = {"Sqrt": 0.5, "Reciprocal": -1.0, "ReduceL2": 1.0, "ReduceSumSquare": 2.0}

# A test for a value known to be all zeros, without reading weights.
is_zero = functools.partial(is_known_zero, largest=_SMALL)


def evaluate_powers(
    node: ir.Node, degrees: Sequence[Degree], is_zero: Callable[[ir.Value | None], bool] = is_zero
) -> Sequence[Degree] | Conflict:
    """Return the degree of each output of a node without subgraphs, by the degrees of its inputs, or their conflict.

    Every power is allowed: a square has degree 2, its root degree 1, a reciprocal degree -1. A graph written by hand
    may correctly clip scaled gradients to a scaled threshold.

    Args:
        node: the node.
        degrees: the degree of each input.
        is_zero: returns whether a value has every degree, as zeros have.
    """
    rule = rule_of(node)
    ignored = () if rule is None else rule.ignored
    operands = {i: d for i, d in enumerate(degrees) if node.inputs[i] is not None and i not in ignored}
    result: Degree | Conflict = 0
    if rule is None or rule.kind is Kind.NONLINEAR:
        result = _power(node, operands, rule is None, is_zero)
    elif rule.kind not in (Kind.SHAPE, Kind.DEGREE_0):
        result = combine(node, rule, operands, None, is_zero)
    if isinstance(result, Conflict):
        return result
    return [result if rule is not None and rule.has_degree(i) else 0 for i in range(len(node.outputs))]


def _power(
    node: ir.Node, degrees: Mapping[int, Degree], unknown: bool, is_zero: Callable[[ir.Value | None], bool]
) -> Degree | Conflict:
    """Apply the operators that raise to a power; other non-homogeneous operators accept no scaled operand."""
    carrying = tuple(i for i, degree in degrees.items() if degree not in (0, ZERO))
    if not carrying:
        return 0
    if node.domain == "" and not unknown:
        exponent = constant_number(node.inputs[1]) if node.op_type == "Pow" else _POWERS.get(node.op_type)
        if carrying == (0,) and exponent is not None:
            return (degrees[0] or 0) * exponent
        if node.op_type in ("SequenceConstruct", "SequenceInsert"):
            elements = [i for i in degrees if i != 2 or node.op_type != "SequenceInsert"]  # the third is a position
            return agree(node, elements, degrees, is_zero)
    degree = max((degrees[i] or 0 for i in carrying), key=abs)
    return Conflict(node, carrying, unknown=unknown, degree=degree)
