"""The sizes of values, and the thresholds above which a rewrite of a step for a CPU pays."""

from __future__ import annotations

import dataclasses
import math

import onnx_ir as ir

from graphscale.graph.walks import source_by_trait
from graphscale.operators import Trait

__all__ = ["PRODUCTION", "VIEWS", "Thresholds", "count_elements", "same_shape", "skip_views"]

# Operators that return the elements of the first operand, in another order or with another sign.
VIEWS = Trait.RESHAPE | Trait.PERMUTE | Trait.SIGN
_BATCH = 64  # elements assumed for an axis of unknown size


@dataclasses.dataclass(frozen=True)
class Thresholds:
    """Sizes above which each rewrite of a step pays, measured on two cores with benchmarks/step_cost.py.

    They choose between computations with equal results.

    Attributes:
        branch_elements: elements of all states together; below, one If for all costs more than the guards.
        probe_elements: elements of a gradient; below, a node for its finite check costs more than the check's work.
        bound_elements: elements of a gradient; below, reading it costs less than computing its bound.
        unbounded_passes: passes over a gradient that is divided and tested without a bound: two reads, one write. A
            bound together with early unscaling may cost at most as much memory traffic.
        bound_share: operand elements per gradient element; above, a bound, which one thread computes, costs more than
            summing up the gradient by rows on all threads.
        row_sum_elements: elements of a gradient; below, one thread sums it up as fast as all threads do by rows.
        row_elements: elements per row; below, the sums by rows are as long as the gradient itself.
    """

    branch_elements: int = 2**16
    probe_elements: int = 2**13
    bound_elements: int = 2**13
    unbounded_passes: float = 3
    bound_share: float = 0.75
    row_sum_elements: int = 2**19
    row_elements: int = 2**6


PRODUCTION = Thresholds()


def same_shape(one: ir.Value, other: ir.Value) -> bool:
    """Return whether two values have the same shape, and no axis of unknown size."""
    return one.shape is not None and one.shape.is_static() and one.shape == other.shape


def skip_views(value: ir.Value) -> ir.Value:
    """Return the value above a chain of nodes that only move its elements or change their sign."""
    return source_by_trait(value, VIEWS)


def count_elements(value: ir.Value) -> int:
    """Return the number of a value's elements, an assumed one for unknown sizes."""
    if value.shape is None:
        return _BATCH**2
    return math.prod(axis if isinstance(axis, int) else _BATCH for axis in value.shape)
