"""Sizes from which a rewrite of a step for a CPU pays."""

from __future__ import annotations

import dataclasses

__all__ = ["PRODUCTION", "Thresholds"]


@dataclasses.dataclass(frozen=True)
class Thresholds:
    """Sizes from which each rewrite of a step pays, measured on two cores with benchmarks/step_cost.py.

    The results of a step do not depend on them, except for telling which of two equal ways computes them.

    Attributes:
        branch_elements: elements of all states together; below, one If for all costs more than the guards it replaces.
        probe_elements: elements of a gradient; below, a node for its finite check costs more than the check's work.
        bound_elements: elements of a gradient; below, reading it costs less than computing its bound.
        unbounded_passes: passes over a gradient that is divided and tested without a bound: two to read it, one to
            write it. A bound together with early unscaling may cost at most as much memory traffic.
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
