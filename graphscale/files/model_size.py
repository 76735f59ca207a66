"""The size of a model after inlining, counted without inlining."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import onnx

from graphscale.errors import ModelFileError
from graphscale.files.limits import current_limits

__all__ = ["refuse_large"]

_Key = tuple[str, str, str]
# onnx_ir looks for a free name among all that it has given: the time grows with the square of the calls.
_CALLS = 5_000
_INLINE = "inline them first: onnx.save(onnx.inliner.inline_local_functions(onnx.load(MODEL)), FILE)"


class _Size(NamedTuple):
    nodes: int = 0
    calls: int = 0
    depth: int = 0


def refuse_large(proto: onnx.ModelProto, name: str) -> None:
    """Refuse a model above the limits for its size after inlining.

    Raises:
        ModelFileError: too many nodes, inputs and outputs, function calls or nested levels; a recursive function.
    """
    functions = {(f.domain, f.name, f.overload): f for f in proto.functions}
    sizes: dict[_Key, _Size] = {}
    pending, under_way = list(functions), set[_Key]()  # no recursion: a file may go deeper than Python
    while pending:
        key = pending[-1]
        called = set() if key in sizes else functions.keys() & {each for each, _ in _walk(functions[key].node)}
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


def _measure(nodes: Iterable[onnx.NodeProto], sizes: Mapping[_Key, _Size]) -> _Size:
    """Return the size of nodes, from the sizes of their functions."""
    found = _Size()
    for key, level in _walk(nodes):
        inner = sizes.get(key)
        if inner is None:
            found = _Size(found.nodes + 1, found.calls, max(found.depth, level))
        else:
            depth = max(found.depth, level + 1 + inner.depth)
            found = _Size(found.nodes + inner.nodes, found.calls + 1 + inner.calls, depth)
    return found


def _walk(nodes: Iterable[onnx.NodeProto]) -> Iterator[tuple[_Key, int]]:
    """Yield the operator of each node, bodies included, with its nesting level."""
    pending = [(nodes, 0)]
    while pending:
        some, level = pending.pop()
        for node in some:
            yield (node.domain, node.op_type, node.overload), level
            for attribute in node.attribute:
                if attribute.HasField("g"):
                    pending.append((attribute.g.node, level + 1))
                pending += [(body.node, level + 1) for body in attribute.graphs]
