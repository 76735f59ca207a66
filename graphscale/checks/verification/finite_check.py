"""The values that a finite check provably tests.

From the flag `all_finite` back: `IsAllFinite(x)` notices every element of x that is not finite; `Not(IsNaN(t))` notices
a NaN in t. The product of a non-finite element with 0 is NaN, and so is any sum with this product. Sums, products,
casts and moves pass non-finite numbers on (infinity minus infinity is NaN, infinity times 0 too). So numbers that are
noticed in their result are noticed in their operands, if no other operand is empty; the same holds for products that
sum over an axis. Other operators give no proof: ReduceMax may lose a NaN, and Clip turns an infinity into a finite
number.
"""

from __future__ import annotations

import operator
from collections.abc import Container, Iterator, Sequence

import numpy as np
import onnx_ir as ir

from graphscale.graph.values import constant_number, constant_tensor, inputs_of, is_known_zero, own_dtype
from graphscale.graph.walks import reach
from graphscale.operators import MICROSOFT, Kind, Trait, attribute, has_trait, rule_of

__all__ = ["find_other_conditions", "find_tested_values"]

_NAN, _INFINITE = 1, 2
_BOTH = _NAN | _INFINITE
# This proof is a second opinion: it does not read the survivals of the operator table. The operators of ONNX where a
# non-finite element of any operand makes one of the result so, and those where one of the first operand does.
_OF_ALL = {"Add", "Concat", "Mean", "Mul", "Sub", "Sum"}
_OF_FIRST = {"Abs", "Cast", "CastLike", "DepthToSpace", "Div", "Expand", "Flatten", "Identity", "Neg", "ReduceL1"}
_OF_FIRST |= {"ReduceL2", "ReduceMean", "ReduceSum", "ReduceSumSquare", "Reshape", "ReverseSequence", "SpaceToDepth"}
# The same for flags, and their numbers 0 and 1: all are true where none is false, or some is where one is.
_MOVES = {"Cast", "Expand", "Flatten", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"}
_ALL_GOOD, _LEAST = {"And", "Concat", "Min", "Mul"}, {"ReduceMin", "ReduceProd"}
_ANY_BAD, _MOST = {"Add", "Concat", "Max", "Or", "Sum"}, {"ReduceMax", "ReduceMean", "ReduceSum"}
_COUNTS = {ir.DataType.INT32, ir.DataType.INT64, ir.DataType.FLOAT, ir.DataType.DOUBLE}
_ON_COUNTS = _MOVES | _ALL_GOOD | _LEAST | _ANY_BAD | _MOST
_COMPARES = {
    "Equal": operator.eq,
    "Greater": operator.gt,
    "GreaterOrEqual": operator.ge,
    "Less": operator.lt,
    "LessOrEqual": operator.le,
}
_OF_FIRST |= {"Squeeze", "Tile", "Transpose", "Unsqueeze", "ExpandDims"}


def find_tested_values(all_finite: ir.Value) -> set[ir.Value]:
    """Find the values whose NaN and infinite elements provably make a flag false."""
    # This is no walk of graph.walks: a value is visited again when more of its numbers are found to be noticed.
    seen: dict[ir.Value, int] = {}
    pending = list(_leaves(all_finite, good=True))
    while pending:
        value, noticed = pending.pop()
        known = seen.get(value, 0)
        if noticed | known == known:
            continue
        seen[value] = noticed | known
        pending.extend(_operands(value, seen[value]))
    return {value for value, noticed in seen.items() if noticed == _BOTH}


def _leaves(flag: ir.Value, good: bool) -> list[tuple[ir.Value, int]]:
    """Return the values that a flag tests, with the noticed kinds. `good` flags are false for noticed numbers."""
    found, pending, seen = list[tuple[ir.Value, int]](), [(flag, good)], set[tuple[ir.Value, bool]]()
    while pending:
        each = value, good = pending.pop()
        node = value.producer()
        if node is None or each in seen or not _counts_flags(value):
            continue
        seen.add(each)
        operands = [value for value in node.inputs if value is not None]
        if (node.domain, node.op_type) == (MICROSOFT, "IsAllFinite") and good:
            found += [(value, _BOTH) for value in operands]
        elif node.domain not in ("", "ai.onnx"):
            continue
        elif node.op_type == "Not":
            pending.append((operands[0], not good))
        elif node.op_type in _MOVES and not _repeats_nothing(node):
            pending.append((operands[0], good))
        elif node.op_type in (_ALL_GOOD if good else _ANY_BAD):
            pending += [(operand, good) for operand in operands]
        elif node.op_type in (_LEAST if good else _MOST):
            pending.append((operands[0], good))
        elif node.op_type in _COMPARES:
            number, bound = _compared(node)
            holds = _COMPARES[node.op_type]
            if bound is not None and np.isfinite(bound):
                # A number that is 0 where a flag is false, or a count of true ones, which is at least 1 then.
                pending += [(number, True)] if holds(0, bound) != good else []
                pending += [(number, False)] if {holds(n, bound) for n in (1, 2, np.inf)} == {not good} else []
            elif bound == np.inf and (magnitude := number.producer()) is not None and magnitude.op_type == "Abs":
                if good and node.op_type == "Less" and number is operands[0]:
                    found.append((number, _BOTH))
                elif not good and node.op_type == "Equal":
                    found.append((number, _INFINITE))
            elif node.op_type == "Equal" and good and operands[0] is operands[1]:
                found.append((operands[0], _NAN))
        elif node.op_type == "IsNaN" and not good:
            found.append((operands[0], _NAN))
        elif node.op_type == "IsInf" and not good and not node.attributes:
            found.append((operands[0], _INFINITE))
    return found


def find_other_conditions(flag: ir.Value, gradients: Container[ir.Value]) -> Iterator[ir.Value]:
    """Yield the values above a flag that are no tests of gradients for finiteness, and may refuse finite ones."""

    def above(value: ir.Value) -> Sequence[ir.Value]:
        node = value.producer()
        if node is None or node.domain or is_test(node):
            return ()
        return inputs_of(node) if node.op_type in (*_ON_COUNTS, *_COMPARES, "Not") else ()

    def is_test(node: ir.Node) -> bool:
        operands = inputs_of(node)
        if node.op_type in _COMPARES:
            return operands[0] is operands[1] or np.inf in map(constant_number, operands)
        return node.op_type in ("IsNaN", "IsInf", "IsAllFinite")

    for value in reach([flag], above):
        node = value.producer()
        is_constant = constant_tensor(value) is not None
        if not is_constant and (node is None or not (above(value) or is_test(node))):
            yield value
        elif node is not None and is_test(node):
            yield from (v for v in inputs_of(node) if v not in gradients and constant_tensor(v) is None)


def _counts_flags(value: ir.Value) -> bool:
    """Return whether a value is made of flags, as numbers that are never negative and do not overflow to zero."""

    def above(each: ir.Value) -> Sequence[ir.Value]:
        node = each.producer()
        if node is None or node.domain or is_flag(each) or node.op_type not in _ON_COUNTS:
            return ()
        return inputs_of(node) if node.op_type in _ALL_GOOD | _ANY_BAD else inputs_of(node)[:1]

    def is_flag(each: ir.Value) -> bool:
        return own_dtype(each) is ir.DataType.BOOL or (-1 if (number := constant_number(each)) is None else number) >= 0

    return all(is_flag(each) or (own_dtype(each) in _COUNTS and above(each)) for each in reach([value], above))


def _compared(node: ir.Node) -> tuple[ir.Value, float | None]:
    """Return the operand that a comparison compares with a number, and the number; a number first is none."""
    value, other = inputs_of(node)
    if node.op_type == "Equal" and constant_number(value) is not None:
        value, other = other, value
    return value, constant_number(other)


def _operands(value: ir.Value, noticed: int) -> list[tuple[ir.Value, int]]:
    node = value.producer()
    rule = None if node is None else rule_of(node)
    # A cast to a type with saturation, or without infinity, is not linear.
    if node is None or rule is None or (rule.kind is not Kind.LINEAR and has_trait(node, Trait.CAST)):
        return []
    operands = [operand for operand in node.inputs if operand is not None]
    if any(_is_empty(operand) for operand in operands) or _repeats_nothing(node):
        return []
    if node.op_type == "Sub" and operands[0] is operands[1] and noticed & _NAN:
        return [(operands[0], _BOTH)]
    sums = _sums_every_product(node)
    if (node.op_type == "Mul" or sums) and noticed & _NAN:
        zero = [is_known_zero(operand) for operand in operands]
        if any(zero):
            return [(operand, _BOTH) for operand, other in zip(operands, reversed(zero), strict=True) if other]
    if noticed != _BOTH and not has_trait(node, Trait.EXACT):
        # An infinite operand may give NaN or infinity: only the certainty for NaN is passed on.
        noticed &= _NAN
    if noticed and (node.op_type in _OF_ALL or sums):
        return [(operand, noticed) for operand in operands]
    return [(operands[0], noticed)] if noticed and node.op_type in _OF_FIRST else []


def _is_empty(value: ir.Value) -> bool:
    """Return whether a value certainly has no elements."""
    tensor = constant_tensor(value)
    shape = value.shape if tensor is None else tensor.shape
    return shape is not None and 0 in list(shape)


def _repeats_nothing(node: ir.Node) -> bool:
    """Return whether a node may repeat its operand zero times: counts, also joined by Concat, may be 0."""
    counts = reach([node.inputs[1]], _joined) if node.op_type in ("Tile", "Expand") else ()
    tensors = [constant_tensor(value) for value in counts if not _joined(value)]
    return any(tensor is None or not np.all(tensor.numpy()) for tensor in tensors)


def _joined(value: ir.Value | None) -> Sequence[ir.Value | None]:
    """Return the operands of the Concat above a value; none for other values."""
    node = None if value is None or constant_tensor(value) is not None else value.producer()
    return node.inputs if node is not None and (node.domain, node.op_type) == ("", "Concat") else ()


def _sums_every_product(node: ir.Node) -> bool:
    """Return whether each element of both operands is part of a sum in the result."""
    if (node.domain, node.op_type) == ("", "Einsum"):
        terms = attribute(node, "equation", "").partition("->")[0].replace(" ", "").split(",")
        return len(terms) == 2 and all(len(set(term)) == len(term) and term.isalpha() for term in terms)
    return (node.domain, node.op_type) == ("", "MatMul")
