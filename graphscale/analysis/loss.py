"""The choice of the loss."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Collection, Iterator, Sequence

import onnx_ir as ir

from graphscale.analysis.updates import NEXT_STATE, average_factors, find_coefficients, known_factors
from graphscale.graph.values import (
    Use,
    constant_number,
    constant_tensor,
    inputs_of,
    is_float,
    is_known_zero,
    is_scalar,
    operand_at,
    operands_of,
    subgraphs,
)
from graphscale.graph.walks import NodeIndex, eliminate, reach
from graphscale.operators import Kind, Trait, has_trait, rule_of

__all__ = [
    "LEAST_SCALE",
    "find_carried_number",
    "find_loss_candidates",
    "is_complemented",
    "is_differentiable",
    "is_number",
    "may_be_scaled",
    "smooth_operands",
]

# A smaller constant may be a factor of a derivative.
LEAST_SCALE = 8


def is_number(value: ir.Value, depth: int = 8) -> bool:
    """Return whether a value is a scalar, by its operator where its shape is unknown."""
    node = value.producer()
    if value.shape is not None or node is None or depth == 0:
        return is_scalar(value)
    if has_trait(node, Trait.REDUCTION):
        return node.attributes.get_int("keepdims", 1) == 0 and not ("axes" in node.attributes or len(node.inputs) > 1)
    if node.op_type == "SoftmaxCrossEntropyLoss":
        return node.attributes.get_string("reduction", "mean") != "none"
    return has_trait(node, Trait.ELEMENTWISE) and all(is_number(v, depth - 1) for v in inputs_of(node))


def find_loss_candidates(graph: ir.Graph, others: set[ir.Value]) -> list[ir.Value]:
    """Find the outputs that could be the loss: scalars of floating point that are no next value of a number."""
    values = [*graph.inputs, *graph.initializers.values()]
    numbers = {value for value in values if is_scalar(value)}
    scalars = [value for value in graph.outputs if value not in others and value.dtype is not None and is_scalar(value)]
    replaced = {
        value: [number for number, c in find_coefficients(value, numbers).items() if _is_next(value, number, c)]
        for value in scalars
        if value.producer() is not None and is_float(value)
    }
    # A learnt number that a loss contains has another next value.
    nexts, claims = dict(eliminate(replaced)), Counter(itertools.chain(*replaced.values()))
    left = [value for value, each in replaced.items() if value not in nexts and all(claims[n] > 1 for n in each)]
    found = [value for value in left if is_differentiable(value)]
    inputs = {value for value in graph.inputs if value in numbers and is_float(value)}
    return [value for value in found if not _find_averaged(value, inputs)] or found


def _is_next(value: ir.Value, number: ir.Value, coefficient: float) -> bool:
    """Return whether a value is the next value of a number: a sum of losses, their average, their minimum."""
    if coefficient < NEXT_STATE or number.is_graph_input():
        return coefficient >= NEXT_STATE
    if is_complemented(number):
        return False
    node = value.producer()
    if coefficient < 1 or (node is not None and node.op_type in ("Min", "Max")):
        return True
    # A constant may be added to a loss.
    if node is None or node.op_type != "Add" or number not in node.inputs or not is_known_zero(number):
        return False
    return any(operand is not None and operand.is_graph_output() for operand in node.inputs)


def is_complemented(number: ir.Value) -> bool:
    """Return whether a stored number is 1 and values are subtracted from it, such as a Dice coefficient."""
    return constant_number(number) == 1 and any(node.op_type == "Sub" and index == 0 for node, index in number.uses())


def find_carried_number(graph: ir.Graph, loss: ir.Value, may_be_stored: bool) -> ir.Value | None:
    """Find a number whose next value may be the loss: a zero in a sum with it, or a number averaged with it.

    A running sum begins with a stored zero, and so does `sum` in Python.

    Args:
        graph: the main graph.
        loss: the loss.
        may_be_stored: whether state may be an initializer.
    """
    values = (*graph.inputs, *(graph.initializers.values() if may_be_stored else ()))
    scalars = [value for value in values if is_scalar(value)]
    numbers = set(filter(is_float, scalars))
    stored = (value for value in scalars if not value.is_graph_input())
    added = {value for value in stored if any(node.op_type == "Add" for node, _ in value.uses())}
    zero = next((value for value in find_coefficients(loss, added) if is_known_zero(value)), None)
    return _find_averaged(loss, numbers) if zero is None else zero


def _find_averaged(value: ir.Value, numbers: Collection[ir.Value]) -> ir.Value | None:
    """Find the number whose share is an operand of a sum, for a share that is unknown and computed from numbers."""
    if not numbers:
        return None
    constant = find_coefficients(value, numbers, known_factors())
    return next((v for v in find_coefficients(value, numbers, average_factors()) if v not in constant), None)


def is_differentiable(value: ir.Value) -> bool:
    """Return whether a value depends on an input or a weight by floating-point operators alone, unlike an accuracy."""
    return any(v.producer() is None for v in reach([value], smooth_operands))


def smooth_operands(value: ir.Value) -> list[ir.Value]:
    """Return the operands of a differentiable function, without single numbers."""
    node = value.producer()
    rule = None if node is None else rule_of(node)
    if node is None or (rule is not None and rule.kind in (Kind.SHAPE, Kind.DEGREE_0, Kind.COMPARE)):
        return []
    operands = inputs_of(node)
    if rule is not None and rule.kind is Kind.LINEAR:
        operands = tuple(operand_at(Use(node, i)) for i in rule.operands(len(operands)) if node.inputs[i] is not None)
    if node.op_type == "If":
        operands = tuple(body.outputs[value.index() or 0] for body in subgraphs(node))
    floats = [operand for operand in operands if is_float(operand)]
    return [operand for operand in floats if constant_tensor(operand) is None or not is_scalar(operand)]


def may_be_scaled(graph: ir.Graph, index: NodeIndex) -> bool:
    """Return whether a number could be the own loss scale of a step: it is fed or carried, or a large constant."""
    if index.holders or index.nodes_with(Trait.EFFECT):
        return True
    made = (value for node in index.nodes_of("Constant") for value in node.outputs)
    numbers = [v for v in (*graph.inputs, *graph.initializers.values(), *made) if is_scalar(v) and is_float(v)]
    nexts = (v for v in graph.outputs if (v.shape is None or is_scalar(v)) and is_float(v))
    carried = set().union(*map(_find_stored, nexts))
    if any(_multiplies_and_divides([v]) for v in numbers if v.is_graph_input() or v in carried):
        return True
    known = {value: number for value in numbers if (number := constant_number(value)) is not None}
    for large in {number for number in known.values() if LEAST_SCALE <= number < math.inf}:
        same = [value for value, number in known.items() if number in (large, 1 / large)]
        if 1 / large in known.values() or _multiplies_and_divides(same):
            return True
    return False


def _find_stored(value: ir.Value) -> set[ir.Value]:
    """Return the ancestors of a value up to flags; none with a fed number or batch, which is no constant."""
    found = set()
    for above in reach([value], lambda v: () if (node := v.producer()) is None or _is_flag(v) else operands_of(node)):
        if above.is_graph_input() and not _is_flag(above):
            return set()
        found.add(above)
    return found


def _is_flag(value: ir.Value) -> bool:
    return value.dtype is ir.DataType.BOOL


def _multiplies_and_divides(numbers: Sequence[ir.Value]) -> bool:
    """Return whether numbers, or others that are computed from these and from no tensor, may do both to a value."""
    found = {*reach(numbers, _numbers_below)}
    uses = [(node, i, rule) for v in found for node, i in v.uses() if (rule := rule_of(node)) is not None]
    divisions = [node for node, i, rule in uses if rule.power < 0 or (rule.kind is Kind.QUOTIENT and i == 1)]
    is_inverted = any(value in found for node in divisions for value in node.outputs)
    products = (
        node
        for node, i, rule in uses
        if rule.gradient or rule.kind is Kind.PRODUCT or (rule.kind is Kind.QUOTIENT and (i == 0 or is_inverted))
    )
    is_data = (value not in found and constant_tensor(value) is None for node in products for value in inputs_of(node))
    return bool(divisions) and any(is_data)


def _numbers_below(value: ir.Value) -> Iterator[ir.Value]:
    """Yield the results of nodes that read a number beside numbers and constants."""
    for node, _ in value.uses():
        if all(each is value or is_scalar(each) or constant_tensor(each) is not None for each in inputs_of(node)):
            yield from node.outputs
