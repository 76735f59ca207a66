"""A graph with one floating-point type in place of others."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import onnx_ir as ir

__all__ = ["FLOATS", "widen"]

FLOATS = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.FLOAT, ir.DataType.DOUBLE)


def widen(graph: ir.Graph, dtype: ir.DataType, replaced: Collection[ir.DataType] = FLOATS) -> None:
    """Convert values, constants and casts to one floating-point type, in place.

    Args:
        graph: the graph, with its subgraphs.
        dtype: the type to convert to.
        replaced: the types to convert; float32 among them, unless it is `dtype`.
    """
    for each in (graph, *graph.subgraphs()):
        for value in (*each.inputs, *each.initializers.values()):
            _widen_value(value, dtype, replaced)
    for node in graph.all_nodes():
        for value in node.outputs:
            _widen_value(value, dtype, replaced)
        _widen_attributes(node, dtype, replaced)


def _widen_attributes(node: ir.Node, dtype: ir.DataType, replaced: Collection[ir.DataType]) -> None:
    for name, attribute in node.attributes.items():
        if attribute.is_ref():
            continue
        if attribute.type is ir.AttributeType.TENSOR and attribute.as_tensor().dtype in replaced:
            node.attributes[name] = ir.AttrTensor(name, _wide_tensor(attribute.as_tensor(), dtype))
        elif name in ("to", "dtype") and attribute.type is ir.AttributeType.INT and attribute.as_int() in replaced:
            node.attributes[name] = ir.AttrInt64(name, dtype)
    for name in ("value_float", "value_floats") if node.op_type == "Constant" else ():
        if name in node.attributes:
            numbers = np.asarray(node.attributes.pop(name).value, dtype.numpy())
            node.attributes["value"] = ir.AttrTensor("value", ir.Tensor(numbers))
    # These operators give float32 by default.
    if node.op_type == "ConstantOfShape" and "value" not in node.attributes:
        node.attributes["value"] = ir.AttrTensor("value", ir.Tensor(np.zeros(1, dtype.numpy())))
    elif node.op_type in ("RandomNormal", "RandomUniform") and "dtype" not in node.attributes:
        node.attributes["dtype"] = ir.AttrInt64("dtype", dtype)


def _widen_value(value: ir.Value, dtype: ir.DataType, replaced: Collection[ir.DataType]) -> None:
    if isinstance(value.type, ir.TensorType) and value.dtype in replaced:
        value.type = ir.TensorType(dtype)  # a clone shares the object of the original
    if value.const_value is not None and value.const_value.dtype in replaced:
        value.const_value = _wide_tensor(value.const_value, dtype)


def _wide_tensor(tensor: ir.TensorProtocol, dtype: ir.DataType) -> ir.TensorProtocol:
    return ir.Tensor(tensor.numpy().astype(dtype.numpy()), name=tensor.name)
