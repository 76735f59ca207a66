"""The numbers of the fields of a large model: of all before it is parsed, and of each kind after."""

from __future__ import annotations

import collections
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import onnx

from graphscale.errors import ModelFileError
from graphscale.files.limits import current_limits

__all__ = ["count_fields", "refuse_parts"]

_FIELD = 2**29 - 1  # the largest number of a field
_FIXED = {1: 8, 5: 4}  # bytes of the wire types of protocol buffers
_NUMBER, _BYTES, _GROUP, _END = 0, 2, 3, 4  # other wire types
_OPERANDS = 4  # for each node of the limit
_OF_MODEL = ("functions", "metadata_props", "opset_import", "configuration", "training_info")
_OF_TRAINING = ("initialization_binding", "update_binding")
_OF_GRAPH = ("node", "initializer", "value_info", "quantization_annotation", "metadata_props")
_OF_FUNCTION = ("node", "attribute", "attribute_proto", "value_info", "metadata_props", "opset_import")
_OF_NODE = ("attribute", "input", "output", "metadata_props")
_OF_ATTRIBUTE = ("graphs", "tensors", "type_protos")
_OF_TENSOR = ("dims", "external_data")


def count_fields(content: bytes, most: int) -> int:
    """Count the messages and texts of a serialized ModelProto, until they are too many or it is damaged."""
    count, at, end, inner = 0, 0, len(content), _messages_of(onnx.ModelProto.DESCRIPTOR)
    outer: list[tuple[int, Mapping[int, Any]]] = []
    while count <= most and (at < end or outer):
        if at == end:
            end, inner = outer.pop()
            continue
        tag, at = _read_number(content, at)
        kind, size = tag & 7, _FIXED.get(tag & 7, 0)
        if kind == _GROUP:
            outer.append((end, inner))
            inner = {}
        elif kind == _END and outer:
            end, inner = outer.pop()
        if kind in (_NUMBER, _BYTES):
            number, at = _read_number(content, at)
            size = number if kind == _BYTES else 0
        if at + size > end:
            break
        count += kind == _BYTES
        field = tag >> 3 & _FIELD
        if kind == _BYTES and size and field in inner:
            outer.append((end, inner))
            end, inner = at + size, _messages_of(inner[field])
        else:
            at += size
    return count


@functools.cache
def _messages_of(message: Any) -> Mapping[int, Any]:
    """Return the descriptors of the messages in a message, by the numbers of their fields."""
    return {field.number: field.message_type for field in message.fields if field.message_type is not None}


def _read_number(content: bytes, at: int) -> tuple[int, int]:
    """Read a number of a protocol buffer; return the position behind it, too: beyond the end for a cut buffer."""
    if at < len(content) and content[at] < 128:  # most of them, and faster
        return content[at], at + 1
    number = shift = 0
    for byte in content[at : at + 10]:
        number |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return number, at
    return 0, len(content) + 1


def refuse_parts(proto: onnx.ModelProto, name: str) -> None:
    """Refuse a model with too many parts of a kind, at the first excess.

    Raises:
        ModelFileError: the model has too many.
    """
    most, found = current_limits().max_nodes, collections.Counter[str]()
    for parts, fields in _list_parts(proto):
        for field in fields:
            found[field] += sum([len(getattr(part, field)) for part in parts])
            limit = most * _OPERANDS if field in ("input", "output") else most
            if found[field] > limit:
                raise ModelFileError(
                    f"{name} has {found[field]} entries of {field!r}; the limit is {limit} (--max-nodes)"
                )


def _list_parts(proto: onnx.ModelProto) -> Iterator[tuple[Sequence[Any], tuple[str, ...]]]:
    """Yield messages with repeated fields, outer ones first, and the names of these fields."""
    yield [proto], _OF_MODEL
    yield proto.training_info, _OF_TRAINING
    pending: list[Any] = [proto.graph, *proto.functions]
    while pending:
        scope = pending.pop()
        if isinstance(scope, onnx.GraphProto):
            yield [scope], _OF_GRAPH
            yield scope.initializer, _OF_TENSOR
        else:
            yield [scope], _OF_FUNCTION
        yield scope.node, _OF_NODE
        attributes = [attribute for node in scope.node for attribute in node.attribute]
        yield attributes, _OF_ATTRIBUTE
        yield [attribute.t for attribute in attributes if attribute.HasField("t")], _OF_TENSOR
        for attribute in attributes:
            pending += attribute.graphs
            if attribute.HasField("g"):
                pending.append(attribute.g)
