"""Normal forms of layouts: changes of shape, orders of axes, and parts."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from typing import Any

import numpy as np

from graphscale.checks.relation.forms import Call, build, form
from graphscale.checks.relation.shape_inference import Sizes, sizes_of
from graphscale.checks.relation.terms import Operation
from graphscale.operators import Trait

__all__: list[str] = []


@form("Shape", exact=False)
def _shape(call: Call) -> int | None:
    """Fold the shape of a value of known sizes."""
    sizes = sizes_of(call.terms.shapes[call.operands[0] or 0])
    if sizes is None:
        return None
    start: Any = call.attributes.get("start", 0)
    end: Any = call.attributes.get("end")
    return call.terms.array_term(np.array(sizes[start:end], np.int64))


@form("Reshape", "Squeeze", "Unsqueeze", "Flatten", "View", exact=False)
def _view(call: Call) -> int | None:
    """Write each change of shape between known sizes as one `View`."""
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
    return terms.add(Operation("", "View", (("shape", sizes),), (term,)), call.dtype, sizes)


@form("Expand", exact=False)
def _expand(call: Call) -> int | None:
    return (
        call.operands[0] if call.shape is not None and call.terms.shapes[call.operands[0] or 0] == call.shape else None
    )


@form("Transpose", exact=False)
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


@form(Trait.ELEMENTWISE, exact=False)
def _view_after(call: Call) -> int | None:
    """Change the shape of the result of an elementwise operator in place of that of each operand."""
    terms, sizes = call.terms, sizes_of(call.shape)
    views = [terms.operation(t, "View") for t in call.operands if t is not None and not terms.is_scalar(t)]
    sources = {None if view is None else terms.shapes[view.operands[0] or 0] for view in views}
    shapes = {terms.shapes[t] for t in call.operands if t is not None} - {()}
    if sizes is None or shapes != {sizes} or len(sources) != 1 or None in sources:
        return None
    inner = [
        t if t is None or (view := terms.operation(t, "View")) is None else view.operands[0] for t in call.operands
    ]
    return call.to("View", build(dataclasses.replace(call, operands=inner, shape=sources.pop())), shape=sizes)


@form(Trait.ELEMENTWISE, exact=False)
def _transpose_after(call: Call) -> int | None:
    """Transpose the result of an elementwise operator in place of its operands, if none needs another order then."""
    terms, sizes = call.terms, sizes_of(call.shape)
    orders: list[Any] = [
        dict(inner.attributes)["perm"] for t in call.operands if (inner := terms.operation(t, "Transpose"))
    ]
    perm: tuple[int, ...] = next((order for order in orders if sizes is not None and len(order) == len(sizes)), ())
    if sizes is None or not perm:
        return None
    inverse = tuple(perm.index(axis) for axis in range(len(perm)))
    operands: list[int | None] = []
    for term in call.operands:
        own = None if term is None else sizes_of(terms.shapes[term])
        if term is None or own is None:
            return None
        if own:
            own = (*[1] * (len(perm) - len(own)), *own)
            turned = _typed(call, "View", term, own)
            term = _typed(call, "Transpose", turned, tuple(own[axis] for axis in inverse), perm=inverse)
            inner = terms.operation(term, "Transpose")
            if inner is not None and inner.operands[0] == turned:
                return None
        operands.append(term)
    before = dataclasses.replace(call, operands=operands, shape=tuple(sizes[axis] for axis in inverse))
    return call.to("Transpose", build(before), shape=sizes, perm=perm)


@form(Trait.ELEMENTWISE, exact=False)
def _strip_unit_axes(call: Call) -> int | None:
    """Drop leading axes of size 1 of an operand where another one has as many axes."""
    terms = call.terms
    sizes = [None if term is None else sizes_of(terms.shapes[term]) for term in call.operands]
    for index, (term, own) in enumerate(zip(call.operands, sizes, strict=True)):
        others = [each for i, each in enumerate(sizes) if i != index and each is not None]
        if term is not None and own and own[0] == 1 and any(len(each) >= len(own) for each in others):
            narrow = _typed(call, "View", term, own[1:])
            operands = [*call.operands[:index], narrow, *call.operands[index + 1 :]]
            return build(dataclasses.replace(call, operands=operands))
    return None


def _typed(call: Call, op_type: str, term: int, sizes: Sizes, **attributes: Hashable) -> int:
    """Return a term of the type of another one."""
    return dataclasses.replace(call, dtype=call.terms.dtypes[term]).to(op_type, term, shape=sizes, **attributes)


@form("Slice", exact=False)
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
