"""The sizes and shapes of values, and the values that they are views of."""

from __future__ import annotations

import math

import onnx_ir as ir

from graphscale.graph.walks import source_by_trait
from graphscale.operators import Trait

__all__ = ["VIEWS", "count_elements", "same_shape", "skip_views"]

# The elements of the first operand, in another order or with another sign.
VIEWS = Trait.RESHAPE | Trait.PERMUTE | Trait.SIGN
_BATCH = 64  # elements assumed for an axis of unknown size


def same_shape(one: ir.Value, other: ir.Value) -> bool:
    """Return whether two values have the same shape, and no axis of unknown size."""
    return one.shape is not None and one.shape.is_static() and one.shape == other.shape


def skip_views(value: ir.Value) -> ir.Value:
    """Return the value above a chain of nodes that only move its elements or change their sign."""
    return source_by_trait(value, VIEWS)


def count_elements(value: ir.Value) -> int:
    """Return the number of elements that a value has, or may have."""
    if value.shape is None:
        return _BATCH**2
    return math.prod(axis if isinstance(axis, int) else _BATCH for axis in value.shape)
