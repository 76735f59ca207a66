"""ai.onnx: arithmetic element by element, comparisons, logic."""

from __future__ import annotations

import math

import onnx_ir as ir

from graphscale.operators.casting import CLEAR, INFER, deny
from graphscale.operators.rules import FIRST, LINEAR, NONLINEAR, Kind, Rule
from graphscale.operators.table import attribute, constant_tensor, row
from graphscale.operators.traits import Trait

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


def _resolve_clip(node: ir.Node, rule: Rule) -> Rule:
    """Return Clip's rule: below opset 11 its bounds are attributes, of degree 0."""
    bounds = (attribute(node, "min", -math.inf), attribute(node, "max", math.inf))
    return rule if all(bound == 0 or abs(bound) >= _FLOAT_MAX for bound in bounds) else NONLINEAR


# --- sums, products, quotients ----------------------------------------------------------------------------------------
_NUMBERS = _BINARY | Trait.READS_FIRST | Trait.REMOVABLE_BY_FACTOR
row("Add", LINEAR, _NUMBERS | Trait.NONFINITE_OF_ALL | Trait.COMMUTATIVE, INFER)
row("Sub", LINEAR, _NUMBERS | Trait.NONFINITE_OF_ALL, INFER)
row("Mul", Rule(Kind.PRODUCT), _NUMBERS | Trait.NONFINITE_OF_ALL | Trait.COMMUTATIVE, INFER)
row("Div", Rule(Kind.QUOTIENT, data=(0, 1)), _NUMBERS | Trait.NONFINITE_OF_FIRST, INFER)
row("Sum Mean", LINEAR, _BINARY | Trait.NONFINITE_OF_ALL | Trait.COMMUTATIVE | Trait.REMOVABLE, INFER)
row("Neg", FIRST, _UNARY | Trait.SIGN | Trait.NONFINITE_OF_FIRST | Trait.READS_FIRST, CLEAR)
row("Abs", FIRST, _UNARY | Trait.SIGN | Trait.MOVE | Trait.NONFINITE_OF_FIRST | Trait.READS_FIRST, CLEAR)
row("Sign", _DEGREE_0, _UNARY | Trait.LOSES_INFINITY, CLEAR)

# --- selection --------------------------------------------------------------------------------------------------------
_EXTREME = _BINARY | Trait.COMMUTATIVE | Trait.BOUND | Trait.READS_FIRST | Trait.REMOVABLE
row("Max", LINEAR, _EXTREME | Trait.LOSES_NEGATIVE, CLEAR)
row("Min", LINEAR, _EXTREME | Trait.LOSES_INFINITY, CLEAR)
_CLIP = Trait.ELEMENTWISE | Trait.BOUND | Trait.MOVE | Trait.LOSES_INFINITY | Trait.REMOVABLE
# clip(S*x, S*low, S*high) = S*clip(x, low, high): the bounds are operands like x.
row("Clip", Rule(Kind.LINEAR, data=(0, 1, 2)), _CLIP, CLEAR, resolve=_resolve_clip)
_WHERE = _BINARY | Trait.MOVE | Trait.READS_FIRST | Trait.REMOVABLE_BY_CONDITION
row("Where", Rule(Kind.LINEAR, data=(1, 2)), _WHERE, CLEAR)

# --- comparisons and logic --------------------------------------------------------------------------------------------
_COMPARE, _FLAG = Rule(Kind.COMPARE), ir.DataType.BOOL
row("Equal", _COMPARE, _BINARY | Trait.COMMUTATIVE, CLEAR, dtype=_FLAG)
row("Greater GreaterOrEqual Less LessOrEqual", _COMPARE, _BINARY, CLEAR, dtype=_FLAG)
row("And Or Xor", _DEGREE_0, _BINARY | Trait.COMMUTATIVE, dtype=_FLAG)
row("Not", _DEGREE_0, _UNARY, dtype=_FLAG)
row("IsNaN IsInf", _DEGREE_0, _UNARY | Trait.FINITENESS_TEST, dtype=_FLAG)
row("BitwiseAnd BitwiseOr BitwiseXor", _DEGREE_0, _BINARY | Trait.COMMUTATIVE)
row("BitShift", _DEGREE_0, _BINARY)
row("BitwiseNot", _DEGREE_0, _UNARY)

# --- functions that are not homogeneous -------------------------------------------------------------------------------
row("Exp", NONLINEAR, _UNARY | Trait.LOSES_NEGATIVE, deny("its result overflows float16 from 11.1 on"))
row("Log", NONLINEAR, _UNARY, deny("what float16 rounds to zero has no logarithm"))
row("Pow", NONLINEAR, _BINARY | Trait.READS_FIRST, _POWER, resolve=_resolve_pow)
row("Sqrt", Rule(Kind.POWER, data=(0,), power=0.5), _UNARY | Trait.READS_FIRST, INFER)
row("Reciprocal", Rule(Kind.POWER, data=(0,), power=-1), _UNARY | Trait.LOSES_INFINITY, INFER)
row("Sin Cos", NONLINEAR, _UNARY, INFER)
row("Floor Ceil Round", NONLINEAR, _UNARY, _FEW_EXPONENTS)
row("Mod", NONLINEAR, Trait.ELEMENTWISE, _FEW_EXPONENTS)
row("Atan", NONLINEAR, _UNARY | Trait.LOSES_INFINITY, _FEW_EXPONENTS)
row("Tan Asin Acos Sinh Cosh Asinh Acosh Atanh", NONLINEAR, _UNARY, _FEW_EXPONENTS)
