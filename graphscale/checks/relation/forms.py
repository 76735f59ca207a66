"""Normal forms: several spellings of operations that give equal values have one term.

Each form is a row: a function for one operator, that returns the term of another spelling or None. The rows marked as
`rounding` join spellings whose results may differ in the last bits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import ml_dtypes  # noqa: F401  (registers bfloat16 and float8 with numpy)
import numpy as np
import onnx_ir as ir

from graphscale.checks.relation.terms import Operation, Shape, Terms
from graphscale.graph.types import holds_all
from graphscale.operators import OPERATORS, Trait

__all__ = ["Call", "build"]


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
        rounds: True to use forms that round differently.
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
_FORMS: dict[str, list[tuple[Form, bool]]] = {}


def _form(*op_types: str, rounding: bool = False) -> Callable[[Form], Form]:
    def add(form: Form) -> Form:
        for op_type in op_types:
            _FORMS.setdefault(op_type, []).append((form, rounding))
        return form

    return add


def build(call: Call) -> int:
    """Return the term of an operator on terms, in its normal form."""
    operands = list(call.operands)
    while operands and operands[-1] is None:
        operands.pop()
    call = dataclasses.replace(call, operands=operands)
    for form, rounding in _FORMS.get(call.op_type, ()) if not call.domain else ():
        term = form(call) if call.rounds or not rounding else None
        if term is not None:
            return term
    row = OPERATORS.get((call.domain, call.op_type))
    if row is not None and Trait.COMMUTATIVE in row.traits:
        operands = sorted(operands, key=lambda term: -1 if term is None else term)
    attributes = tuple(sorted(call.attributes.items()))
    key = Operation(call.domain, call.op_type, attributes, tuple(operands), call.output)
    return call.terms.add(key, call.dtype, call.shape)


# --- copies and casts -------------------------------------------------------------------------------------------------


@_form("Identity", "Sum", "Max", "Min", "Mean", "Concat")
def _copy(call: Call) -> int | None:
    """Replace operators of one operand by the operand."""
    return call.operands[0] if len(call.operands) == 1 else None


@_form("Cast", "CastLike")
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


@_form("Where")
def _where(call: Call) -> int | None:
    """Decide a selection by a known flag, or between equal values."""
    terms, (condition, new, old) = call.terms, call.operands
    if condition in (terms.true, terms.false):
        index = 1 if condition == terms.true else 2
        return call.operands[index] if call.keeps(index) else None
    return new if new == old and call.keeps(1) else None


@_form("Not")
def _not(call: Call) -> int | None:
    terms, term = call.terms, call.operands[0]
    if term in (terms.true, terms.false):
        return terms.false if term == terms.true else terms.true
    inner = terms.operation(term, "Not")
    return None if inner is None else inner.operands[0]


@_form("And", "Or")
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


@_form("Mul")
def _mul(call: Call) -> int | None:
    for index in (0, 1):
        if call.terms.holds(call.operands[1 - index], 1) and call.keeps(index):
            return call.operands[index]
    return None


@_form("Div", "Pow")
def _div(call: Call) -> int | None:
    return call.operands[0] if call.terms.holds(call.operands[1], 1) and call.keeps(0) else None


@_form("Reciprocal", "Sqrt")
def _inverse(call: Call) -> int | None:
    return call.operands[0] if call.terms.holds(call.operands[0], 1) else None


@_form("Mul", rounding=True)
def _mul_by_inverse(call: Call) -> int | None:
    """Write `x * (1/y)` as `x / y`, and a product with a constant as a quotient by its exact inverse."""
    terms = call.terms
    for one, other in (call.operands, reversed(call.operands)):
        inner = terms.operation(other, "Reciprocal")
        if inner is not None:
            return call.to("Div", one, inner.operands[0], shape=call.shape)
        inner = terms.operation(other, "Div")
        if (
            inner is not None
            and terms.holds(inner.operands[0], 1)
            and len(terms.shapes[inner.operands[0] or 0] or ()) == 0
        ):
            return call.to("Div", one, inner.operands[1], shape=call.shape)
    return None


# --- shapes -----------------------------------------------------------------------------------------------------------


def _sizes(shape: Shape) -> tuple[int, ...] | None:
    return shape if shape is not None and all(isinstance(size, int) for size in shape) else None  # type: ignore[return-value]


@_form("Shape")
def _shape(call: Call) -> int | None:
    """Fold the shape of a value of known sizes."""
    sizes = _sizes(call.terms.shapes[call.operands[0] or 0])
    if sizes is None:
        return None
    start: Any = call.attributes.get("start", 0)
    end: Any = call.attributes.get("end")
    return call.terms.array_term(np.array(sizes[start:end], np.int64))


@_form("Reshape", "Squeeze", "Unsqueeze", "Flatten", "View")
def _view(call: Call) -> int | None:
    """Write each change of shape between known sizes as one `View`."""
    terms, sizes, term = call.terms, _sizes(call.shape), call.operands[0]
    if sizes is None or term is None:
        return None
    while (inner := terms.operation(term, "View")) is not None and inner.operands[0] is not None:
        term = inner.operands[0]
    if terms.shapes[term] == sizes:
        return term
    array = terms.array(term)
    if array is not None:
        return terms.array_term(array.reshape(sizes))
    key = Operation("", "View", (("shape", sizes),), (term,))
    return terms.add(key, call.dtype, sizes)


@_form("Expand")
def _expand(call: Call) -> int | None:
    return (
        call.operands[0] if call.shape is not None and call.terms.shapes[call.operands[0] or 0] == call.shape else None
    )


@_form("Transpose")
def _transpose(call: Call) -> int | None:
    """Join transpositions; one that moves axes of size 1 alone is a view."""
    terms, term = call.terms, call.operands[0]
    shape = None if term is None else terms.shapes[term]
    if term is None or shape is None:
        return None
    given: Any = call.attributes.get("perm")
    axes = tuple(given or reversed(range(len(shape))))
    inner = terms.operation(term, "Transpose")
    held: Any = None if inner is None else dict(inner.attributes).get("perm")
    if inner is not None and held is not None:
        return call.to("Transpose", inner.operands[0], shape=call.shape, perm=tuple(held[axis] for axis in axes))
    if [axis for axis in axes if shape[axis] != 1] == [axis for axis in range(len(shape)) if shape[axis] != 1]:
        return term if axes == tuple(range(len(shape))) else call.to("View", term, shape=call.shape)
    if (array := terms.array(term)) is not None:
        return terms.array_term(array.transpose(axes))
    key = Operation("", "Transpose", (("perm", axes),), (term,))
    return terms.add(key, call.dtype, call.shape)


# --- matrix products --------------------------------------------------------------------------------------------------


@_form("Gemm", rounding=True)
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


@_form("Sum")
def _sum(call: Call) -> int | None:
    return call.to("Add", *call.operands, shape=call.shape) if len(call.operands) == 2 else None
