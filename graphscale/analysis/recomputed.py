"""Forward values that a backward pass computes again: by checkpointing, or because no exporter merged the two."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping

import onnx_ir as ir

from graphscale.flow.interpreter import Flow
from graphscale.flow.term import Term, TermDomain, attribute_key
from graphscale.graph.values import constant_tensor, is_float, is_scalar, subgraphs

__all__ = ["find_recomputed_values", "is_copy"]


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


def is_copy(original: ir.Value, copy: ir.Value) -> bool:
    """Return whether two values are computed in the same way.

    Nodes and attributes are the same; inputs, weights, and constants of integers, such as the bounds of a slice, may
    differ.
    """
    pairs: dict[ir.Value, ir.Value] = {}
    pending: list[tuple[ir.Value | None, ir.Value | None]] = [(original, copy)]
    while pending:
        one, other = pending.pop()
        if one is None or other is None:
            if one is not other:
                return False
            continue
        if one is not other and not _is_alike(one, other):
            return False
        if constant_tensor(other) is not None or pairs.get(other) is one:
            continue
        if other in pairs:
            return False
        pairs[other] = one
        node, twin = one.producer(), other.producer()
        if one is not other and node is not None and twin is not None:
            pending.extend(zip(node.inputs, twin.inputs, strict=True))
    return original is not copy


def _is_alike(one: ir.Value, other: ir.Value) -> bool:
    """Return whether two values are interchangeable sources, or results of the same operator."""
    if _is_source(one) and _is_source(other):
        constants = constant_tensor(one), constant_tensor(other)
        if constants[0] is None or constants[1] is None or not is_float(one) or not is_scalar(one):
            return one.dtype is other.dtype and (constants[0] is None) is (constants[1] is None)
        return constants[0].numpy().tobytes() == constants[1].numpy().tobytes()
    node, twin = one.producer(), other.producer()
    if node is None or twin is None or subgraphs(node) or _is_source(one) or _is_source(other):
        return False
    kinds = [(n.domain, n.op_type, v.index(), len(n.inputs)) for v, n in ((one, node), (other, twin))]
    attributes = [{name: attribute_key(held) for name, held in n.attributes.items()} for n in (node, twin)]
    return kinds[0] == kinds[1] and attributes[0] == attributes[1]


def _is_source(value: ir.Value) -> bool:
    """Return whether a value is an input or a constant, which both passes may read."""
    node = value.producer()
    return node is None or node.op_type == "Constant"
