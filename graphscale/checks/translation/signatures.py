"""Signatures of nodes: equal for equal computations on equal inputs, independent of names in between."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator

import onnx_ir as ir

from graphscale.graph.values import subgraphs

__all__ = ["sign_nodes"]

_SMALL = 256  # limit of a constant's bytes in a signature; for a larger one, type and shape are used


def sign_nodes(graph: ir.Graph | ir.Function) -> dict[ir.Node, bytes]:
    """Return the signature of each node of a graph, from the inputs on, in the graph's order."""
    values: dict[ir.Value, bytes] = {}
    return {node: _sign(node, values) for node in graph}


def _sign(node: ir.Node, values: dict[ir.Value, bytes]) -> bytes:
    parts = [repr(node.op_identifier()).encode(), *_attribute_parts(node)]
    parts += [b"" if value is None else _sign_value(value, values) for value in node.inputs]
    for body in subgraphs(node):
        for i, value in enumerate(body.inputs):
            values[value] = b"body input %d" % i
        parts += [_sign(inner, values) for inner in body]
        parts += [_sign_value(value, values) for value in body.outputs]
    signature = _digest(parts)
    for i, value in enumerate(node.outputs):
        values[value] = _digest((signature, b"%d" % i))
    return signature


def _sign_value(value: ir.Value, values: dict[ir.Value, bytes]) -> bytes:
    found = values.get(value)
    if found is None:
        tensor = None if value.is_graph_input() else value.const_value
        found = values[value] = f"input {value.name}".encode() if tensor is None else _tensor_part(tensor)
    return found


def _tensor_part(tensor: ir.TensorProtocol) -> bytes:
    is_small = 0 < tensor.nbytes <= _SMALL and tensor.dtype is not ir.DataType.STRING
    return repr((tensor.dtype.name, [*tensor.shape])).encode() + (tensor.tobytes() if is_small else b"")


def _attribute_parts(node: ir.Node) -> Iterator[bytes]:
    for name, attribute in sorted(node.attributes.items()):
        if attribute.type is ir.AttributeType.TENSOR and not attribute.is_ref():
            yield repr(name).encode() + _tensor_part(attribute.as_tensor())
        elif attribute.type not in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS):
            yield repr((name, attribute.type, attribute.value)).encode()


def _digest(parts: Iterable[bytes]) -> bytes:
    result = hashlib.blake2b(digest_size=16)
    for part in parts:
        result.update(len(part).to_bytes(8, "little") + part)
    return result.digest()
