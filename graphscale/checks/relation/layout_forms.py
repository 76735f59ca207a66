"""Normal forms of layouts: changes of shape, orders of axes, and parts."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from graphscale.checks.relation.forms import Call, build, form
from graphscale.checks.relation.shape_inference import Sizes, sizes_of
from graphscale.checks.relation.terms import Operation, Shape
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


@form("Size", exact=False)
def _size(call: Call) -> int | None:
    """Fold the number of elements of a value of known sizes."""
    sizes = sizes_of(call.terms.shapes[call.operands[0] or 0])
    return None if sizes is None else call.terms.array_term(np.array(math.prod(sizes), np.int64))


@form("Reshape", "Squeeze", "Unsqueeze", "Flatten", "View", exact=False)
def _view(call: Call) -> int | None:
    """Write each change of shape to known sizes, but for one, as one `View`."""
    terms, sizes, term = call.terms, _view_sizes(call.shape), call.operands[0]
    if sizes is None or term is None:
        return None
    while (inner := terms.operation(term, "View")) is not None and inner.operands[0] is not None:
        term = inner.operands[0]
    if _view_sizes(terms.shapes[term]) == sizes:
        return term
    array = terms.array(term)
    if array is not None:
        return terms.array_term(array.reshape(sizes))
    return terms.add(Operation("", "View", (("shape", sizes),), (term,)), call.dtype, call.shape)


def _view_sizes(shape: Shape) -> Sizes | None:
    """Return sizes with -1 for an unknown one, which follows from the number of elements; None for several."""
    unknown = 0 if shape is None else sum(isinstance(size, str) for size in shape)
    return None if shape is None or unknown > 1 else tuple(-1 if isinstance(size, str) else size for size in shape)


@form("Concat", exact=False)
def _join_once(call: Call) -> int | None:
    """Join the parts of a part in place of it."""
    joined = list[int | None]()
    for term in call.operands:
        inner = call.terms.operation(term, "Concat")
        is_same = inner is not None and dict(inner.attributes) == dict(call.attributes)
        joined += inner.operands if inner is not None and is_same else [term]
    return None if joined == [*call.operands] else build(dataclasses.replace(call, operands=joined))


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


@form(Trait.ELEMENTWISE)
def _spread_later(call: Call) -> int | None:
    """Write a constant of equal elements as one, beside an operand that has the shape of the result."""
    terms = call.terms
    for index, term in enumerate(call.operands):
        array, others = terms.array(term), [t for i, t in enumerate(call.operands) if i != index and t is not None]
        if array is None or not array.ndim or not array.size or (array != array.flat[0]).any():
            continue
        if call.shape is not None and any(terms.shapes[other] == call.shape for other in others):
            one = terms.array_term(array.reshape(-1)[0].reshape(()))
            return build(dataclasses.replace(call, operands=[*call.operands[:index], one, *call.operands[index + 1 :]]))
    return None


@form(Trait.ELEMENTWISE, exact=False)
def _drop_unit_axes(call: Call) -> int | None:
    """Leave axes of size 1 of a result to a view after it, and those ahead of an operand out."""
    terms, sizes = call.terms, sizes_of(call.shape)
    if sizes is None:
        return None
    operands = list(call.operands)
    for index, term in enumerate(operands):
        own = None if term is None else sizes_of(terms.shapes[term])
        if term is None or own is None:
            return None
        ahead = len(sizes) - len(own)
        kept = [size for axis, size in enumerate(own) if sizes[axis + ahead] != 1]
        while kept and kept[0] == 1:
            del kept[0]
        operands[index] = term if tuple(kept) == own else _typed(call, "View", term, tuple(kept))
    if operands == call.operands and 1 not in sizes:
        return None
    narrow = tuple(size for size in sizes if size != 1)
    return call.to("View", build(dataclasses.replace(call, operands=operands, shape=narrow)), shape=sizes)


@form(Trait.ELEMENTWISE, exact=False)
def _view_after(call: Call) -> int | None:
    """Change the shape of the result of an elementwise operator in place of that of each operand."""
    terms, sizes = call.terms, sizes_of(call.shape)
    views = [terms.operation(t, "View") for t in call.operands if t is not None and not terms.is_scalar(t)]
    sources = {None if view is None else sizes_of(terms.shapes[view.operands[0] or 0]) for view in views}
    shapes = {terms.shapes[t] for t in call.operands if t is not None} - {()}
    if sizes is None or shapes != {sizes} or len(sources) != 1 or (source := sources.pop()) is None:
        return None
    narrow = tuple(size for size in source if size != 1)
    if narrow == sizes:
        return None
    inner = [
        t if t is None or terms.operation(t, "View") is None else _typed(call, "View", t, narrow) for t in call.operands
    ]
    return call.to("View", build(dataclasses.replace(call, operands=inner, shape=narrow)), shape=sizes)


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


def _typed(call: Call, op_type: str, term: int, sizes: Sizes, **attributes: Hashable) -> int:
    """Return a term of the type of another one."""
    return dataclasses.replace(call, dtype=call.terms.dtypes[term]).to(op_type, term, shape=sizes, **attributes)


# --- parts and reductions: axes of size 1 and transpositions stand after them ----------------------------------------

# Of each axis: the first index, the number of indices, and their distance.
Ranges = tuple[tuple[int, int, int], ...]


def _source(call: Call, term: int | None) -> tuple[int, Sizes, tuple[int, ...]] | None:
    """Return a value without unit axes and transposition, its sizes, and its axis for each axis of the term but -1."""
    terms = call.terms
    sizes = None if term is None else sizes_of(terms.shapes[term])
    if term is None or sizes is None:
        return None
    wide = [axis for axis, size in enumerate(sizes) if size != 1]
    narrow = _typed(call, "View", term, tuple(sizes[axis] for axis in wide))
    inner = terms.operation(narrow, "Transpose")
    perm: Any = range(len(wide)) if inner is None else dict(inner.attributes)["perm"]
    found = narrow if inner is None or inner.operands[0] is None else inner.operands[0]
    places = tuple(perm[wide.index(axis)] if axis in wide else -1 for axis in range(len(sizes)))
    return found, sizes_of(terms.shapes[found]) or (), places


def _in_order(call: Call, term: int, places: Sequence[int]) -> int:
    """Transpose a result of the axes that stay, and give it the shape of the call."""
    stay, sizes = sorted(places), call.terms.shapes[term] or ()
    perm = tuple(stay.index(place) for place in places)
    turned = call.to("Transpose", term, shape=tuple(sizes[axis] for axis in perm), perm=perm)
    return call.to("View", turned, shape=call.shape)


def _part(call: Call, ranges: Ranges) -> int | None:
    """Return a part of the first operand."""
    source = _source(call, call.operands[0])
    if source is None or sizes_of(call.shape) is None:
        return None
    term, sizes, places = source
    if any(place == -1 and given[1] != 1 for place, given in zip(places, ranges, strict=True)):
        return None
    by_place = dict(zip(places, ranges, strict=True))
    own = tuple(by_place[place] for place in range(len(sizes)))
    if own != tuple((0, size, 1) for size in sizes):
        term = call.terms.add(
            Operation("", "Slice", (("ranges", own),), (term,)), call.dtype, tuple(count for _, count, _ in own)
        )
    return _in_order(call, term, [place for place in places if place != -1])


def _ranges(call: Call, given: Mapping[int, slice]) -> Ranges:
    sizes = sizes_of(call.terms.shapes[call.operands[0] or 0]) or ()
    found = []
    for axis, size in enumerate(sizes):
        part = range(*given.get(axis, slice(None)).indices(size))
        found.append((part.start if part else 0, len(part), part.step if len(part) > 1 else 1))
    return tuple(found)


@form("Slice", exact=False)
def _slice(call: Call) -> int | None:
    """Write a part between known indices as its ranges."""
    arrays = [call.terms.array(term) for term in call.operands[1:]]
    rank = len(call.terms.shapes[call.operands[0] or 0] or ())
    if not rank or any(array is None for array in arrays):
        return None
    starts, ends, *rest = (a.reshape(-1).tolist() for a in arrays if a is not None)
    axes, steps = (*rest, *[[*range(len(starts))], [1] * len(starts)][len(rest) :])
    rows = zip(starts, ends, axes, steps, strict=True)
    return _part(call, _ranges(call, {axis % rank: slice(start, end, step) for start, end, axis, step in rows}))


@form("Gather", exact=False)
def _gather(call: Call) -> int | None:
    """Write an element at a known index of an axis as a part."""
    array, sizes = call.terms.array(call.operands[1]), sizes_of(call.terms.shapes[call.operands[0] or 0])
    axis: Any = call.attributes.get("axis", 0)
    if array is None or array.size != 1 or not sizes:
        return None
    index = int(array.reshape(-1)[0]) % sizes[axis]
    return _part(call, _ranges(call, {axis % len(sizes): slice(index, index + 1)}))


@form("Split", exact=False)
def _split(call: Call) -> int | None:
    """Write each part of a split as a part."""
    given: Any = call.attributes.get("split")
    axis: Any = call.attributes.get("axis", 0)
    number: Any = call.attributes.get("num_outputs")
    sizes, shape = sizes_of(call.terms.shapes[call.operands[0] or 0]), sizes_of(call.shape)
    if len(call.operands) > 1:
        array = call.terms.array(call.operands[1])
        given = None if array is None else array.tolist()
        if given is None:
            return None
    if not sizes or not shape:
        return None
    usual = shape[axis] if number is None else -(-sizes[axis] // number)
    start = sum(given[: call.output]) if given else call.output * usual
    return _part(call, _ranges(call, {axis % len(sizes): slice(start, start + shape[axis])}))


@form("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd", exact=False)
def _reduce(call: Call) -> int | None:
    """Reduce the axes of a value before a transposition, and none of size 1."""
    axes: Any = call.attributes.get("axes")
    if len(call.operands) > 1 and (array := call.terms.array(call.operands[1])) is not None:
        axes = array.reshape(-1).tolist()
    source = _source(call, call.operands[0])
    is_unknown = axes is None and (len(call.operands) > 1 or call.attributes.get("noop_with_empty_axes"))
    if source is None or is_unknown or sizes_of(call.shape) is None:
        return None
    term, sizes, places = source
    reduced = {places[axis] for axis in (range(len(places)) if axes is None else axes)} - {-1}
    if axes == []:
        return None
    if reduced:
        rest = tuple(size for place, size in enumerate(sizes) if place not in reduced)
        attributes = (("axes", tuple(sorted(reduced))),)
        term = call.terms.add(Operation("", call.op_type, attributes, (term,)), call.dtype, rest)
    return _in_order(call, term, [place for place in places if place not in {-1, *reduced}])


@form("MatMul", exact=False)
def _matrix_product(call: Call) -> int | None:
    """Write a product of many rows with one matrix as a product of two matrices."""
    terms, (one, other), shape = call.terms, call.operands, sizes_of(call.shape)
    sizes = [None if term is None else sizes_of(terms.shapes[term]) for term in (one, other)]
    if one is None or not sizes[0] or not sizes[1] or not shape or len(sizes[0]) < 3 or len(sizes[1]) != 2:
        return None
    rows = _typed(call, "View", one, (math.prod(sizes[0][:-1]), sizes[0][-1]))
    product = call.to("MatMul", rows, other, shape=(math.prod(shape[:-1]), shape[-1]))
    return call.to("View", product, shape=shape)


@form("Pad", exact=False)
def _pad(call: Call) -> int | None:
    """Pad before a transposition in place of after it."""
    terms, (term, pads, *rest), shape = call.terms, call.operands, call.shape
    inner, array = terms.operation(term, "Transpose"), terms.array(pads)
    if inner is None or array is None or len(rest) > 1 or shape is None:
        return None
    perm: Any = dict(inner.attributes)["perm"]
    inverse = [perm.index(axis) for axis in range(len(perm))]
    moved = terms.array_term(array.reshape(2, -1)[:, inverse].reshape(-1))
    sizes = tuple(shape[axis] for axis in inverse)
    padded = call.to("Pad", inner.operands[0], moved, *rest, shape=sizes, **call.attributes)
    return call.to("Transpose", padded, shape=shape, perm=perm)
