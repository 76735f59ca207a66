"""Undeclared types and shapes of values by ONNX's inference."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable

import onnx
import onnx.shape_inference
import onnx_ir as ir
from onnx_ir.passes.common import ShapeInferencePass

from graphscale.errors import UnsupportedModelError, reporting
from graphscale.graph.types import dtypes_of
from graphscale.graph.values import constant_tensor, is_tensor, node_name, subgraphs, values_by_name
from graphscale.operators import attribute

__all__ = [
    "complete_results",
    "complete_types",
    "dtypes_by_name",
    "infer_results",
    "infer_types",
    "measured_by",
]

_LONGEST = 2**16  # numbers of a computed shape; ONNX's inference copies them at every node
# Operators of com.microsoft whose result has the type of the first operand.
_LIKE_FIRST = {"BiasGelu", "FastGelu", "Gelu", "QuickGelu", "SimplifiedLayerNormalization", "Trilu"}
_PRODUCTS = {"FusedMatMul", "TransposeMatMul"}
_RANK = 64  # more than the rank of any value
_FOLLOWED = {"Add", "Cast", "Div", "Gather", "Identity", "Mul", "Slice", "Squeeze", "Sub", "Unsqueeze"}


def infer_types(model: ir.Model, *, strict: bool = False) -> None:
    """Add inferred dtypes and shapes in place; a model beyond inference is unchanged."""
    ShapeInferencePass(check_type=strict, strict_mode=strict, data_prop=_find_longest(model) <= _LONGEST)(model)


def _find_longest(model: ir.Model) -> int:
    """Return a bound for the numbers in a value that inference computes, such as a shape."""
    lengths: dict[ir.Value, int] = {}

    def length(value: ir.Value) -> int:
        tensor = constant_tensor(value)
        is_followed = tensor is not None and tensor.dtype.is_integer() and len(tensor.shape) <= 1
        return tensor.size if tensor is not None and is_followed else lengths.get(value, 0)

    for node in model.graph.all_nodes():
        sizes = [length(value) for value in node.inputs if value is not None]
        if node.op_type == "Concat":
            sizes = [min(sum(sizes), 2 * _LONGEST)]
        elif node.op_type not in _FOLLOWED:
            sizes = [_RANK] if node.op_type == "Shape" else []
        lengths.update((value, max(sizes, default=0)) for value in node.outputs)
    return max(lengths.values(), default=0)


def complete_types(model: ir.Model, wanted: Iterable[ir.Value] | None = None) -> None:
    """Add inferred dtypes and shapes if a wanted value lacks one; declared ones are unchanged.

    Args:
        model: the model.
        wanted: some of its values; None for its outputs.
    """
    if all(v.dtype is not None and v.shape is not None for v in (model.graph.outputs if wanted is None else wanted)):
        return
    inferred = _inferred(model)
    for graph, twin in zip(model.graphs(), inferred.graphs(), strict=True):
        types = values_by_name(twin)
        for name, value in values_by_name(graph).items():
            if not is_tensor(value):
                continue
            if value.shape is None:
                value.shape = types[name].shape
            if value.dtype is None and (dtype := types[name].dtype) is not None:
                value.dtype = dtype


def _inferred(model: ir.Model) -> ir.Model:
    """Return a copy with inferred types."""
    # A model that fails here is refused later, where a type is needed, by one line instead of a traceback.
    log = logging.getLogger(ShapeInferencePass.__module__)
    silent, log.disabled = log.disabled, True
    inferred = model.clone()
    try:
        infer_types(inferred)
    finally:
        log.disabled = silent
    return inferred


def dtypes_by_name(model: ir.Model) -> dict[str, ir.DataType]:
    """Return the dtypes of the main graph's results, declared, by ONNX's inference, or by the operators, if known.

    Further results of an operator, such as a mask, have no dtype by the operator, since it may differ.
    """
    known: dict[str, ir.DataType] = {}
    results = [value for node in model.graph for value in node.outputs]
    if any(value.dtype is None for value in results):
        by_operator = dtypes_of(model.graph.all_nodes())
        known = {v.name or "": by_operator[v] for v in results if v in by_operator and not v.index()}
        results = [value for node in _inferred(model).graph for value in node.outputs]
    return known | {v.name or "": v.dtype for v in results if v.dtype is not None}


def infer_results(node: ir.Node, opset: int) -> None:
    """Add the types and shapes that ONNX infers to the results of a node of the default domain.

    Declared types are unchanged. Results get no types where the dtype of an operand is unknown.

    Args:
        node: the node.
        opset: the version of the default domain.

    Raises:
        UnsupportedModelError: the operands do not fit the operator.
    """
    operands = [value for value in node.inputs if value is not None]
    if any(value.dtype is None for value in operands):
        return
    known = {value.name or "": tensor for value in operands if (tensor := constant_tensor(value)) is not None}
    with reporting(UnsupportedModelError, f"node {node_name(node)!r}", onnx.shape_inference.InferenceError):
        types = onnx.shape_inference.infer_node_outputs(
            onnx.defs.get_schema(node.op_type, opset, ""),
            ir.serde.serialize_node(node),
            {value.name or "": ir.serde.serialize_value(value).type for value in operands},
            {name: ir.serde.serialize_tensor(tensor) for name, tensor in known.items() if tensor.size <= _RANK},
            opset_imports=[onnx.helper.make_opsetid("", opset)],
        )
    for value in node.outputs:
        if (found := types.get(value.name or "")) is not None:
            value.type = value.type or ir.serde.deserialize_type_proto_for_type(found)
            value.shape = value.shape or ir.serde.deserialize_type_proto_for_shape(found)


def complete_results(node: ir.Node, opset: int) -> None:
    """Add missing types and shapes to the results of a node, from its operands.

    Results beyond inference are unchanged.

    Args:
        node: a node of any domain; a node with bodies is left unchanged.
        opset: the version of the default domain.
    """
    if all(value.dtype is not None and value.shape is not None for value in node.outputs) or subgraphs(node):
        return
    if not node.domain and onnx.defs.has(node.op_type):
        shape = node.inputs[1] if node.op_type == "Reshape" else None
        measured = None if shape is None else measured_by(shape)
        if measured is not None and measured.shape is not None:
            node.outputs[0].shape = measured.shape
        with contextlib.suppress(UnsupportedModelError):
            infer_results(node, opset)
        return
    data, result = node.inputs[0] if node.inputs else None, node.outputs[0]
    if data is not None and node.op_type in _LIKE_FIRST:
        result.type, result.shape = result.type or data.type, result.shape or data.shape
    elif data is not None and node.op_type in _PRODUCTS:
        result.type, result.shape = result.type or data.type, result.shape or _product_shape(node)


def measured_by(shape: ir.Value) -> ir.Value | None:
    """Return the value whose whole shape is in a vector; None for other vectors.

    ONNX Runtime's gradient builder writes the default of `start`.
    """
    node = shape.producer()
    if node is None or node.op_type != "Shape" or node.domain:
        return None
    is_whole = attribute(node, "start", 0) == 0 and "end" not in node.attributes
    return node.inputs[0] if is_whole else None


def _product_shape(node: ir.Node) -> ir.Shape | None:
    """Return the shape of a matrix product with its transpositions; None if it is not known."""
    dims = []
    for value, side in zip(node.inputs[:2], "AB", strict=True):
        if value is None or value.shape is None or attribute(node, f"transBatch{side}", 0):
            return None
        sizes = list(value.shape)
        if attribute(node, f"trans{side}", 0) and len(sizes) > 1:
            sizes[-2:] = sizes[:-3:-1]
        dims.append(sizes)
    first, second = dims
    if min(len(first), len(second)) < 2:
        return None
    batch = max(first[:-2], second[:-2], key=len)
    # Broadcast axes remain unknown.
    is_plain = first[:-2] == second[:-2] or not (first[:-2] and second[:-2])
    return ir.Shape([*(batch if is_plain else [None] * len(batch)), first[-2], second[-1]])
