"""The plan of a gradient's test and unscaling: as a product of matrices, by its operands, or by its own sum."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import NamedTuple

import onnx_ir as ir

from graphscale.graph.cones import descendants
from graphscale.graph.values import Use, is_known_zero, operand_at, uses_of
from graphscale.lowering.merge_probes import MergeProbes
from graphscale.lowering.multiply_first import is_number_up_to_one
from graphscale.lowering.thresholds import VIEWS, Thresholds, count_elements, skip_views
from graphscale.operators import attribute, has_trait
from graphscale.passes import CheckFinite, UnscaleGradients

__all__ = ["GradientTest", "Product", "find_scaled", "find_total", "plan_test"]

# Operators for gradients of tables, which write their third operand, rows, into zeros, or add them up there.
_TABLES = {("", "ScatterND"), ("", "ScatterElements"), ("com.microsoft", "GatherGrad")}
_LARGEST_CONSTANT = 1024  # elements; larger constants are not read


class Product(NamedTuple):
    """A product of two matrices that is a gradient, or one times a number from -1 to 1, in any shape, order and sign.

    The sum of the absolute values of its elements is at most the product of both operands' sums: with operands far
    below the limit, it is finite. The gradient of a table counts as a product of one operand, the rows.

    Attributes:
        operands: the factors, before views.
        cotangent: the place where the product, or the transposition before it, reads its scaled operand.
        is_exclusive: True if only the gradient is computed from the product, which may be unscaled instead.
    """

    operands: tuple[ir.Value, ...]
    cotangent: Use
    is_exclusive: bool

    @property
    def unscaled(self) -> list[ir.Value]:
        """The operands without the cotangent."""
        return [value for value in self.operands if value is not skip_views(operand_at(self.cotangent))]


@dataclasses.dataclass(frozen=True)
class GradientTest:
    """The test of a large gradient, by a bound of its product, or by its own sum.

    Attributes:
        division: the node that unscales the gradient.
        probe: the nodes of its finite check, in execution order, to be replaced.
        product: the product for the bound.
        early: True if the cotangent of the product is unscaled.
        rate: the place of a learning rate that is divided instead of the gradient, if any.
    """

    division: ir.Node
    probe: tuple[ir.Node, ...]
    product: Product | None = None
    early: bool = False
    rate: Use | None = None


def plan_test(
    division: ir.Node,
    readers: Iterable[ir.Node],
    total: ir.Node,
    scaled: set[ir.Value],
    thresholds: Thresholds,
    *,
    is_private: bool,
    rate: Use | None = None,
) -> GradientTest | None:
    """Plan the test of a gradient; return None for a small gradient, and for others than float32 with one probe.

    Args:
        division: the node that unscales it. readers: the possible first nodes of its probe: readers of the gradient, or
            of its buffer.
        total: the sum of all probes.
        scaled: the values of `find_scaled`.
        thresholds: the sizes from which a bound and early unscaling pay.
        is_private: True if its readers and the scale allow early unscaling.
        rate: the place of the learning rate that is its only factor, if any.
    """
    gradient = division.outputs[0]
    if division.op_type != "Div" or gradient.dtype is not ir.DataType.FLOAT:
        return None
    if gradient.shape is None or not gradient.shape.is_static():
        return None
    size, probes = count_elements(gradient), [probe for node in readers if (probe := _find_probe(node, total))]
    if size < thresholds.bound_elements or len(probes) != 1:
        return None
    product, rate = _find_product(division, scaled), rate if is_private else None
    if product is not None:
        read_by_bound = sum(map(count_elements, {*product.operands}))
        touched_early = read_by_bound + 2 * count_elements(operand_at(product.cotangent))
        is_early = is_private and rate is None and product.is_exclusive
        if is_early and touched_early <= thresholds.unbounded_passes * size:
            return GradientTest(division, probes[0], product, early=True)
        if read_by_bound <= thresholds.bound_share * size:
            return GradientTest(division, probes[0], product, rate=rate)
    return GradientTest(division, probes[0], rate=rate)


def _find_probe(node: ir.Node, total: ir.Node) -> tuple[ir.Node, ...]:
    """Return the nodes from a reader of a gradient to the sum of all probes; none if they are no probe of it alone."""
    path = [node]
    while (MergeProbes.inserted(path[-1]) or CheckFinite.inserted(path[-1])) and len(path) < 5:
        uses = uses_of(path[-1].outputs[0])
        if len(uses) != 1:
            break
        if uses[0].node is total:
            return () if any(each.op_type == "Concat" for each in path) else tuple(path)
        path.append(uses[0].node)
    return ()


def find_total(flag: ir.Value | None) -> ir.Node | None:
    """Return the sum of all probes, if a flag of the finite check depends on nothing else."""
    value = flag
    for op_type in ("Not", "IsNaN", "Sum"):
        node = None if value is None else value.producer()
        if node is None or node.op_type != op_type or not CheckFinite.inserted(node):
            return None
        if value is not flag and not _has_one_reader(node.outputs[0]):
            return None
        value = node.inputs[0]
    return node


def find_scaled(graph: ir.Graph, scale: ir.Value) -> set[ir.Value]:
    """Find all values that depend on the loss scale before an unscaling."""
    return descendants((node for node in graph if not UnscaleGradients.inserted(node)), [scale])


def _find_product(division: ir.Node, scaled: set[ir.Value]) -> Product | None:
    """Find the product of matrices behind a gradient."""
    value, is_exclusive = operand_at(Use(division, 0)), True
    while (node := value.producer()) is not None and (index := _find_source(node)) is not None:
        is_exclusive &= _has_one_reader(value)
        value = operand_at(Use(node, index))
    if node is None:
        return None
    operands = {i: operand_at(Use(node, i)) for i in _indices_of_factors(node)}
    places = [i for i, operand in operands.items() if operand in scaled]
    # Operands and result have one type; some exporters declare only that of the gradient.
    dtypes = {operand.dtype or value.dtype for operand in operands.values()}
    if len(places) != 1 or dtypes != {ir.DataType.FLOAT}:
        return None
    [place] = places
    use, transposition = Use(node, place), operands[place].producer()
    if transposition is not None and transposition.op_identifier() == ("", "Transpose", ""):
        if len(uses_of(operands[place])) == 1:
            use = Use(transposition, 0)  # ONNX Runtime fuses the transposition with the product
    return Product(tuple(map(skip_views, operands.values())), use, is_exclusive and _has_one_reader(value))


def _indices_of_factors(node: ir.Node) -> tuple[int, ...]:
    """Return the indices of a node's matrix factors, or of the rows that it writes into zeros."""
    if (node.domain, node.op_type) in _TABLES:
        is_zero = node.domain != "" or is_known_zero(node.inputs[0], of_finite=False, largest=_LARGEST_CONSTANT)
        return (2,) if is_zero and attribute(node, "reduction", "none") in ("none", "add") else ()
    if node.domain != "" or node.op_type not in ("Gemm", "MatMul"):
        return ()
    # A factor above 1 is not in the bound, and an addend has no bound.
    is_bounded = abs(attribute(node, "alpha", 1.0)) <= 1 and all(value is None for value in node.inputs[2:])
    return (0, 1) if is_bounded else ()


def _find_source(node: ir.Node) -> int | None:
    """Return the index of the operand that a node moves, or multiplies by a constant number."""
    if has_trait(node, VIEWS):
        return 0
    if node.domain != "" or node.op_type != "Mul":
        return None
    return next((1 - i for i in (0, 1) if is_number_up_to_one(node.inputs[i])), None)


def _has_one_reader(value: ir.Value) -> bool:
    return len(uses_of(value)) == 1 and not value.is_graph_output()
