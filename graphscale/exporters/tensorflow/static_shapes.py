"""Nodes of a traced step that compute shapes, decided where the only unknown size is that of the batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.framework import tensor_util

__all__ = ["simplify_node"]

Sizes = list[int | None]


def simplify_node(graph: Any, operation: Any, node: Any) -> None:
    """Rewrite a node of a graph where the shapes of its operands decide about it.

    With a batch of any size, gradients ask at run time along which axes an operand was repeated, or where a part of a
    concatenation begins. Two sizes that are not known are both the size of the batch, and equal.

    Args:
        graph: the new graph; gets the constants that the node needs.
        operation: the traced operator.
        node: its node, before it is put into the graph.
    """
    if node.op == "Reshape":
        _decide_reshape(graph, operation, node)
    elif node.op in _RESULTS:
        results = _RESULTS[node.op](operation)
        if results is not None:
            _make_constant(graph, operation, node, results)


def _sizes(tensor: Any) -> Sizes | None:
    """Return the numbers of a vector of sizes, None where one is not known; None if not even their count is."""
    operation = tensor.op
    if operation.type == "DynamicStitch":
        return _stitch(operation)
    if operation.type in ("Cast", "Identity"):
        return _sizes(operation.inputs[0])
    if operation.type == "ShapeN":
        shape = operation.inputs[tensor.value_index].shape
        return None if shape.rank is None else list(shape.as_list())
    value = _constant(tensor)
    if value is not None:
        return [int(each) for each in np.ravel(value)]
    if tensor.shape.rank != 1:
        return None
    shape = tensor_util.constant_value_as_shape(tensor)
    return None if shape.rank is None else list(shape.as_list())


def _constant(tensor: Any) -> Any:
    """Return the value of a tensor of integers that depends on no size of the batch, else None."""
    value, operation = tensor_util.constant_value(tensor), tensor.op
    if value is None and operation.type in _ARITHMETIC:
        operands = [_constant(each) for each in operation.inputs]
        value = None if any(each is None for each in operands) else _ARITHMETIC[operation.type](*operands)
    return value


_ARITHMETIC: dict[str, Callable[..., Any]] = {
    "AddV2": np.add,
    "FloorMod": np.mod,
    "Identity": np.asarray,
    "Range": np.arange,
}


def _stitch(operation: Any) -> Sizes | None:
    """Evaluate the shape of a mean with its reduced axes kept, as TensorFlow's gradients compute it."""
    half = len(operation.inputs) // 2
    indices = [_constant(tensor) for tensor in operation.inputs[:half]]
    if any(each is None for each in indices):
        return None
    sizes: Sizes = [None] * (1 + max(int(each.max(initial=-1)) for each in indices))
    for places, tensor in zip(indices, operation.inputs[half:], strict=True):
        values = _sizes(tensor)
        if values is None or len(values) != places.size:
            return None
        for place, value in zip(places.ravel(), values, strict=True):
            sizes[int(place)] = value
    return sizes


def _broadcast_axes(operation: Any) -> list[Sequence[int]] | None:
    left, right = (_sizes(tensor) for tensor in operation.inputs)
    if left is None or right is None:
        return None
    rank = max(len(left), len(right))
    own, other = ([*[1] * (rank - len(sizes)), *sizes] for sizes in (left, right))
    pairs = list(zip(own, other, strict=True))
    return [
        [axis for axis, (a, b) in enumerate(pairs) if a == 1 != b],
        [axis for axis, (a, b) in enumerate(pairs) if b == 1 != a],
    ]


def _offsets(operation: Any) -> list[Sequence[int]] | None:
    axis = _constant(operation.inputs[0])
    parts = [_sizes(tensor) for tensor in operation.inputs[1:]]
    if axis is None or any(sizes is None or sizes[int(axis)] is None for sizes in parts[:-1]):
        return None
    found: list[Sequence[int]] = []
    offset = 0
    for sizes in parts:
        assert sizes is not None
        begin = [0] * len(sizes)
        begin[int(axis)] = offset
        found.append(begin)
        offset += sizes[int(axis)] or 0
    return found


_RESULTS = {"BroadcastGradientArgs": _broadcast_axes, "ConcatOffset": _offsets}


def _make_constant(graph: Any, operation: Any, node: Any, results: list[Sequence[int]]) -> None:
    """Make a node hand through constants, one for each of its outputs."""
    dtype = operation.outputs[0].dtype
    names = [_add_constant(graph, f"{node.name}/{index}", each, dtype) for index, each in enumerate(results)]
    del node.input[:]
    node.input.extend(names)
    node.op = "IdentityN"
    node.attr.clear()
    node.attr["T"].list.type.extend([dtype.as_datatype_enum] * len(names))


def _add_constant(graph: Any, name: str, value: Sequence[int], dtype: Any) -> str:
    made = graph.node.add(name=name, op="Const")
    made.attr["dtype"].type = dtype.as_datatype_enum
    made.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(value, dtype, [len(value)]))
    return name


def _decide_reshape(graph: Any, operation: Any, node: Any) -> None:
    """Leave out a Reshape to the same shape, or make its shape a constant, with -1 for the batch."""
    before, shape = operation.inputs[0].shape, _sizes(operation.inputs[1])
    if shape is None or shape.count(None) > 1 or 0 in shape:
        return
    if before.rank is not None and before.as_list() == shape:
        del node.input[1:]
        node.attr.pop("Tshape", None)
        node.op = "Identity"
    elif None in shape or operation.inputs[1].op.type != "Const":
        sizes = [-1 if size is None else size for size in shape]
        node.input[1] = _add_constant(graph, f"{node.name}/sizes", sizes, operation.inputs[1].dtype)
