"""The type and shape of a result by the shapes and contents of its operand terms: they say more than a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx
import onnx.shape_inference
import onnx_ir as ir

from graphscale.checks.relation.terms import Shape, Terms

__all__ = ["Sizes", "infer_results", "sizes_of"]

Sizes = tuple[int, ...]
_RANK = 64  # more numbers than a shape has


def sizes_of(shape: Shape) -> Sizes | None:
    """Return a shape whose sizes are all numbers; None for others."""
    return tuple(shape) if shape is not None and all(isinstance(size, int) for size in shape) else None  # type: ignore[arg-type]


def infer_results(
    terms: Terms, node: ir.Node, operands: Sequence[int | None], opsets: Mapping[str, int]
) -> Mapping[str, tuple[ir.DataType, Sizes | None]]:
    """Return the types and sizes of results of an operator of ONNX by name, as far as its operands tell them."""
    if node.domain or node.op_type == "Constant":
        return {}
    version, types, data = opsets.get("", 1), {}, {}
    for value, term in zip(node.inputs, operands, strict=True):
        if value is None or term is None:
            continue
        name, dtype, array = value.name or "", terms.dtypes[term], terms.array(term)
        if dtype is None:
            return {}
        types[name] = onnx.helper.make_tensor_type_proto(dtype, terms.shapes[term])
        if array is not None and array.size <= _RANK:
            data[name] = onnx.numpy_helper.from_array(array)
    ids = [onnx.helper.make_opsetid("", version)]
    try:
        schema, proto = onnx.defs.get_schema(node.op_type, version), ir.serde.serialize_node(node)
        found = onnx.shape_inference.infer_node_outputs(schema, proto, types, data, opset_imports=ids)
    except Exception:  # of a damaged node, inference says nothing
        return {}
    tensors = {name: each.tensor_type for name, each in found.items() if each.HasField("tensor_type")}
    return {name: (ir.DataType(each.elem_type), _sizes(each)) for name, each in tensors.items()}


def _sizes(tensor: onnx.TypeProto.Tensor) -> Sizes | None:
    is_known = tensor.HasField("shape") and all(axis.HasField("dim_value") for axis in tensor.shape.dim)
    return tuple(axis.dim_value for axis in tensor.shape.dim) if is_known else None
