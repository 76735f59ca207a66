"""Windows: the elements of an operand behind some elements of a result, by position.

Optimizers for many tensors at once stack or concatenate them, update the whole, and split it again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import onnx_ir as ir

from graphscale.graph.values import constant_tensor, inputs_of
from graphscale.operators import Trait, attribute, has_trait

__all__ = ["Window", "window_above"]

# The first element and the number of elements, in row-major order; None for all elements, or for unknown ones.
Window = tuple[int, int] | None


def window_above(node: ir.Node, value: ir.Value, operand: ir.Value, window: Window) -> tuple[bool, Window]:
    """Return whether a window of a node's output depends on an operand, and the window of the operand.

    Args:
        node: an elementwise sum of operands, or a node that moves their elements.
        value: its output.
        operand: one of its operands.
        window: the window of the output.
    """
    if has_trait(node, Trait.WINDOW):
        size, start = _size(value), _start(node, value)
        if size is None or start is None:
            return True, None
        first, length = window or (0, size)
        return True, (start + first, length)
    if window is None:
        return True, None
    if node.op_type == "Concat":
        start, size = _start_in_concat(node, value, operand), _size(operand)
        if size is None or start is None:
            return True, None
        first, end = max(window[0] - start, 0), min(sum(window) - start, size)
        return first < end, (first, end - first)
    is_kept = has_trait(node, Trait.RESHAPE | Trait.CAST)
    is_kept = is_kept or (has_trait(node, Trait.ELEMENTWISE) and operand.shape == value.shape)
    return True, window if is_kept else None


def _size(value: ir.Value) -> int | None:
    return None if value.shape is None else _product([*value.shape])


def _product(dims: Sequence[int | ir.SymbolicDim]) -> int | None:
    known = [dim for dim in dims if isinstance(dim, int)]
    return math.prod(known) if len(known) == len(dims) else None


def _start(node: ir.Node, value: ir.Value) -> int | None:
    """Return the first element of the window of an operand in the result of a Slice, Split or Gather."""
    operand, *others = node.inputs
    if operand is None or operand.shape is None or (node.op_type != "Split" and not others):
        return None
    given = [None if each is None else _number(each) for each in others]
    axis = attribute(node, "axis", 0)
    if node.op_type == "Gather":
        first = given[0]
    elif node.op_type == "Split":
        first = _sum_before(node.outputs, value, axis)
    else:
        ones = [given[i] if i < len(others) and others[i] is not None else default for i, default in ((2, 0), (3, 1))]
        axis, first = ones[0], given[0] if ones[1] == 1 else None
    if first is None or axis is None or (rest := _rest(operand.shape, axis)) is None:
        return None
    size = operand.shape[axis]
    return (first + size if first < 0 else first) * rest if isinstance(size, int) else None


def _start_in_concat(node: ir.Node, value: ir.Value, operand: ir.Value) -> int | None:
    """Return the first element of the window of a Concat's output with one operand, None for a repeated operand."""
    operands, axis = inputs_of(node), attribute(node, "axis", 0)
    if value.shape is None or operands.count(operand) != 1:
        return None
    first, rest = _sum_before(operands, operand, axis), _rest(value.shape, axis)
    return None if first is None or rest is None else first * rest


def _rest(shape: ir.Shape, axis: int) -> int | None:
    """Return the number of adjacent elements at one index of an axis, None for an axis with others before it."""
    if not -len(shape) <= axis < len(shape):
        return None  # a damaged model
    axis %= len(shape)
    return _product(shape[axis + 1 :]) if _product(shape[:axis]) == 1 else None


def _sum_before(values: Sequence[ir.Value], value: ir.Value, axis: int) -> int | None:
    """Return the sum of the sizes along an axis of the values before one, None if one is unknown."""
    before = values[: values.index(value)]
    shapes = [each.shape for each in before if each.shape is not None and -len(each.shape) <= axis < len(each.shape)]
    known = [dim for shape in shapes if isinstance(dim := shape[axis], int)]
    return sum(known) if len(known) == len(before) else None


def _number(value: ir.Value) -> int | None:
    tensor = constant_tensor(value)
    if tensor is None or tensor.size != 1 or not tensor.dtype.is_integer():
        return None
    return int(tensor.numpy().flat[0])
