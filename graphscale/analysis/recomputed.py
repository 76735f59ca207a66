"""Forward values that a backward pass computes again: by checkpointing, or because no exporter merged the two."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping

import onnx_ir as ir

from graphscale.flow.interpreter import Flow
from graphscale.flow.term import Term, TermDomain
from graphscale.graph.numbering import Part
from graphscale.graph.values import has_bodies, inputs_of

__all__ = ["find_recomputed_values"]


def find_recomputed_values(
    forward: Iterable[Part],
    rest: Iterable[Part],
    mixing: Container[ir.Value],
    moved: Mapping[ir.Value, ir.Value] | None = None,
    origins: Mapping[ir.Value, ir.Value] | None = None,
) -> dict[ir.Value, ir.Value]:
    """Map values outside of forward to the forward values that they equal.

    Args:
        forward: the nodes that the loss depends on, with their results and operands, in execution order.
        rest: the others.
        mixing: the forward values to compare with: those that mix several inputs, and so are no seed.
        moved: values that count as equal to a weight; all values computed from them are compared, since none is a seed.
        origins: the operands that inputs of bodies are.
    """
    origins = origins or {}
    domain = TermDomain()
    domain.given = {value: domain.source(weight) for value, weight in (moved or {}).items()}
    flow = Flow(domain, domain.given)
    equal: dict[Term, list[ir.Value]] = {}
    fresh: set[ir.Value] = set()  # results without a term
    for node, results, operands in forward:
        _evaluate(flow, domain, (node, results, operands), origins)
        for value in results:
            equal.setdefault(flow.of(value), []).append(value)
    fresh.update(value for value in equal.pop(None, ()) if not _is_source(value))
    domain.is_closed = True
    originals: dict[ir.Value, ir.Value] = {}
    behind = set(moved or ())
    for node, results, operands in rest:
        if not fresh.isdisjoint(operands):  # recomputed only if all its operands are
            fresh.update({*results} - domain.given.keys())
            continue
        _evaluate(flow, domain, (node, results, operands), origins)
        fresh.update(value for value in results if flow.of(value) is None and not _is_source(value))
        follows = not behind.isdisjoint(operands)
        for value in results:
            same = equal.get(flow.of(value), ())
            original = next((v for v in same if v in mixing or follows), None)
            if original is not None:
                originals[value] = original
                behind.update([value] if follows else ())
    return originals


def _evaluate(flow: Flow[Term], domain: TermDomain, part: Part, origins: Mapping[ir.Value, ir.Value]) -> None:
    """Evaluate the terms of some results of a node; an output of a node with bodies follows from these."""
    node, results, operands = part

    def term(value: ir.Value) -> Term:
        known = flow.of(value)
        return domain.source(value) if known is None else known

    if not has_bodies(node):
        if origins:
            flow.elements.update((value, term(origins[value])) for value in inputs_of(node) if value in origins)
        flow.write(node, domain.transfer(node, flow.operands(node)))
    elif operands:
        terms = [*map(term, operands)]
        flow.elements[results[0]] = None if None in terms else domain.result((node.op_type, *terms))


def _is_source(value: ir.Value) -> bool:
    """Return whether a value is an input or a constant, which both passes may read."""
    node = value.producer()
    return node is None or node.op_type == "Constant"
