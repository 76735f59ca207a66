"""The terms that a gradient is the sum of, and their size: products whose operands are smaller than the gradient.

Terms are contractions (a sum of products over an axis) and tables (sums of rows that were looked up), with the nodes
that exporters put behind them: sums, views, masks, and factors (numbers or tensors) that do not depend on the scale.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple, TypeGuard

import numpy as np
import onnx_ir as ir

from graphscale.graph.values import Use, constant_tensor, is_known_zero, operand_at, uses_of
from graphscale.lowering.sizes import VIEWS, count_elements, same_shape, skip_views
from graphscale.operators import attribute, has_trait, rule_of

__all__ = ["Term", "find_terms"]

_MOST_TERMS = 100  # a sum with itself, again and again, has very many
_MOST_READS = 200  # to follow for one gradient
_MOST_OPERAND_READS = 10  # to follow for a scaled operand, which may be a product itself


class Term(NamedTuple):
    """A term of the sum that a gradient is.

    The sum of the absolute values of all its elements is at most `largest`, times the sum of the absolute values of
    each operand, times 1 + that of each factor. Neither is any sum on the way to it larger.

    Attributes:
        operands: the values that are multiplied, or the one that is summed, before views.
        factors: the values that multiply the term, or a product of operands, element by element.
        largest: the largest constant factor, and at least 1.
        cotangent: the place where the node that gives the term, or the transposition before that, reads its scaled
            operand; None if it must not be unscaled there.
        is_kept: True if all of it is in the gradient: an operand that is not finite makes the gradient so.
    """

    operands: tuple[ir.Value, ...]
    factors: tuple[ir.Value, ...] = ()
    largest: float = 1.0
    cotangent: Use | None = None
    is_kept: bool = False

    def multiply(self, factor: ir.Value | float) -> Term:
        """Return this term multiplied by a number or, element by element, by a tensor that is not larger."""
        if isinstance(factor, ir.Value):
            return self._replace(factors=(*self.factors, factor))
        return self._replace(largest=self.largest * max(1.0, factor))


def find_terms(division: ir.Node, scaled: set[ir.Value], narrow: float) -> tuple[tuple[Term, ...], bool]:
    """Find the terms of a gradient before it is unscaled.

    Args:
        division: the node that unscales it.
        scaled: all values that depend on the loss scale.
        narrow: elements of a scaled operand per element of its own operands, from which these stand for it.

    Returns:
        the terms, none if it is no sum of products; and True if nothing but this gradient is computed from the
        products, so that these may be unscaled instead.
    """
    search = _Search(scaled)
    terms = search.follow(Use(division, 0))
    expanded = tuple(_expand_cotangent(term, scaled, narrow) for term in terms or ())
    return expanded, terms is not None and search.is_exclusive()


def _expand_cotangent(term: Term, scaled: set[ir.Value], narrow: float) -> Term:
    """Replace the scaled operand of a term by the operands of the product that it is, if they are much smaller."""
    use = term.cotangent
    if use is None:
        return term
    cotangent = skip_views(operand_at(use))
    parts = _Search(scaled, _MOST_OPERAND_READS).follow(use)
    if parts is None or len(parts) != 1 or cotangent not in term.operands:
        return term
    [part] = parts
    if part.factors or narrow * sum(map(count_elements, part.operands)) > count_elements(cotangent):
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
    """The search for the terms of a gradient, and the reads that it has followed."""

    def __init__(self, scaled: set[ir.Value], most_reads: int = _MOST_READS) -> None:
        self._scaled, self._most_reads = scaled, most_reads
        self._terms_of: dict[ir.Value, list[Term] | None] = {}
        self._reads: set[Use] = set()

    def follow(self, use: Use) -> list[Term] | None:
        """Return the terms of the value that a node reads, or None if it is no sum of terms."""
        value = operand_at(use)
        self._reads.add(use)
        if value not in self._terms_of:
            node = value.producer()
            is_near = node is not None and node.domain == "" and len(self._reads) <= self._most_reads
            terms = self._find(node, value) if node is not None and is_near else None
            self._terms_of[value] = None if terms is None or len(terms) > _MOST_TERMS else terms
        return self._terms_of[value]

    def is_exclusive(self) -> bool:
        """Return whether nothing else reads the values on the way."""
        return all(not v.is_graph_output() and self._reads.issuperset(uses_of(v)) for v in self._terms_of)

    def _find(self, node: ir.Node, value: ir.Value) -> list[Term] | None:
        if has_trait(node, VIEWS) or node.op_type in ("ReduceSum", "Slice", "Trilu"):
            terms = self.follow(Use(node, 0))
            return _mark_partial(terms) if node.op_type in ("Slice", "Trilu") else terms
        if node.op_type in ("Add", "Concat", "Sub", "Sum"):
            return self._sum(node, value, range(len(node.inputs)))
        if node.op_type == "Where":
            others = [i for i in (1, 2) if not is_known_zero(node.inputs[i], of_finite=False)]
            return _mark_partial(self._sum(node, value, others))
        if node.op_type in ("Div", "Mul"):
            return self._product(node, value)
        return _make_term(node, self._scaled)

    def _sum(self, node: ir.Node, value: ir.Value, indices: Iterable[int]) -> list[Term] | None:
        """Return the terms of operands; none is repeated to the shape of the others."""
        terms: list[Term] = []
        for use in (Use(node, index) for index in indices):
            fits = node.op_type == "Concat" or same_shape(operand_at(use), value)
            part = self.follow(use) if fits else None
            if part is None:
                return None
            terms += part
        return terms

    def _product(self, node: ir.Node, value: ir.Value) -> list[Term] | None:
        """Return the terms of a product with a value that is not scaled, or the product as a term."""
        places = [index for index in (0, 1) if node.inputs[index] in self._scaled]
        if len(places) != 1 or (node.op_type == "Div" and places != [0]):
            return None
        use, other = Use(node, places[0]), operand_at(Use(node, 1 - places[0]))
        if not same_shape(operand_at(use), value):  # it is repeated: its sum is not that of the product
            return _make_term(node, self._scaled)
        terms = self.follow(use) if other.dtype is ir.DataType.FLOAT else None
        factor = None if terms is None else _find_factor(node, other)
        return None if terms is None or factor is None else [term.multiply(factor) for term in terms]


def _find_factor(node: ir.Node, other: ir.Value) -> ir.Value | float | None:
    """Return the factor of a product, or the largest element of a constant one; None if it is not finite."""
    tensor = constant_tensor(other)
    if tensor is None:
        source = other.producer()
        if _is(source, "Cast") and operand_at(Use(source, 0)).dtype is ir.DataType.BOOL:
            return 1.0 if node.op_type == "Mul" else None
        return other if node.op_type == "Mul" else None
    numbers = np.abs(np.ravel(tensor.numpy()))
    if not numbers.size:
        return 1.0
    with np.errstate(divide="ignore"):
        largest = float(numbers.max() if node.op_type == "Mul" else 1 / numbers.min())
    return largest if math.isfinite(largest) else None


def _make_term(node: ir.Node, scaled: set[ir.Value]) -> list[Term] | None:
    """Return the term that a node gives by itself."""
    if node.op_type in ("ScatterElements", "ScatterND"):
        is_sum = attribute(node, "reduction", "none") in ("none", "add")
        if not is_sum or not is_known_zero(node.inputs[0], of_finite=False):
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
    cotangent = operand_at(use)
    transposition = cotangent.producer()
    if _is(transposition, "Transpose") and len(uses_of(cotangent)) == 1:
        use = Use(transposition, 0)  # ONNX Runtime fuses the transposition with the contraction
    factor = abs(attribute(node, "alpha", 1.0)) if node.op_type == "Gemm" else 1.0
    is_kept = node.op_type in ("Gemm", "MatMul", "Mul")  # others may leave a border out, or overwrite
    term = Term(tuple(map(skip_views, operands)), cotangent=use, is_kept=is_kept)
    return [term.multiply(factor)] if math.isfinite(factor) else None


def _mark_partial(terms: list[Term] | None) -> list[Term] | None:
    """Mark terms that may lose elements."""
    return None if terms is None else [term._replace(is_kept=False) for term in terms]


def _is(node: ir.Node | None, op_type: str) -> TypeGuard[ir.Node]:
    return node is not None and node.domain == "" and node.op_type == op_type
