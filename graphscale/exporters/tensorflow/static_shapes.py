"""Nodes of a traced step that are about shapes alone, decided where one unknown size, that of the batch, is enough."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from tensorflow.python.framework import tensor_util

__all__ = ["simplify_node"]


def simplify_node(graph: Any, operation: Any, node: Any) -> None:
    """Rewrite a node of a graph where its operands' shapes decide about it.

    Gradients of broadcasting operators ask at run time along which axes an operand was repeated. Two sizes that are
    not known are both the size of the batch, and equal.

    Args:
        graph: the new graph; gets the constants that the node needs.
        operation: the traced operator.
        node: its node, before it is put into the graph.
    """
    if node.op == "BroadcastGradientArgs":
        _decide_broadcast(graph, operation, node)
    elif node.op == "Reshape" and _same_shape(operation):
        del node.input[1:]
        for name in ("Tshape", "_output_shapes"):
            node.attr.pop(name, None)
        node.op = "Identity"


def _decide_broadcast(graph: Any, operation: Any, node: Any) -> None:
    left, right = (tensor_util.constant_value_as_shape(tensor) for tensor in operation.inputs)
    if left.rank is None or right.rank is None:
        return
    rank = max(left.rank, right.rank)
    own, other = ([1] * (rank - shape.rank) + shape.as_list() for shape in (left, right))
    sizes = list(zip(own, other, strict=True))
    axes = (
        [axis for axis, (a, b) in enumerate(sizes) if a == 1 != b],
        [axis for axis, (a, b) in enumerate(sizes) if b == 1 != a],
    )
    dtype = operation.outputs[0].dtype
    names = []
    for index, each in enumerate(axes):
        made = graph.node.add(name=f"{node.name}/axes_{index}", op="Const")
        made.attr["dtype"].type = dtype.as_datatype_enum
        made.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(each, dtype, [len(each)]))
        names.append(made.name)
    del node.input[:]
    node.input.extend(names)
    node.op = "IdentityN"
    node.attr.clear()
    node.attr["T"].list.type.extend([dtype.as_datatype_enum] * 2)


def _same_shape(operation: Any) -> bool:
    before, after = (tensor.shape for tensor in (operation.inputs[0], operation.outputs[0]))
    if before.rank is None or after.rank is None:
        return False
    sizes: list[int | None] = before.as_list()
    return sizes == after.as_list() and sizes.count(None) <= 1 and 0 not in sizes
