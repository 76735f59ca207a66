"""What a gradient is the sum of, and how large that can be: products whose operands are smaller than the gradient.

Taken are contractions (a sum of products over an axis), tables (sums of rows that were looked up), and what exporters
put behind them: sums, views, masks, and factors, numbers or tensors, that do not depend on the loss scale.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple, TypeGuard

import numpy as np
import onnx_ir as ir

from graphscale.graph.values import Use, constant_tensor, is_known_zero, read, uses_of
from graphscale.graph.walks import source_by_trait
from graphscale.operators import Trait, has_trait, rule_of

__all__ = ["Sum", "Term", "before_views", "elements", "terms_of"]

# The elements of the first operand, in another order or with another sign.
_VIEWS = Trait.RESHAPE | Trait.PERMUTE | Trait.SIGN
_MOST = 100  # terms: a sum with itself, again and again, has very many
_FAR = 200  # values to look at for one gradient
_NEAR = 10  # and for a scaled operand, which is taken for a product
_BATCH = 64  # what an axis of unknown size is taken for


class Term(NamedTuple):
    """Something that a gradient is a sum of.

    The sum of the absolute values of all its elements is at most `largest`, times the sum of the absolute values of
    each operand, times 1 + that of each factor. Neither is any sum on the way to it larger.

    Attributes:
        operands: what is multiplied, before a view, or what is summed.
        factors: what it is multiplied by, element by element, or what a product of the operands is.
        largest: of constant factors, and at least 1.
        cotangent: where the node that gives it, or the transposition before that, reads its scaled operand; None if it
            must not be unscaled there.
        is_kept: whether all of it is in the gradient: what is not finite in an operand makes the gradient so.
    """

    operands: tuple[ir.Value, ...]
    factors: tuple[ir.Value, ...] = ()
    largest: float = 1.0
    cotangent: Use | None = None
    is_kept: bool = False

    def times(self, factor: ir.Value | float) -> Term:
        """This term, multiplied by a number or, element by element, by a tensor that is not larger."""
        if isinstance(factor, ir.Value):
            return self._replace(factors=(*self.factors, factor))
        return self._replace(largest=self.largest * max(1.0, factor))


class Sum(NamedTuple):
    """What a gradient is the sum of.

    Attributes:
        terms: these.
        is_alone: whether all that comes of their products is this gradient, so that they may be unscaled instead.
    """

    terms: tuple[Term, ...]
    is_alone: bool


def terms_of(division: ir.Node, scaled: set[ir.Value], narrow: float) -> Sum | None:
    """What a gradient is the sum of before it is unscaled, or None if it is no sum of such terms.

    Args:
        division: what unscales a gradient.
        scaled: all values that depend on the loss scale.
        narrow: how many times fewer elements the operands of a scaled operand must have to stand for it.
    """
    search = _Search(scaled)
    terms = search.follow(Use(division, 0))
    return None if terms is None else Sum(tuple(_simplified(term, scaled, narrow) for term in terms), search.is_alone())


def _simplified(term: Term, scaled: set[ir.Value], narrow: float) -> Term:
    """A term whose scaled operand is a product of much smaller ones itself, as a product of these."""
    use = term.cotangent
    if use is None:
        return term
    cotangent = before_views(read(use))
    found = _Search(scaled, _NEAR).follow(use)
    if found is None or len(found) != 1 or cotangent not in term.operands:
        return term
    [part] = found
    if part.factors or narrow * sum(map(elements, part.operands)) > elements(cotangent):
        return term
    # The cotangent itself must not be too large, either: no operand below 1 may hide that.
    rest = [value for value in term.operands if value is not cotangent]
    return term._replace(
        operands=part.operands,
        factors=(*rest, *term.factors),
        largest=term.largest * part.largest,
        is_kept=term.is_kept and part.is_kept,
    )


class _Search:
    """Goes from a gradient up to the terms that it is the sum of, and notes which reads it has gone along."""

    def __init__(self, scaled: set[ir.Value], far: int = _FAR) -> None:
        self._scaled, self._far = scaled, far
        self._found: dict[ir.Value, list[Term] | None] = {}
        self._reads: set[Use] = set()

    def follow(self, use: Use) -> list[Term] | None:
        """The terms of what a node reads."""
        value = read(use)
        self._reads.add(use)
        if value not in self._found:
            node = value.producer()
            is_near = node is not None and node.domain == "" and len(self._reads) <= self._far
            terms = self._terms(node, value) if node is not None and is_near else None
            self._found[value] = None if terms is None or len(terms) > _MOST else terms
        return self._found[value]

    def is_alone(self) -> bool:
        """Whether nothing else reads what it has come across."""
        return all(not v.is_graph_output() and self._reads.issuperset(uses_of(v)) for v in self._found)

    def _terms(self, node: ir.Node, value: ir.Value) -> list[Term] | None:
        count = len(node.inputs)
        if has_trait(node, _VIEWS) or node.op_type in ("ReduceSum", "Slice", "Trilu"):
            terms = self.follow(Use(node, 0))
            return _parts(terms) if node.op_type in ("Slice", "Trilu") else terms
        if node.op_type in ("Add", "Concat", "Sub", "Sum"):
            return self._sum(node, value, range(count))
        if node.op_type == "Where":
            zeros = [i for i in (1, 2) if is_known_zero(node.inputs[i], of_finite=False)]
            return _parts(self._sum(node, value, [i for i in (1, 2) if i not in zeros]))
        if node.op_type in ("Div", "Mul"):
            return self._product(node, value)
        return _term(node, self._scaled)

    def _sum(self, node: ir.Node, value: ir.Value, indices: Iterable[int]) -> list[Term] | None:
        """The terms of operands, none of which is repeated to the shape of the others."""
        found: list[Term] = []
        for use in (Use(node, index) for index in indices):
            fits = node.op_type == "Concat" or _same_shape(read(use), value)
            terms = self.follow(use) if fits else None
            if terms is None:
                return None
            found += terms
        return found

    def _product(self, node: ir.Node, value: ir.Value) -> list[Term] | None:
        """The terms of a product with what is not scaled, or the product as a term."""
        places = [index for index in (0, 1) if node.inputs[index] in self._scaled]
        if len(places) != 1 or (node.op_type == "Div" and places != [0]):
            return None
        use, other = Use(node, places[0]), read(Use(node, 1 - places[0]))
        if not _same_shape(read(use), value):  # it is repeated: its sum is not that of the product
            return _term(node, self._scaled)
        terms = self.follow(use) if other.dtype is ir.DataType.FLOAT else None
        factor = None if terms is None else _factor(node, other)
        return None if terms is None or factor is None else [term.times(factor) for term in terms]


def _factor(node: ir.Node, other: ir.Value) -> ir.Value | float | None:
    """What a value is multiplied by, or the largest of it; None if it is not finite."""
    tensor = constant_tensor(other)
    if tensor is None:
        source = other.producer()
        if _is(source, "Cast") and (source.inputs[0] is not None and source.inputs[0].dtype is ir.DataType.BOOL):
            return 1.0 if node.op_type == "Mul" else None
        return other if node.op_type == "Mul" else None
    numbers = np.abs(np.ravel(tensor.numpy()))
    if not numbers.size:
        return 1.0
    with np.errstate(divide="ignore"):
        largest = float(numbers.max() if node.op_type == "Mul" else 1 / numbers.min())
    return largest if math.isfinite(largest) else None


def _term(node: ir.Node, scaled: set[ir.Value]) -> list[Term] | None:
    """The term that a node gives by itself."""
    if node.op_type in ("ScatterElements", "ScatterND"):
        reduction = node.attributes.get("reduction")
        if (reduction is not None and reduction.as_string() not in ("none", "add")) or not is_known_zero(
            node.inputs[0], of_finite=False
        ):
            return None
        indices = [2]
    elif node.op_type == "Mul" or ((rule := rule_of(node)) is not None and rule.contraction):
        if any(value is not None for value in node.inputs[2:]):
            return None
        indices = list(range(len(node.inputs[:2])))
    else:
        return None
    cotangents = [index for index in indices if node.inputs[index] in scaled]
    operands = [value for index in indices if (value := node.inputs[index]) is not None]
    if len(cotangents) != 1 or any(value.dtype is not ir.DataType.FLOAT for value in operands):
        return None
    use = Use(node, cotangents[0])
    cotangent = read(use)
    transposition = cotangent.producer()
    if _is(transposition, "Transpose") and len(uses_of(cotangent)) == 1:
        use = Use(transposition, 0)  # ONNX Runtime fuses the transposition with the contraction
    alpha = node.attributes.get("alpha") if node.op_type == "Gemm" else None
    factor = 1.0 if alpha is None else abs(alpha.as_float())
    is_kept = node.op_type in ("Gemm", "MatMul", "Mul")  # others may leave a border out, or overwrite
    term = Term(tuple(map(before_views, operands)), cotangent=use, is_kept=is_kept)
    return [term.times(factor)] if math.isfinite(factor) else None


def _parts(terms: list[Term] | None) -> list[Term] | None:
    """Terms of which something may be dropped."""
    return None if terms is None else [term._replace(is_kept=False) for term in terms]


def _same_shape(one: ir.Value, other: ir.Value) -> bool:
    return one.shape is not None and one.shape.is_static() and one.shape == other.shape


def before_views(value: ir.Value) -> ir.Value:
    """What a value has the elements of, in another order or with another sign."""
    return source_by_trait(value, _VIEWS)


def elements(value: ir.Value) -> int:
    """How many elements a value has, or may have."""
    if value.shape is None:
        return _BATCH**2
    return math.prod(axis if isinstance(axis, int) else _BATCH for axis in value.shape)


def _is(node: ir.Node | None, op_type: str) -> TypeGuard[ir.Node]:
    return node is not None and node.domain == "" and node.op_type == op_type
