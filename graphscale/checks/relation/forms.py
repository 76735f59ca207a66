"""Normal forms: several spellings of operations that give equal values have one term.

Each form is a row: a function for one operator, that returns the term of another spelling or None. Those that are not
`exact` join spellings of other layouts, and those whose results may differ in the last bits.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir

from graphscale.checks.relation.terms import Operation, Shape, Terms
from graphscale.graph.types import holds_all
from graphscale.operators import OPERATORS, Operator, Trait

__all__ = ["Call", "build", "form"]


@dataclasses.dataclass(frozen=True)
class Call:
    """An operator called on terms.

    Attributes:
        terms: the table.
        domain: its domain; "" for ONNX's.
        op_type: its name.
        attributes: its attributes, without graphs.
        operands: the terms of its inputs, None for a missing one.
        output: the index of the output.
        dtype: the type of the result.
        shape: the shape of the result.
        is_final: True for the output of a graph, which has the original's declared shape.
        rounds: True to use the forms that are not exact, too.
    """

    terms: Terms
    domain: str
    op_type: str
    attributes: Mapping[str, Hashable]
    operands: Sequence[int | None]
    output: int = 0
    dtype: ir.DataType | None = None
    shape: Shape = None
    is_final: bool = False
    rounds: bool = False

    def to(self, op_type: str, *operands: int | None, shape: Shape = None, **attributes: Hashable) -> int:
        """Return the term of another operator with a result of the same type."""
        call = dataclasses.replace(
            self,
            domain="",
            op_type=op_type,
            attributes=attributes,
            operands=operands,
            output=0,
            shape=shape,
            is_final=False,
        )
        return build(call)

    def keeps(self, index: int) -> bool:
        """Return whether the result has the shape of an operand, whatever the others."""
        terms = self.terms
        others = [t for i, t in enumerate(self.operands) if i != index and t is not None]
        own = terms.shapes[self.operands[index] or 0]
        if all(map(terms.is_scalar, others)):
            return True
        return (own is not None and own == self.shape) or (own is None and self.is_final)


Form = Callable[[Call], int | None]
_FORMS: dict[str | Trait, list[tuple[Form, bool]]] = {}


def form(*op_types: str | Trait, exact: bool = True) -> Callable[[Form], Form]:
    """Add a normal form of some operators, or of all with a trait; not `exact`: of the second comparison alone."""

    def add(function: Form) -> Form:
        for op_type in op_types:
            _FORMS.setdefault(op_type, []).append((function, exact))
        return function

    return add


def build(call: Call) -> int:
    """Return the term of an operator on terms, in its normal form."""
    operands = list(call.operands)
    while operands and operands[-1] is None:
        operands.pop()
    call = dataclasses.replace(call, operands=operands)
    row = OPERATORS.get((call.domain, call.op_type))
    # A damaged node, with operands or axes that its operator does not have, is in no normal form.
    with contextlib.suppress(IndexError, KeyError, TypeError, ValueError, ZeroDivisionError):
        if (term := _rewrite(call, row)) is not None:
            return term
    if row is not None and Trait.COMMUTATIVE in row.traits:
        operands = sorted(operands, key=lambda term: -1 if term is None else term)
    attributes = tuple(sorted(call.attributes.items()))
    key = Operation(call.domain, call.op_type, attributes, tuple(operands), call.output)
    return call.terms.add(key, call.dtype, call.shape)


def _rewrite(call: Call, row: Operator | None) -> int | None:
    """Return the term of the first normal form that fits."""
    forms: list[tuple[Form, bool]] = [] if call.domain else [*_FORMS.get(call.op_type, ())]
    if row is not None and not call.domain and Trait.ELEMENTWISE in row.traits and Trait.RANDOM not in row.traits:
        forms += _FORMS.get(Trait.ELEMENTWISE, ())
    terms = (rewrite(call) for rewrite, exact in forms if call.rounds or exact)
    return next((term for term in terms if term is not None), None)


# --- copies and casts -------------------------------------------------------------------------------------------------


@form("Identity", "Sum", "Max", "Min", "Mean", "Concat")
def _copy(call: Call) -> int | None:
    """Replace operators of one operand by the operand."""
    return call.operands[0] if len(call.operands) == 1 else None


@form("Cast", "CastLike")
def _cast(call: Call) -> int | None:
    """Drop casts to the same type, and those through a type that holds all numbers; cast constants."""
    terms, term, dtype = call.terms, call.operands[0], call.dtype
    if term is None or dtype is None:
        return None
    if terms.dtypes[term] is dtype:
        return term
    inner = terms.operation(term, "Cast")
    if inner is not None and (source := inner.operands[0]) is not None:
        if holds_all(terms.dtypes[term], terms.dtypes[source]):
            return call.to("Cast", source, shape=call.shape, to=int(dtype))
    array = terms.array(term)
    if array is not None and ((array == 0) | (array == 1)).all() and dtype is not ir.DataType.STRING:
        return terms.array_term(array.astype(dtype.numpy()))
    return None if call.op_type == "Cast" else call.to("Cast", term, shape=call.shape, to=int(dtype))


# --- flags ------------------------------------------------------------------------------------------------------------


@form("Where")
def _where(call: Call) -> int | None:
    """Decide a selection by a known flag, or between equal values; exchange the values of a negated flag."""
    terms, (condition, new, old) = call.terms, call.operands
    if condition in (terms.true, terms.false):
        index = 1 if condition == terms.true else 2
        return call.operands[index] if call.keeps(index) else None
    if new == old and call.keeps(1):
        return new
    flag = _operand_of(call, condition, "Not")
    if flag is None:
        return None
    return call.to("Where", flag, old, new, shape=call.shape)


@form("Not")
def _not(call: Call) -> int | None:
    terms, term = call.terms, call.operands[0]
    if term in (terms.true, terms.false):
        return terms.false if term == terms.true else terms.true
    inner = terms.operation(term, "Not")
    return None if inner is None else inner.operands[0]


@form("And", "Or")
def _logic(call: Call) -> int | None:
    """Decide a conjunction or a disjunction by a known flag, or by a flag and its opposite."""
    terms = call.terms
    decides, neutral = (terms.false, terms.true) if call.op_type == "And" else (terms.true, terms.false)
    one, other = call.operands
    if decides in (one, other):
        return decides
    if neutral in (one, other):
        return other if one == neutral else one
    negated = [inner.operands[0] for t in (one, other) if (inner := terms.operation(t, "Not")) is not None]
    return decides if one in negated or other in negated else None


# --- products with one ------------------------------------------------------------------------------------------------


@form("Mul", "Div", "Pow")
@form("Add", "Sub", exact=False)
def _neutral(call: Call) -> int | None:
    """Drop a factor, divisor or exponent of one, or a term of zero: that only turns -0.0 into 0.0."""
    number = int(call.op_type not in ("Add", "Sub"))
    for index in (0, 1) if call.op_type in ("Add", "Mul") else (0,):
        if call.terms.holds(call.operands[1 - index], number) and call.keeps(index):
            return call.operands[index]
    return None


@form("Div")
def _inverse_of(call: Call) -> int | None:
    """Write `1 / y` as a reciprocal."""
    one, other = call.operands
    is_inverse = call.terms.holds(one, 1) and call.keeps(1)
    return call.to("Reciprocal", other, shape=call.shape) if is_inverse else None


@form("Reciprocal", "Sqrt")
def _inverse(call: Call) -> int | None:
    return call.operands[0] if call.terms.holds(call.operands[0], 1) else None


@form("Mul", exact=False)
def _mul_by_inverse(call: Call) -> int | None:
    """Write `x * (1/y)` as `x / y`."""
    for one, other in (call.operands, reversed(call.operands)):
        divisor = _operand_of(call, other, "Reciprocal")
        if divisor is not None:
            return call.to("Div", one, divisor, shape=call.shape)
    return None


def _operand_of(call: Call, term: int | None, op_type: str) -> int | None:
    """Return the operand of an elementwise operator that gives a term, or gives it in another shape."""
    terms = call.terms
    view = terms.operation(term, "View")
    inner = terms.operation(term if view is None else view.operands[0], op_type)
    if term is None or inner is None or view is None:
        return None if inner is None else inner.operands[0]
    return dataclasses.replace(call, dtype=terms.dtypes[term]).to("View", inner.operands[0], shape=terms.shapes[term])


@form("Div", exact=False)
def _div_by_constant(call: Call) -> int | None:
    """Write a quotient by a constant as a product."""
    one, other = call.operands
    factor = None if call.terms.holds(one, 1) else _normal(call.terms, lambda number: 1 / number, other)
    return None if factor is None else call.to("Mul", one, factor, shape=call.shape)


@form("Mul", exact=False)
def _mul_twice(call: Call) -> int | None:
    """Write a product with two scalar constants as one with their product."""
    terms = call.terms
    for term, outer in (call.operands, reversed(call.operands)):
        inner = terms.operation(term, "Mul")
        for kept, factor in () if inner is None else (inner.operands, inner.operands[::-1]):
            numbers = [t for t in (factor, outer) if t is not None and terms.is_scalar(t)]
            if len(numbers) == 2 and (product := _normal(terms, np.multiply, *numbers)) is not None:
                return call.to("Mul", kept, product, shape=call.shape)
    return None


def _normal(terms: Terms, compute: Callable[..., Any], *operands: int | None) -> int | None:
    """Return the constant that follows from others; None for other terms, and where digits are lost."""
    arrays = [array for term in operands if (array := terms.array(term)) is not None and array.dtype.kind in "fV"]
    if len(arrays) < len(operands):
        return None
    limits = ml_dtypes.finfo(arrays[0].dtype)  # type: ignore[no-untyped-call]
    with np.errstate(all="ignore"):
        result = np.asarray(compute(*arrays)).astype(arrays[0].dtype)
        sizes = np.abs(result.astype(np.float64))
    is_normal = (sizes >= float(limits.tiny)) & (sizes <= float(limits.max))
    return terms.array_term(result) if is_normal.all() else None


# --- matrix products --------------------------------------------------------------------------------------------------


@form("Gemm", exact=False)
def _gemm(call: Call) -> int | None:
    """Write Gemm as MatMul, Mul and Add."""
    terms, held = call.terms, call.attributes
    one, other, *rest = call.operands
    factors = []
    for term, name in ((one, "transA"), (other, "transB")):
        shape = None if term is None else terms.shapes[term]
        factors.append(
            call.to("Transpose", term, shape=None if shape is None else shape[::-1], perm=(1, 0))
            if held.get(name)
            else term
        )
    product = call.to("MatMul", *factors, shape=call.shape)
    product = _times(call, product, held.get("alpha", 1.0))
    beta: Any = held.get("beta", 1.0)
    if not rest or rest[0] is None or beta == 0 or terms.holds(rest[0], 0):
        return product
    return call.to("Add", product, _times(call, rest[0], beta), shape=call.shape)


def _times(call: Call, term: int, number: Any) -> int:
    if number == 1:
        return term
    factor = call.terms.array_term(np.array(number, (call.dtype or ir.DataType.FLOAT).numpy()))
    return call.to("Mul", term, factor, shape=call.terms.shapes[term])


@form("Sum")
def _sum(call: Call) -> int | None:
    return call.to("Add", *call.operands, shape=call.shape) if len(call.operands) == 2 else None
