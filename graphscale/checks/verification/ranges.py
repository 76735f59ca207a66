"""Which whole numbers an input of a graph may hold, found from what the graph does with them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import numpy as np
import onnx_ir as ir

from graphscale.graph.values import constant_tensor
from graphscale.graph.walks import reach

__all__ = ["axis_length", "class_axis", "index_limit"]

# They hand on numbers of these operands, in whatever arrangement. A sum of indices is an index with an offset.
_MOVES: dict[str, tuple[int, ...] | None] = {
    "Abs": (0,),
    "Cast": (0,),
    "Clip": (0,),
    "Concat": None,
    "Expand": (0,),
    "Flatten": (0,),
    "Gather": (0,),
    "GatherElements": (0,),
    "GatherND": (0,),
    "Identity": (0,),
    "Pad": (0,),
    "Reshape": (0,),
    "Slice": (0,),
    "Split": (0,),
    "Squeeze": (0,),
    "Tile": (0,),
    "Transpose": (0,),
    "Unsqueeze": (0,),
    "View": (0,),
    "Where": (1, 2),
}
_WHOLE_MOVES: dict[str, tuple[int, ...] | None] = {"Add": None, "Max": None, "Min": None, "Sub": (0,)}
_INDEXES_ONE_AXIS = frozenset({"Gather", "GatherElements", "Scatter", "ScatterElements"})
_INDEXES_AXES = frozenset({"GatherND", "ScatterND"})
# Their second input holds class numbers below the length of this axis of the first.
_LABELS = {
    "NegativeLogLikelihoodLoss": 1,
    "NegativeLogLikelihoodLossInternal": 1,
    "NegativeLogLikelihoodLossInternal2": 1,
    "SoftmaxCrossEntropyLoss": 1,
    "SoftmaxCrossEntropyLossInternal": 1,
    "SoftmaxCrossEntropy": 1,
    "SparseSoftmaxCrossEntropy": -1,
}

Length = Callable[[ir.Value, int], int | None]


def index_limit(value: ir.Value, length: Length) -> int | None:
    """The number that an input's whole numbers must be below to be valid indices; None where they are no indices.

    Args:
        value: an input.
        length: gives the length of an axis of a value, None where it is not known.
    """

    def moved(value: ir.Value) -> list[ir.Value]:
        return [output for node, index in value.uses() if _moves(node, index, value) for output in node.outputs]

    uses = (use for same in reach([value], moved) for use in same.uses())
    limits = (limit for node, index in uses for limit in _limits(node, index, length))
    return min((limit for limit in limits if limit is not None and limit > 0), default=None)


def class_axis(node: ir.Node) -> int | None:
    """The axis of a loss's first input that its second input, labels, has not; None for other operators."""
    return _LABELS.get(node.op_type)


def _moves(node: ir.Node, index: int, value: ir.Value) -> bool:
    is_float = value.dtype is not None and value.dtype.is_floating_point()
    moves = _MOVES if is_float else {**_MOVES, **_WHOLE_MOVES}
    if node.op_type not in moves:
        return False
    operands = moves[node.op_type]
    return operands is None or index in operands


def _limits(node: ir.Node, index: int, length: Length) -> Iterator[int | None]:
    data = node.inputs[0]
    if data is None:
        return
    if node.op_type in _INDEXES_ONE_AXIS and index == 1:
        yield length(data, _attribute(node, "axis", 0))
    elif node.op_type in _INDEXES_AXES and index == 1:
        first = _attribute(node, "batch_dims", 0)
        depth = length(node.inputs[1], -1) if node.inputs[1] is not None else None
        yield from (length(data, axis) for axis in range(first, first + (depth or 1)))
    elif node.op_type == "OneHot" and index == 0:
        yield _number(node.inputs[1])
    elif node.op_type in _LABELS and index == 1:
        yield length(data, _LABELS[node.op_type])
    elif node.op_type == "Equal":
        yield _compared(node.inputs[1 - index])


def _compared(value: ir.Value | None) -> int | None:
    """A comparison with 0, 1, 2, ... makes a one-hot code."""
    tensor = constant_tensor(value)
    if tensor is None or tensor.size < 2 or not tensor.dtype.is_integer():
        return None
    array = tensor.numpy()
    return int(array.max()) + 1 if int(array.min()) == 0 else None


def _number(value: ir.Value | None) -> int | None:
    tensor = constant_tensor(value)
    return None if tensor is None or tensor.size != 1 else int(np.ravel(tensor.numpy())[0])


def _attribute(node: ir.Node, name: str, default: int) -> int:
    attribute = node.attributes.get(name)
    return default if attribute is None else attribute.as_int()


def axis_length(sizes: Mapping[str, int]) -> Length:
    """The length of an axis, with these sizes of symbolic ones."""

    def length(value: ir.Value, axis: int) -> int | None:
        tensor = value.const_value
        shape = list(value.shape) if value.shape is not None else None if tensor is None else list(tensor.shape)
        if shape is None or not -len(shape) <= axis < len(shape):
            return None
        found = shape[axis]
        return found if isinstance(found, int) else sizes.get(found.value or "")

    return length
