"""ai.onnx: arithmetic element by element, comparisons, logic."""

from __future__ import annotations

import math

import onnx_ir as ir

from graphscale.operators.columns import (
    BOUNDED,
    BOUNDED_BELOW,
    CLEAR,
    FIRST,
    GREATEST,
    INFER,
    KEPT,
    KINDS,
    LEAST,
    LINEAR,
    LOST,
    MULTIPLIED,
    NEGATED,
    NONLINEAR,
    PICKED,
    SIZE,
    SUBTRACTED,
    SUMMED,
    TESTED,
    UNDEFINED,
    UNREAD,
    Fate,
    Kind,
    Rule,
    Survival,
    Trait,
    deny,
)
from graphscale.operators.table import Survivals, attribute, constant_tensor, row

_UNARY = Trait.ELEMENTWISE | Trait.TOTAL
_BINARY = Trait.ELEMENTWISE | Trait.TOTAL_BY_SHAPES
_DEGREE_0 = Rule(Kind.DEGREE_0)
_FLOAT_MAX = 3.4028234e38
_FEW_EXPONENTS = deny("its exponent is all that float16 has")
_POWER = deny("powers leave the range of float16")


def _resolve_pow(node: ir.Node, rule: Rule) -> Rule:
    """Return the rule of Pow: a power where the exponent is a constant number."""
    exponent = constant_tensor(node.inputs[1])
    is_number = exponent is not None and exponent.size == 1 and exponent.dtype is not ir.DataType.STRING
    return Rule(Kind.POWER, data=(0,), power=float(exponent.numpy().flat[0])) if exponent and is_number else rule


def _survive_difference(node: ir.Node) -> Survivals:
    """Return the survival in Sub: x - x is NaN where x is not finite."""
    return UNDEFINED if node.inputs[0] is node.inputs[1] else {0: SUMMED, 1: SUBTRACTED}


def _survive_product(node: ir.Node) -> Survivals:
    """Return the survival in Mul: a square has no sign."""
    return SIZE if node.inputs[0] is node.inputs[1] else MULTIPLIED


def _survive_choice(node: ir.Node) -> Survivals:
    """Return the survival in Where: a constant condition takes the same operand always."""
    condition = constant_tensor(node.inputs[0])
    if condition is None or condition.size != 1:
        return PICKED
    taken = 1 if condition.numpy().flat[0] else 2
    return {taken: KEPT, 3 - taken: UNREAD}


def _survive_power(node: ir.Node) -> Survivals:
    """Return the survival in Pow: NaN ** 0 is 1, and infinity to a negative power is 0."""
    exponent = constant_tensor(node.inputs[1])
    is_positive = exponent is not None and exponent.size == 1 and exponent.numpy().flat[0] > 0
    if not is_positive:
        return LOST
    is_even = exponent is not None and exponent.numpy().flat[0] % 2 == 0
    return {0: SIZE if is_even else Survival(Fate.PLUS, KINDS, Fate.NAN)}


def _survive_infinity_test(node: ir.Node) -> Survivals:
    """Return the survival in IsInf, whose attributes name the signs that count."""
    signs = (attribute(node, "detect_positive", 1), attribute(node, "detect_negative", 1))
    plus, minus = (Fate.TOLD if counts else Fate.GONE for counts in signs)
    return Survival(plus, minus, Fate.GONE)


def _resolve_clip(node: ir.Node, rule: Rule) -> Rule:
    """Return Clip's rule: below opset 11 its bounds are attributes, of degree 0."""
    bounds = (attribute(node, "min", -math.inf), attribute(node, "max", math.inf))
    return rule if all(bound == 0 or abs(bound) >= _FLOAT_MAX for bound in bounds) else NONLINEAR


# --- sums, products, quotients ----------------------------------------------------------------------------------------
_NUMBERS = _BINARY | Trait.READS_FIRST | Trait.REMOVABLE_BY_FACTOR
row("Add", LINEAR, _NUMBERS | Trait.COMMUTATIVE, INFER, survival=SUMMED)
row("Sub", LINEAR, _NUMBERS, INFER, survival=_survive_difference)
row("Mul", Rule(Kind.PRODUCT), _NUMBERS | Trait.COMMUTATIVE, INFER, survival=_survive_product)
row("Div", Rule(Kind.QUOTIENT, data=(0, 1)), _NUMBERS, INFER, survival={0: MULTIPLIED, 1: BOUNDED})
row("Sum Mean", LINEAR, _BINARY | Trait.COMMUTATIVE | Trait.REMOVABLE, INFER, survival=SUMMED)
row("Neg", FIRST, _UNARY | Trait.SIGN | Trait.READS_FIRST, CLEAR, survival=NEGATED)
row("Abs", FIRST, _UNARY | Trait.SIGN | Trait.MOVE | Trait.READS_FIRST, CLEAR, survival=SIZE)
row("Sign", _DEGREE_0, _UNARY, CLEAR)

# --- selection --------------------------------------------------------------------------------------------------------
_EXTREME = _BINARY | Trait.COMMUTATIVE | Trait.BOUND | Trait.READS_FIRST | Trait.REMOVABLE
row("Max", LINEAR, _EXTREME, CLEAR, survival=GREATEST)
row("Min", LINEAR, _EXTREME, CLEAR, survival=LEAST)
_CLIP = Trait.ELEMENTWISE | Trait.BOUND | Trait.MOVE | Trait.REMOVABLE
# Without a bound, ONNX Runtime clips infinity to the largest number of the type.
_CLIPPED = {0: BOUNDED}
# clip(S*x, S*low, S*high) = S*clip(x, low, high): the bounds are operands like x.
row("Clip", Rule(Kind.LINEAR, data=(0, 1, 2)), _CLIP, CLEAR, resolve=_resolve_clip, survival=_CLIPPED)
_WHERE = _BINARY | Trait.MOVE | Trait.READS_FIRST | Trait.REMOVABLE_BY_CONDITION
row("Where", Rule(Kind.LINEAR, data=(1, 2)), _WHERE, CLEAR, survival=_survive_choice)

# --- comparisons and logic --------------------------------------------------------------------------------------------
_COMPARE, _FLAG = Rule(Kind.COMPARE), ir.DataType.BOOL
row("Equal", _COMPARE, _BINARY | Trait.COMMUTATIVE, CLEAR, dtype=_FLAG, survival=TESTED)
row("Greater GreaterOrEqual Less LessOrEqual", _COMPARE, _BINARY, CLEAR, dtype=_FLAG, survival=TESTED)
row("And Or Xor", _DEGREE_0, _BINARY | Trait.COMMUTATIVE, dtype=_FLAG)
row("Not", _DEGREE_0, _UNARY, dtype=_FLAG)
_TEST = _UNARY | Trait.FINITENESS_TEST
row("IsNaN", _DEGREE_0, _TEST, dtype=_FLAG, survival=Survival(Fate.GONE, Fate.GONE, Fate.TOLD))
row("IsInf", _DEGREE_0, _TEST, dtype=_FLAG, survival=_survive_infinity_test)
row("BitwiseAnd BitwiseOr BitwiseXor", _DEGREE_0, _BINARY | Trait.COMMUTATIVE)
row("BitShift", _DEGREE_0, _BINARY)
row("BitwiseNot", _DEGREE_0, _UNARY)

# --- functions that are not homogeneous -------------------------------------------------------------------------------
row("Exp", NONLINEAR, _UNARY, deny("its result overflows float16 from 11.1 on"), survival=BOUNDED_BELOW)
_POSITIVE = Survival(Fate.PLUS | Fate.NAN, Fate.NAN, Fate.NAN)
row("Log", NONLINEAR, _UNARY, deny("what float16 rounds to zero has no logarithm"), survival=_POSITIVE)
row("Pow", NONLINEAR, _BINARY | Trait.READS_FIRST, _POWER, resolve=_resolve_pow, survival=_survive_power)
row("Sqrt", Rule(Kind.POWER, data=(0,), power=0.5), _UNARY | Trait.READS_FIRST, INFER, survival=_POSITIVE)
row("Reciprocal", Rule(Kind.POWER, data=(0,), power=-1), _UNARY, INFER, survival=BOUNDED)
row("Sin Cos", NONLINEAR, _UNARY, INFER, survival=UNDEFINED)
row("Floor Ceil Round Sinh Asinh", NONLINEAR, _UNARY, _FEW_EXPONENTS, survival=KEPT)
row("Mod", NONLINEAR, Trait.ELEMENTWISE, _FEW_EXPONENTS, survival={0: UNDEFINED})
row("Atan", NONLINEAR, _UNARY, _FEW_EXPONENTS, survival=BOUNDED)
row("Tan Asin Acos Atanh", NONLINEAR, _UNARY, _FEW_EXPONENTS, survival=UNDEFINED)
row("Cosh", NONLINEAR, _UNARY, _FEW_EXPONENTS, survival=SIZE)
row("Acosh", NONLINEAR, _UNARY, _FEW_EXPONENTS, survival=_POSITIVE)
