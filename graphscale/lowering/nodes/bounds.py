"""Bounds of gradients, by the operands of their products.

No element of a gradient dw = MatMul(x, dy), and no partial sum of one, is larger than the sum of all |x| times the sum
of all |dy| (the triangle inequality). If this bound is far below the largest float32 number, dw is finite. The bound
costs little, since x and dy are the activations of a batch, and smaller than the weights. No element of a table's
gradient is larger than the sum of all |rows|. Other gradients are read: if the sum of the elements is finite, the
elements are finite.
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

OPSET = 13  # the first opset with the axes of ReduceSum as an input

# Far enough below 3.4e38 for the rounding of the sums, and for the sum of 100 bounds.
SAFE = float(np.float32(1e36))
# 2**126 is the largest power of two with a normal reciprocal.
_NUMBERS = {"zero": 0, "half": 0.5, "one": 1, "limit": SAFE, "largest_scale": 2.0**126, "no_remainder": 2.0**-24}


class ScalarBuilder(Builder):
    """A builder of nodes with float32 scalars, or with an operand's shape, as results, in a graph or a branch."""

    def flag(self, op_type: str, inputs: Sequence[ir.Value | None]) -> ir.Value:
        return self.op(op_type, inputs, dtype=ir.DataType.BOOL)

    def constant(self, name: str) -> ir.Value:
        array = np.asarray(_NUMBERS[name], dtype=np.float32)
        return self.editor.shared_constant(f"graphscale/{self.mark}.{name}", array)

    def rename(self, copies: Iterable[ir.Node]) -> None:
        """Rename copied nodes and their values."""
        for node in copies:
            node.name = self.editor.unique(node.name or "node")
            for value in node.outputs:
                value.name = self.editor.unique(value.name or "value")


class Fit(NamedTuple):
    """The verdict on all gradients together, before they are computed.

    Attributes:
        flag: true if all are finite, and a product with `inverse` unscales them exactly.
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
    # A sum below the limit has only terms below it; a comparison with NaN is false. ONNX Runtime computes the terms in
    # this order, as soon as possible: then their operands are still in the caches.
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
    # The quotients may not overflow either: a scale below 1 makes numbers larger.
    is_large = make.flag("Less", [make.constant("one"), scale])
    limit = make.op("Mul", [make.constant("limit"), make.op("Where", [is_large, make.constant("one"), scale])])
    return Fit(make.flag("Less", [total, limit]), None, {})


def add_inverse(make: ScalarBuilder, scale: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Add a flag and a number: true and 1 / scale, if gradients may be unscaled anywhere; else false and 1.

    The flag is true for a power of two (another scale may be loaded), of at least 1 (a smaller scale makes numbers
    larger), for which 1 / scale is no subnormal number. Then the remainder of the largest such power of two, divided by
    the scale, is 0; for any other scale of at least 1, it is 2**-23 or more.
    """
    remainder = make.op("Mod", [make.constant("largest_scale"), scale], fmod=1)
    is_power = make.flag("Less", [remainder, make.constant("no_remainder")])
    exact = make.flag("And", [is_power, make.flag("Less", [make.constant("half"), scale])])
    return exact, make.op("Where", [exact, make.op("Reciprocal", [scale]), make.constant("one")])


def add_bound(make: ScalarBuilder, product: Product, sums: dict[ir.Value, ir.Value]) -> ir.Value:
    """Add a bound of the absolute values of a product; `sums` holds known sums of operands, and gets new ones."""
    for value in product.operands:
        if value not in sums:
            sums[value] = make.op("ReduceL1", [value], keepdims=0)
    factors = [sums[value] for value in product.operands]
    return make.op("Mul", factors) if len(factors) > 1 else factors[0]


def add_sum(make: ScalarBuilder, value: ir.Value, thresholds: Thresholds) -> ir.Value:
    """Add the absolute value of the sum of all elements: if it is finite, the elements are finite.

    A large value is summed by rows, in parallel.
    """
    shape = value.shape
    assert shape is not None
    size, rank = count_elements(value), len(shape)
    if size >= thresholds.row_sum_elements and size >= thresholds.row_elements * shape.numpy()[0]:
        axes = make.editor.shared_constant(f"graphscale/{make.mark}.axes.{rank}", np.arange(1, rank, dtype=np.int64))
        value = make.op("ReduceSum", [value, axes], keepdims=0, shape=ir.Shape(shape[:1]))
    return make.op("Abs", [make.op("ReduceSum", [value], keepdims=0)])
