"""The whole numbers that an input of a graph may hold, by the operators that read them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import numpy as np
import onnx_ir as ir

from graphscale.graph.values import constant_tensor
from graphscale.graph.walks import reach
from graphscale.operators import OPERATORS, Trait, attribute, has_trait, rule_of

__all__ = ["class_axis", "find_index_limit", "make_axis_length"]

# On whole numbers: a sum of indices is an index with an offset.
_WHOLE_MOVES = {"Add": (0, 1), "Max": (0, 1), "Min": (0, 1), "Sub": (0,)}

Length = Callable[[ir.Value, int], int | None]


def find_index_limit(value: ir.Value, length: Length) -> int | None:
    """Return the number that an input's whole numbers must be below to be valid indices, None if they are none."""

    def moved(value: ir.Value) -> list[ir.Value]:
        return [output for node, index in value.uses() if _moves(node, index, value) for output in node.outputs]

    uses = (use for same in reach([value], moved) for use in same.uses())
    limits = (limit for node, index in uses for limit in _limits(node, index, length))
    return min((limit for limit in limits if limit is not None and limit > 0), default=None)


def class_axis(node: ir.Node) -> int | None:
    """Return the axis of a loss's first input that its second input, labels, has not; None for other operators."""
    operator = OPERATORS.get((node.domain, node.op_type))
    return None if operator is None else operator.class_axis


def _moves(node: ir.Node, index: int, value: ir.Value) -> bool:
    if has_trait(node, Trait.MOVE):
        rule = rule_of(node)
        return rule is not None and index in rule.operands(len(node.inputs))
    is_float = value.dtype is not None and value.dtype.is_floating_point()
    return not is_float and index in _WHOLE_MOVES.get(node.op_type, ())


def _limits(node: ir.Node, index: int, length: Length) -> Iterator[int | None]:
    data = node.inputs[0]
    if data is None:
        return
    if has_trait(node, Trait.INDEXES_AXIS) and index == 1:
        yield length(data, attribute(node, "axis", 0))
    elif has_trait(node, Trait.INDEXES_AXES) and index == 1:
        first = attribute(node, "batch_dims", 0)
        depth = length(node.inputs[1], -1) if node.inputs[1] is not None else None
        yield from (length(data, axis) for axis in range(first, first + (depth or 1)))
    elif node.op_type == "OneHot" and index == 0:
        yield _number(node.inputs[1])
    elif (labels := class_axis(node)) is not None and index == 1:
        yield length(data, labels)
    elif node.op_type == "Equal":
        yield _compared(node.inputs[1 - index])


def _compared(value: ir.Value | None) -> int | None:
    """Return the limit from a comparison with 0, 1, 2, ..., which makes a one-hot code."""
    tensor = constant_tensor(value)
    if tensor is None or tensor.size < 2 or not tensor.dtype.is_integer():
        return None
    array = tensor.numpy()
    return int(array.max()) + 1 if int(array.min()) == 0 else None


def _number(value: ir.Value | None) -> int | None:
    tensor = constant_tensor(value)
    return None if tensor is None or tensor.size != 1 else int(np.ravel(tensor.numpy())[0])


def make_axis_length(sizes: Mapping[str, int]) -> Length:
    """Return a function that gives the length of an axis, with these sizes of symbolic ones."""

    def length(value: ir.Value, axis: int) -> int | None:
        tensor = value.const_value
        shape = list(value.shape) if value.shape is not None else None if tensor is None else list(tensor.shape)
        if shape is None or not -len(shape) <= axis < len(shape):
            return None
        found = shape[axis]
        return found if isinstance(found, int) else sizes.get(found.value or "")

    return length
