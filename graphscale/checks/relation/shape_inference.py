"""The shape of a result by the shapes of its operand terms: folded constants say more than the inference of ONNX."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from graphscale.checks.relation.terms import Shape, Terms
from graphscale.operators import OPERATORS, Trait

__all__ = ["Sizes", "infer_shape", "sizes_of"]

Sizes = tuple[int, ...]


def sizes_of(shape: Shape) -> Sizes | None:
    """Return a shape whose sizes are all numbers; None for others."""
    return tuple(shape) if shape is not None and all(isinstance(size, int) for size in shape) else None  # type: ignore[arg-type]


def infer_shape(
    terms: Terms, op_type: str, attributes: Mapping[str, Any], operands: Sequence[int | None]
) -> Sizes | None:
    """Return the sizes of the first result of an operator of ONNX, as far as its operands tell them."""
    if not operands or operands[0] is None:
        return None
    first, numbers = sizes_of(terms.shapes[operands[0]]), None
    if len(operands) > 1 and (array := terms.array(operands[1])) is not None and array.dtype == np.int64:
        numbers = tuple(int(number) for number in array.reshape(-1))
    if op_type == "Reshape" and numbers is not None and not attributes.get("allowzero"):
        return _reshaped(first, numbers)
    if first is None:
        return None
    if op_type == "Transpose":
        return tuple(first[axis] for axis in attributes.get("perm", range(len(first))[::-1]))
    if op_type == "Squeeze" and numbers is not None:
        return tuple(size for axis, size in enumerate(first) if axis not in {n % len(first) for n in numbers})
    if op_type == "Unsqueeze" and numbers is not None:
        return _with_unit_axes(first, numbers)
    row = OPERATORS.get(("", op_type))
    if row is None or Trait.ELEMENTWISE not in row.traits:
        return None
    sizes = [None if t is None else sizes_of(terms.shapes[t]) for t in operands]
    known = [each for each in sizes if each is not None]
    return np.broadcast_shapes(*known) if len(known) == len(sizes) else None


def _reshaped(first: Sizes | None, numbers: Sizes) -> Sizes | None:
    if 0 in numbers and first is None:
        return None
    sizes = [first[axis] if n == 0 and first is not None else n for axis, n in enumerate(numbers)]
    if -1 not in sizes:
        return tuple(sizes)
    if first is None or (others := math.prod(n for n in sizes if n != -1)) == 0:
        return None
    return tuple(math.prod(first) // others if n == -1 else n for n in sizes)


def _with_unit_axes(sizes: Sizes, axes: Sizes) -> Sizes:
    rank = len(sizes) + len(axes)
    added, rest = {axis % rank for axis in axes}, iter(sizes)
    return tuple(1 if axis in added else next(rest) for axis in range(rank))
