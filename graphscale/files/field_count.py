"""The number of fields of a serialized model, before it is parsed."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import onnx

__all__ = ["count_fields"]

_FIELD = 2**29 - 1  # the largest number of a field
_FIXED = {1: 8, 5: 4}  # bytes of the wire types of protocol buffers
_NUMBER, _BYTES, _GROUP, _END = 0, 2, 3, 4  # other wire types


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
