"""The size of a model: its fields before it is parsed, its parts, and its nodes after inlining, without inlining."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import onnx

from graphscale.errors import ModelFileError
from graphscale.files.limits import current_limits

__all__ = ["parse_model", "refuse_large"]

_Key = tuple[str, str, str]
# onnx_ir searches its whole list of given names for a free one: its time grows with the square of the calls.
_CALLS = 5_000
_INLINE = "inline them first: onnx.save(onnx.inliner.inline_local_functions(onnx.load(MODEL)), FILE)"
_FIELDS = 12  # for each node of the limit
# The types of attributes that may hold a graph; readers find one in those without a type, too.
_WITH_GRAPHS = (onnx.AttributeProto.UNDEFINED, onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS)
_LEAST = 3  # bytes of a field, on average: large models have more


class _Size(NamedTuple):
    nodes: int = 0
    calls: int = 0
    depth: int = 0


def parse_model(content: bytes, name: str, most: int | None = None) -> onnx.ModelProto:
    """Parse a serialized ModelProto with a limit on its fields: protobuf expands two bytes to 200.

    Args:
        content: the bytes.
        name: the name of the model for messages.
        most: the limit for its fields, messages and texts; None for a limit by the number of bytes.

    Raises:
        ModelFileError: the model has too many fields.
        google.protobuf.message.DecodeError: the model is damaged.
    """
    if most is None:
        most = max(_FIELDS * current_limits().max_nodes, len(content) // _LEAST)
    if len(content) > 2 * most:
        from graphscale.files.field_count import count_fields  # a model has a few bytes for each field

        if count_fields(content, most) > most:
            raise ModelFileError(f"{name} has more than {most} fields, too many for its size (--max-nodes)")
    proto = onnx.ModelProto()
    proto.ParseFromString(content)
    return proto


def refuse_large(proto: onnx.ModelProto, name: str) -> None:
    """Refuse a model above the limits for its parts, and for its size after inlining.

    Raises:
        ModelFileError: too many nodes or other parts, inputs and outputs, function calls or nested levels; a recursive
            function.
    """
    if proto.ByteSize() > 2 * current_limits().max_nodes:  # a part has two bytes at least
        from graphscale.files.field_count import refuse_parts

        refuse_parts(proto, name)
    functions = {(f.domain, f.name, f.overload): f for f in proto.functions}
    sizes: dict[_Key, _Size] = {}
    pending, under_way = list(functions), set[_Key]()  # no recursion: a file may go deeper than Python
    while pending:
        key = pending[-1]
        nodes = [] if key in sizes else [node for some, _ in _walk(functions[key].node) for node in some]
        called = functions.keys() & set(map(_key, nodes))
        if key in called or called & under_way:
            raise ModelFileError(f"{name} is damaged: its function {'::'.join(filter(None, key))!r} calls itself")
        if called <= sizes.keys():
            if key not in sizes:
                sizes[key] = _measure(functions[key].node, sizes)
            under_way.discard(pending.pop())
        else:
            under_way.add(key)
            pending += called - sizes.keys()
    every, limits = [_measure(proto.graph.node, sizes), *sizes.values()], current_limits()
    ends = len(proto.graph.input) + len(proto.graph.output)
    for what, number, limit, hint in (
        ("nodes, with its functions inlined", max(size.nodes for size in every), limits.max_nodes, "--max-nodes"),
        ("inputs and outputs", ends, limits.max_nodes, "--max-nodes"),
        ("levels of bodies and functions", max(size.depth for size in every), limits.max_depth, "--max-depth"),
        ("calls of functions", max(size.calls for size in every), _CALLS, _INLINE),
    ):
        if number > limit:
            raise ModelFileError(f"{name} has {number} {what}; the limit is {limit} ({hint})")


def _measure(nodes: Sequence[onnx.NodeProto], sizes: Mapping[_Key, _Size]) -> _Size:
    """Return the size of nodes, from the sizes of their functions."""
    count = calls = depth = 0
    for some, level in _walk(nodes):
        called = [sizes[key] for node in some if (key := _key(node)) in sizes] if sizes else []
        count += len(some) - len(called) + sum(each.nodes for each in called)
        calls += len(called) + sum(each.calls for each in called)
        depth = max(depth, level if some else 0, *(level + 1 + each.depth for each in called))
    return _Size(count, calls, depth)


def _key(node: onnx.NodeProto) -> _Key:
    return node.domain, node.op_type, node.overload


def _walk(nodes: Sequence[onnx.NodeProto]) -> Iterator[tuple[Sequence[onnx.NodeProto], int]]:
    """Yield some nodes, and those of each body in them, with their nesting level."""
    pending = [(nodes, 0)]
    while pending:
        some, level = pending.pop()
        yield some, level
        for attribute in [attribute for node in some for attribute in node.attribute]:
            if attribute.type in _WITH_GRAPHS:
                bodies = [*attribute.graphs, *([attribute.g] if attribute.HasField("g") else [])]
                pending += [(body.node, level + 1) for body in bodies]
