"""The size that a model will have in memory, found without making it so large."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import onnx

from graphscale.errors import ModelFileError
from graphscale.files.limits import current_limits

__all__ = ["refuse_large"]

_Key = tuple[str, str, str]
_DEEPEST = 64  # functions, each of which calls the next; exporters need a few


def refuse_large(proto: onnx.ModelProto, name: str) -> None:
    """Refuse a model that is too large once its functions are inlined.

    Raises:
        ModelFileError: it has more nodes, inputs or outputs than the limit; a function calls itself, or the calls are
            too deep.
    """
    functions = {(f.domain, f.name, f.overload): f for f in proto.functions}
    sizes: dict[_Key, tuple[int, int]] = {}
    # From the called functions to their callers, without recursion of Python's own.
    pending, open_ = list(functions), set[_Key]()
    while pending:
        key = pending[-1]
        called = set() if key in sizes else functions.keys() & set(_calls(functions[key].node))
        if key in called or called & open_:
            raise ModelFileError(f"{name} is damaged: its function {'::'.join(filter(None, key))!r} calls itself")
        if called <= sizes.keys():
            if key not in sizes:
                sizes[key] = _measure(functions[key].node, sizes)
            open_.discard(pending.pop())
        else:
            open_.add(key)
            pending += called - sizes.keys()
    every = [_measure(proto.graph.node, sizes), *sizes.values()]
    count, depth = max(size for size, _ in every), max(below for _, below in every)
    limit = current_limits().max_nodes
    for what, number in (
        ("nodes, with its functions inlined", count),
        ("inputs and outputs", len(proto.graph.input) + len(proto.graph.output)),
    ):
        if number > limit:
            raise ModelFileError(f"{name} has {number} {what}; the limit is {limit} (--max-nodes)")
    if depth > _DEEPEST:
        raise ModelFileError(f"{name} has functions that call each other {depth} deep; the limit is {_DEEPEST}")


def _measure(nodes: Iterable[onnx.NodeProto], sizes: Mapping[_Key, tuple[int, int]]) -> tuple[int, int]:
    """Return the number of nodes after inlining, and the depth of calls."""
    count, depth = 0, 0
    for key in _calls(nodes):
        inner, below = sizes.get(key, (1, -1))
        count, depth = count + inner, max(depth, below + 1)
    return count, depth


def _calls(nodes: Iterable[onnx.NodeProto]) -> Iterator[_Key]:
    """Yield the operators of some nodes, and of those in their bodies."""
    pending = [nodes]
    while pending:
        for node in pending.pop():
            yield node.domain, node.op_type, node.overload
            for attribute in node.attribute:
                if attribute.HasField("g"):
                    pending.append(attribute.g.node)
                pending += [body.node for body in attribute.graphs]
