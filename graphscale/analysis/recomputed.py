"""Forward values that a backward pass computes again: by checkpointing, or because no exporter merged the two."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping

import onnx_ir as ir

from graphscale.flow.interpreter import Flow
from graphscale.flow.term import Term, TermDomain

__all__ = ["find_recomputed_values"]


def find_recomputed_values(
    forward: Iterable[ir.Node],
    rest: Iterable[ir.Node],
    mixing: Container[ir.Value],
    moved: Mapping[ir.Value, ir.Value] | None = None,
) -> dict[ir.Value, ir.Value]:
    """Map values outside of forward to the forward values that they equal.

    Args:
        forward: the nodes that the loss depends on, in graph order.
        rest: the others, in graph order.
        mixing: the forward values to compare with: those that mix several inputs, and so are no seed.
        moved: values that count as equal to a weight; all values computed from them are compared, since none is a seed.
    """
    domain = TermDomain()
    domain.given = {value: domain.source(weight) for value, weight in (moved or {}).items()}
    flow = Flow(domain, domain.given)
    equal: dict[Term, list[ir.Value]] = {}
    for node in forward:
        flow.visit(node)
        for value in node.outputs:
            equal.setdefault(flow.of(value), []).append(value)
    equal.pop(None, None)
    domain.is_closed = True
    originals: dict[ir.Value, ir.Value] = {}
    behind = set(moved or ())
    for node in rest:
        if not all(value is None or value in flow.elements or _is_source(value) for value in node.inputs):
            continue  # recomputed only if all its operands are
        flow.visit(node)
        follows = not behind.isdisjoint(node.inputs)
        for value in node.outputs:
            same = equal.get(flow.of(value), ())
            original = next((v for v in same if v in mixing or follows), None)
            if original is not None:
                originals[value] = original
                behind.update([value] if follows else ())
    return originals


def _is_source(value: ir.Value) -> bool:
    """Return whether a value is an input or a constant, which both passes may read."""
    node = value.producer()
    return node is None or node.op_type == "Constant"
