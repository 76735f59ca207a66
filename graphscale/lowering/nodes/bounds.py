"""Bounds of gradients, by the operands of the products that they are sums of.

A gradient dw = MatMul(x, dy) has no element larger than the sum of all |x| times the sum of all |dy|, and neither has a
part of its sums (the triangle inequality). Where that is far below the largest float32 number, dw is finite: x and dy
are the activations of a batch, and smaller than the weights. A gradient that is no sum of such products is read: where
the sum of its elements is finite, so are they.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir

from graphscale.graph.builder import Builder
from graphscale.graph.values import constant_tensor, operand_at
from graphscale.lowering.nodes.gradient_tests import GradientTest
from graphscale.lowering.nodes.terms import Term
from graphscale.lowering.sizes import count_elements
from graphscale.lowering.thresholds import Thresholds

__all__ = ["ScalarBuilder", "add_sum", "add_tests"]

_SAFE = 1e36  # far enough below 3.4e38 for the rounding of the sums, and for the sum of 100 terms
_LARGEST = 126  # the power of two that is the largest one with a normal reciprocal


class ScalarBuilder(Builder):
    """Creates nodes whose results are float32 scalars, or of the shape of an operand, in a graph or in a branch."""

    def flag(self, op_type: str, inputs: Sequence[ir.Value]) -> ir.Value:
        return self.op(op_type, inputs, dtype=ir.DataType.BOOL)

    def total(self, terms: Sequence[ir.Value]) -> ir.Value:
        """Add the sum of scalars."""
        return self.op("Sum", terms) if len(terms) > 1 else terms[0]

    def constant(self, name: str, value: float) -> ir.Value:
        with np.errstate(over="ignore"):
            return self.editor.shared_constant(f"graphscale/{self.mark}.{name}", np.asarray(value, dtype=np.float32))

    def excess(self, number: ir.Value) -> ir.Value:
        """Add a node that gives the number if it is too large, else 0."""
        return self.op("ThresholdedRelu", [number], alpha=_SAFE)

    @property
    def one(self) -> ir.Value:
        return self.constant("one", 1.0)

    @property
    def zero(self) -> ir.Value:
        return self.constant("zero", 0.0)

    @property
    def limit(self) -> ir.Value:
        return self.constant("limit", _SAFE)


def add_tests(
    make: ScalarBuilder, scale: ir.Value, tests: Sequence[GradientTest], thresholds: Thresholds
) -> tuple[ir.Value, dict[ir.Node, ir.Value], dict[ir.Value, ir.Value]]:
    """Compute bounds and sums, and unscale the cotangents of gradients whose bound fits.

    Returns:
        a flag: all gradients fit, and may be unscaled where the plan says, in the branch that applies a step at once;
        for each node that unscales a gradient, the factor of that gradient's cotangents;
        for each number that gradients are multiplied by, its quotient with the scale.
    """
    inverse, rates = make.one, dict.fromkeys(operand_at(test.rate) for test in tests if test.rate is not None)
    is_moved = bool(rates) or any(test.early for test in tests)
    if is_moved:
        reciprocal = make.op("Reciprocal", [scale])
        quotients = {rate: make.op("Mul", [rate, reciprocal], like=rate) for rate in rates}
        exact = _add_exactness(make, scale, quotients)
        if any(test.early for test in tests):
            inverse = make.op("Where", [exact, reciprocal, make.one])
    sums: dict[ir.Value, ir.Value] = {}
    bounds, factors = list[ir.Value](), {}
    unseen, before = list[ir.Value](), list[ir.Value]()
    for test in tests:
        if test.summed is not None:
            unseen.append(add_sum(make, test.summed, thresholds))
            bounds.append(unseen[-1])
        parts = [_add_bound(make, term, sums) for term in test.terms]
        bounds += parts
        if not test.early:
            continue
        # A factor waits for the sums of gradients before it. Nothing else does until the step is decided: ONNX Runtime
        # would form them last, when the operands have left the caches.
        if unseen:
            before = [make.total([*before, *map(make.excess, unseen)])]
            unseen = []
        factors[test.division] = factor = _add_factor(make, inverse, test.terms, parts, before)
        for use in dict.fromkeys(term.cotangent for term in test.terms):
            assert use is not None
            (node, index), cotangent = use, operand_at(use)
            node.replace_input_with(index, make.op("Mul", [cotangent, factor], like=cotangent))
    # A sum below the limit has only terms below it; NaN is below nothing.
    if not is_moved:
        # No quotient may overflow, either: a scale below 1 makes numbers larger.
        is_large = make.flag("Less", [make.one, scale])
        limit = make.op("Mul", [make.limit, make.op("Where", [is_large, make.one, scale])])
        return make.flag("Less", [make.total(bounds), limit]), {}, {}
    fit = make.flag("Less", [make.total(bounds), make.limit])
    return make.flag("And", [fit, exact]), factors, quotients


def _add_factor(
    make: ScalarBuilder, inverse: ir.Value, terms: Sequence[Term], parts: Sequence[ir.Value], before: Sequence[ir.Value]
) -> ir.Value:
    """Add the factor for the cotangents of one gradient: 1 / scale where bounds fit, else 1.

    A bound that is NaN comes from zeros times a sum that has overflowed, or from an operand that is not finite. The
    former is 0, in any order of summation. So NaN may count for 0 if the latter makes the gradient not finite.

    `parts` are the bounds of the terms, `before` other numbers that should be small. `inverse` is 1 where 1 / scale
    would not be exact.
    """
    if not all(term.is_kept for term in terms):
        fits = make.flag("Less", [make.total([*parts, *before]), make.limit])
        return make.op("Where", [fits, inverse, make.one])
    excess = make.total([*map(make.excess, parts), *before])
    return make.op("Clip", [excess, inverse, make.one])


def _add_exactness(make: ScalarBuilder, scale: ir.Value, quotients: Mapping[ir.Value, ir.Value]) -> ir.Value:
    """Add a flag that is true if the place where a gradient is unscaled makes no difference, unless it overflows.

    The scale must be a power of two, which any other one than the policy's can only have been loaded; at least 1, for
    a smaller one makes numbers larger; and not so large that 1 / scale, or its product with a rate, is subnormal.
    Of the largest such power of two the remainder is 0 then. Of another scale of at least 1 it is 2**-23 or more.
    """
    largest, fed = _LARGEST, []
    for rate in quotients:
        exponent = _find_exponent(rate)
        if exponent is None or _LARGEST + exponent < 0:
            fed.append(rate)
        else:
            largest = min(largest, _LARGEST + exponent)
    remainder = make.op("Mod", [make.constant("largest_scale", 2.0**largest), scale], fmod=1)
    is_power = make.flag("Less", [remainder, make.constant("no_remainder", 2.0**-24)])
    exact = make.flag("And", [is_power, make.flag("Less", [make.constant("half", 0.5), scale])])
    for rate in fed:
        # A quotient that is subnormal may be inexact; that of 0 is not.
        error = make.op("Sub", [make.op("Mul", [quotients[rate], scale], like=rate), rate], like=rate)
        is_off = make.flag("Less", [make.zero, make.op("ReduceL1", [error], keepdims=0)])
        exact = make.flag("And", [exact, make.flag("Not", [is_off])])
    return exact


def _find_exponent(rate: ir.Value) -> int | None:
    """Return the exponent of the largest power of two up to a number, if that is a constant other than 0."""
    tensor = constant_tensor(rate)
    number = 0.0 if tensor is None else abs(float(np.ravel(tensor.numpy())[0]))
    return math.frexp(number)[1] - 1 if 0 < number < math.inf else None


def _add_bound(make: ScalarBuilder, term: Term, sums: dict[ir.Value, ir.Value]) -> ir.Value:
    """Add an upper bound of the sum of the absolute values of a term."""
    for value in (*term.operands, *term.factors):
        if value not in sums:
            sums[value] = make.op("ReduceL1", [value], keepdims=0)
    # A factor below 1 must not hide what is too large before it.
    numbers = [sums[value] for value in term.operands]
    numbers += [make.op("Add", [sums[value], make.one]) for value in term.factors]
    numbers += [] if term.largest == 1 else [make.constant(f"largest.{term.largest!r}", term.largest)]
    return functools.reduce(lambda a, b: make.op("Mul", [a, b]), numbers)


def add_sum(make: ScalarBuilder, value: ir.Value, thresholds: Thresholds) -> ir.Value:
    """Add the absolute value of the sum of all elements: where it is finite, so are they.

    That of a large value is formed by rows, side by side.
    """
    shape = value.shape
    assert shape is not None
    size, rank = count_elements(value), len(shape)
    if size >= thresholds.row_sum_elements and size >= thresholds.row_elements * shape.numpy()[0]:
        axes = make.editor.shared_constant(f"graphscale/{make.mark}.axes.{rank}", np.arange(1, rank, dtype=np.int64))
        value = make.op("ReduceSum", [value, axes], keepdims=0, shape=ir.Shape(shape[:1]))
    return make.op("Abs", [make.op("ReduceSum", [value], keepdims=0)])
