"""Normal forms of layouts: changes of shape, orders of axes, and parts."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from graphscale.checks.relation.forms import Call, build, form
from graphscale.checks.relation.shape_inference import Sizes, sizes_of
from graphscale.checks.relation.terms import Operation, Shape
from graphscale.operators import OPERATORS, Trait

__all__: list[str] = []


@form("Shape")
def _shape(call: Call) -> int | None:
    """Fold the shape of a value of known sizes."""
    sizes = sizes_of(call.terms.shapes[call.operands[0] or 0])
    if sizes is None:
        return None
    start: Any = call.attributes.get("start", 0)
    end: Any = call.attributes.get("end")
    return call.terms.array_term(np.array(sizes[start:end], np.int64))


@form("Reshape", "Squeeze", "Unsqueeze", "Flatten", "View")
def _view(call: Call) -> int | None:
    """Write each change of shape between known sizes as one `View`, above elementwise operators."""
    terms, sizes, term = call.terms, sizes_of(call.shape), call.operands[0]
    if sizes is None or term is None:
        return None
    while (inner := terms.operation(term, "View")) is not None and inner.operands[0] is not None:
        term = inner.operands[0]
    if terms.shapes[term] == sizes:
        return term
    array = terms.array(term)
    if array is not None:
        return terms.array_term(array.reshape(sizes))
    above = terms.keys[term]
    if isinstance(above, Operation) and not above.domain and _is_elementwise(above.op_type):
        shapes = {None if t is None else terms.shapes[t] for t in above.operands} - {()}
        if shapes == {terms.shapes[term]} and sizes_of(terms.shapes[term]) is not None:
            operands = [
                t if t is None or terms.is_scalar(t) else _typed(call, "View", t, sizes) for t in above.operands
            ]
            return _call_again(call, above, operands, sizes)
    return terms.add(Operation("", "View", (("shape", sizes),), (term,)), call.dtype, sizes)


@form("Expand")
def _expand(call: Call) -> int | None:
    return (
        call.operands[0] if call.shape is not None and call.terms.shapes[call.operands[0] or 0] == call.shape else None
    )


@form("Transpose")
def _transpose_inwards(call: Call) -> int | None:
    """Transpose the operands of an elementwise operator in place of its result."""
    terms, inner = call.terms, call.terms.keys[call.operands[0] or 0]
    axes = _axes_of(call)
    if not isinstance(inner, Operation) or inner.domain or axes is None or not _is_elementwise(inner.op_type):
        return None
    operands = []
    for term in inner.operands:
        sizes = None if term is None else sizes_of(terms.shapes[term])
        if term is None or sizes is None or len(sizes) > len(axes):
            return None
        if sizes and len(sizes) < len(axes):
            sizes = (*[1] * (len(axes) - len(sizes)), *sizes)
            term = _typed(call, "View", term, sizes)
        operands.append(_typed(call, "Transpose", term, tuple(sizes[i] for i in axes), perm=axes) if sizes else term)
    return _call_again(call, inner, operands, call.shape)


@form("Transpose")
def _transpose(call: Call) -> int | None:
    """Join transpositions, and leave axes of size 1 to views."""
    terms, term, axes = call.terms, call.operands[0], _axes_of(call)
    if term is None or axes is None:
        return None
    inner = terms.operation(term, "Transpose")
    held: Any = None if inner is None else dict(inner.attributes).get("perm")
    if inner is not None and held is not None:
        return call.to("Transpose", inner.operands[0], shape=call.shape, perm=tuple(held[axis] for axis in axes))
    sizes = terms.shapes[term] or ()
    wide = [axis for axis in axes if sizes[axis] != 1]
    if wide == sorted(wide):
        return term if axes == tuple(range(len(axes))) else call.to("View", term, shape=call.shape)
    if (array := terms.array(term)) is not None:
        return terms.array_term(array.transpose(axes))
    if sizes_of(sizes) is not None and len(wide) < len(axes):
        narrow = call.to("View", term, shape=tuple(size for size in sizes if size != 1))
        perm = tuple(sorted(wide).index(axis) for axis in wide)
        turned = call.to("Transpose", narrow, shape=tuple(sizes[axis] for axis in wide), perm=perm)
        return call.to("View", turned, shape=call.shape)
    return terms.add(Operation("", "Transpose", (("perm", axes),), (term,)), call.dtype, call.shape)


def _axes_of(call: Call) -> tuple[int, ...] | None:
    """Return the order of axes of a transposition; None for a value of unknown rank."""
    given: Any = call.attributes.get("perm")
    shape = None if call.operands[0] is None else call.terms.shapes[call.operands[0]]
    return None if shape is None else tuple(given or reversed(range(len(shape))))


def _call_again(call: Call, above: Operation, operands: Sequence[int | None], shape: Shape) -> int:
    """Return the term of an operator on other operands, with a result of the type of the call."""
    attributes = dict(above.attributes)
    again = dataclasses.replace(call, op_type=above.op_type, attributes=attributes, output=above.output)
    return build(dataclasses.replace(again, operands=operands, shape=shape))


def _is_elementwise(op_type: str) -> bool:
    row = OPERATORS.get(("", op_type))
    return row is not None and Trait.ELEMENTWISE in row.traits and Trait.RANDOM not in row.traits


def _typed(call: Call, op_type: str, term: int, sizes: Sizes, **attributes: Hashable) -> int:
    """Return a term of the type of another one."""
    return dataclasses.replace(call, dtype=call.terms.dtypes[term]).to(op_type, term, shape=sizes, **attributes)


@form("Slice")
def _slice_first(call: Call) -> int | None:
    """Slice before a transposition in place of after it."""
    terms, (term, starts, ends, *rest) = call.terms, call.operands
    inner = terms.operation(term, "Transpose")
    axes = terms.array(rest[0]) if rest else None
    perm: Any = None if inner is None else dict(inner.attributes).get("perm")
    if inner is None or axes is None or perm is None or call.shape is None:
        return None
    moved = terms.array_term(np.array([perm[axis] for axis in axes.reshape(-1)], axes.dtype))
    sizes = tuple(call.shape[perm.index(axis)] for axis in range(len(perm)))
    part = call.to("Slice", inner.operands[0], starts, ends, moved, *rest[1:], shape=sizes)
    return call.to("Transpose", part, shape=call.shape, perm=perm)
