"""Bounds of gradients, by the operands of the products that they are.

A gradient dw = MatMul(x, dy) has no element larger than the sum of all |x| times the sum of all |dy|, and neither has a
part of its sums (the triangle inequality). Where that is far below the largest float32 number, dw is finite: x and dy
are the activations of a batch, and smaller than the weights. The gradient of a table has no element larger than the sum
of all |rows|. A gradient that is neither is read: where the sum of its elements is finite, so are they.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from graphscale.graph.builder import Builder
from graphscale.graph.values import Use, operand_at
from graphscale.lowering.nodes.gradient_tests import GradientTest, Product
from graphscale.lowering.nodes.rates import divide_rates
from graphscale.lowering.thresholds import Thresholds, count_elements

__all__ = ["OPSET", "SAFE", "Fit", "ScalarBuilder", "add_bound", "add_inverse", "add_sum", "add_tests"]

OPSET = 13  # since which ReduceSum takes its axes as an input

# Far enough below 3.4e38 for the rounding of the sums, and for the sum of 100 of them; a number that a file can hold.
SAFE = float(np.float32(1e36))
# 2**126 is the largest power of two with a normal reciprocal.
_NUMBERS = {"zero": 0, "half": 0.5, "one": 1, "limit": SAFE, "largest_scale": 2.0**126, "no_remainder": 2.0**-24}


class ScalarBuilder(Builder):
    """Creates nodes whose results are float32 scalars, or of the shape of an operand, in a graph or in a branch."""

    def flag(self, op_type: str, inputs: Sequence[ir.Value | None]) -> ir.Value:
        return self.op(op_type, inputs, dtype=ir.DataType.BOOL)

    def constant(self, name: str) -> ir.Value:
        array = np.asarray(_NUMBERS[name], dtype=np.float32)
        return self.editor.shared_constant(f"graphscale/{self.mark}.{name}", array)

    def rename(self, copies: Iterable[ir.Node]) -> None:
        """Give copied nodes and their values names of their own."""
        for node in copies:
            node.name = self.editor.unique(node.name or "node")
            for value in node.outputs:
                value.name = self.editor.unique(value.name or "value")


class Fit(NamedTuple):
    """The verdict on all gradients together, before they are formed.

    Attributes:
        flag: all are finite, and can be unscaled exactly by a product with `inverse`.
        inverse: 1 / scale; None if every gradient is divided.
        quotients: each rate by the scale.
    """

    flag: ir.Value
    inverse: ir.Value | None
    quotients: dict[ir.Value, ir.Value]


def add_tests(make: ScalarBuilder, scale: ir.Value, tests: Sequence[GradientTest], thresholds: Thresholds) -> Fit:
    """Compute bounds and sums of gradients, and quotients of rates."""
    sums: dict[ir.Value, ir.Value] = {}
    bounds = [
        add_sum(make, operand_at(Use(test.division, 0)) if test.rate else test.division.outputs[0], thresholds)
        if test.product is None
        else add_bound(make, test.product, sums)
        for test in tests
    ]
    # A sum below the limit has only terms below it; NaN is below nothing. ONNX Runtime forms the terms in this order,
    # as soon as it can: then their operands are still in the caches.
    forward = [value for test in reversed(tests) if test.product is not None for value in test.product.unscaled]
    terms = [*dict.fromkeys(sums[value] for value in forward), *bounds]
    total = functools.reduce(lambda one, other: make.op("Add", [one, other]), terms)
    if any(test.early or test.rate is not None for test in tests):
        exact, inverse = add_inverse(make, scale)
        rates = [operand_at(test.rate) for test in tests if test.rate is not None]
        quotients, flags = divide_rates(make, scale, inverse, rates)
        conditions = [make.flag("Less", [total, make.constant("limit")]), exact, *flags]
        flag = functools.reduce(lambda one, other: make.flag("And", [one, other]), conditions)
        return Fit(flag, inverse, quotients)
    # No quotient may overflow, either: a scale below 1 makes numbers larger.
    is_large = make.flag("Less", [make.constant("one"), scale])
    limit = make.op("Mul", [make.constant("limit"), make.op("Where", [is_large, make.constant("one"), scale])])
    return Fit(make.flag("Less", [total, limit]), None, {})


def add_inverse(make: ScalarBuilder, scale: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Add a flag and a number: 1 / scale, and true, if gradients may be unscaled anywhere; otherwise 1, and false.

    The scale must be a power of two, for any other one can be loaded; at least 1, for a smaller one makes numbers
    larger; and not so large that 1 / scale is subnormal. The largest such power of two divided by it leaves 0 then, and
    by any other number of at least 1 it leaves 2**-23 or more.
    """
    remainder = make.op("Mod", [make.constant("largest_scale"), scale], fmod=1)
    is_power = make.flag("Less", [remainder, make.constant("no_remainder")])
    exact = make.flag("And", [is_power, make.flag("Less", [make.constant("half"), scale])])
    return exact, make.op("Where", [exact, make.op("Reciprocal", [scale]), make.constant("one")])


def add_bound(make: ScalarBuilder, product: Product, sums: dict[ir.Value, ir.Value]) -> ir.Value:
    """Add a bound of the absolute values of a product; `sums` are those of operands, known ones and new ones."""
    for value in product.operands:
        if value not in sums:
            sums[value] = make.op("ReduceL1", [value], keepdims=0)
    factors = [sums[value] for value in product.operands]
    return make.op("Mul", factors) if len(factors) > 1 else factors[0]


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
