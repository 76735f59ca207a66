"""Products of matrices that are gradients: of operands far from too large they are finite."""

from __future__ import annotations

from typing import NamedTuple

import onnx_ir as ir

from graphscale.graph.values import Use, operand_at, uses_of
from graphscale.graph.walks import descendants
from graphscale.lowering.multiply_first import is_number_up_to_one
from graphscale.lowering.sizes import VIEWS, count_elements, skip_views
from graphscale.operators import attribute, has_trait
from graphscale.passes import UnscaleGradients

__all__ = ["Product", "find_product", "find_scaled"]


class Product(NamedTuple):
    """A product of two matrices that is a gradient, or a part of it from -1 to 1; in any shape, order and sign.

    No sum of absolute values of its elements is larger than that of one operand times that of the other.

    Attributes:
        operands: the values that are multiplied, before views.
        cotangent: the place where the product, or the transposition before that, reads its scaled operand.
        is_exclusive: True if nothing but the gradient is computed from the product: it may be unscaled instead.
    """

    operands: tuple[ir.Value, ...]
    cotangent: Use
    is_exclusive: bool

    def count_reads(self) -> int:
        """Return the number of elements that a bound reads."""
        return sum(map(count_elements, {*self.operands}))

    def count_early(self) -> int:
        """Return the number of elements that a bound and early unscaling read and write."""
        return self.count_reads() + 2 * count_elements(operand_at(self.cotangent))


def find_scaled(graph: ir.Graph, scale: ir.Value) -> set[ir.Value]:
    """Find all values that depend on the loss scale before they are unscaled."""
    return descendants((node for node in graph if not UnscaleGradients.inserted(node)), [scale])


def find_product(division: ir.Node, scaled: set[ir.Value]) -> Product | None:
    """Find the product of matrices behind a gradient.

    Args:
        division: the node that unscales it.
        scaled: the values of `find_scaled`.
    """
    value, is_exclusive = operand_at(Use(division, 0)), True
    node = value.producer()
    while node is not None and (index := _find_source(node)) is not None:
        is_exclusive &= _has_one_reader(value)
        value = operand_at(Use(node, index))
        node = value.producer()
    if node is None or node.domain != "" or node.op_type not in ("Gemm", "MatMul"):
        return None
    # A factor above 1 is not in the operands, and an addend has no bound.
    if abs(attribute(node, "alpha", 1.0)) > 1 or any(value is not None for value in node.inputs[2:]):
        return None
    operands = [operand_at(Use(node, i)) for i in (0, 1)]
    places = [i for i in (0, 1) if operands[i] in scaled]
    # Operands and result have one type; some exporters declare that of the gradient alone.
    dtypes = {operand.dtype or value.dtype for operand in operands}
    if len(places) != 1 or dtypes != {ir.DataType.FLOAT}:
        return None
    [place] = places
    use, transposition = Use(node, place), operands[place].producer()
    if transposition is not None and transposition.op_identifier() == ("", "Transpose", ""):
        if len(uses_of(operands[place])) == 1:
            use = Use(transposition, 0)  # ONNX Runtime fuses the transposition with the product
    return Product(tuple(map(skip_views, operands)), use, is_exclusive and _has_one_reader(value))


def _find_source(node: ir.Node) -> int | None:
    """Return the index of the operand whose elements a node moves, or multiplies by a constant number."""
    if has_trait(node, VIEWS):
        return 0
    if node.domain != "" or node.op_type != "Mul":
        return None
    return next((1 - i for i in (0, 1) if is_number_up_to_one(node.inputs[i])), None)


def _has_one_reader(value: ir.Value) -> bool:
    return len(uses_of(value)) == 1 and not value.is_graph_output()
