"""The values that look like gradients where no contraction and no gradient operator is backward."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import onnx_ir as ir

from graphscale.analysis.loss import is_differentiable
from graphscale.analysis.topology import Topology
from graphscale.analysis.updates import NEXT_STATE, find_coefficients
from graphscale.graph.values import inputs_of, is_float, is_scalar
from graphscale.graph.walks import reach
from graphscale.operators import Kind, Trait, rule_of

__all__ = ["find_gradient_like_values"]

_SCATTERS = ("ScatterND", "ScatterElements")
_SUMS = ("Add", "Sub", "Sum", *_SCATTERS)


def find_gradient_like_values(topology: Topology) -> list[ir.Value]:
    """Find the values to demand the scale of: outputs, or what they add to state, above moments, rates and powers."""
    states = topology.states | _find_held_numbers(topology.graph)
    read = topology.descendants({v for v in states if v in topology.forward})
    fed = topology.descendants({v for v in states if v not in topology.forward and is_float(v)})

    def above(value: ir.Value) -> Sequence[ir.Value]:
        node = value.producer()
        rule = None if node is None or node not in topology.backward else rule_of(node)
        if node is None or rule is None:
            return ()
        operands = inputs_of(node)
        if node.op_type == "Pow" or (value in fed and rule.kind is Kind.QUOTIENT):
            return operands[:1]
        if value in fed and rule.kind in (Kind.LINEAR, Kind.PRODUCT):
            return operands
        factors = operands if node.op_type == "Mul" else ()
        return [v for v in factors if (maker := v.producer()) is not None and maker.op_type == "Pow"]

    added = [v for output in topology.graph.outputs for v in _find_summands(topology, output, states)]
    found = (v for v in reach(added, above) if not above(v))
    found = (v for v in found if v in added or (v in read and is_differentiable(v)))
    moments = states - topology.forward
    return [v for v in found if not _holds_one_of(moments, v)]


def _find_held_numbers(graph: ir.Graph) -> set[ir.Value]:
    """Find the stored numbers that an output holds: they may be weights and moments."""
    numbers = {v for v in graph.initializers.values() if is_scalar(v) and is_float(v)}
    held = (find_coefficients(output, numbers) for output in graph.outputs)
    return {v for coefficients in held for v, c in coefficients.items() if c >= NEXT_STATE}


def _find_summands(topology: Topology, value: ir.Value, states: Collection[ir.Value]) -> list[ir.Value]:
    """Return what an output adds to the state that it holds, or the output itself where it holds none.

    A share of the state alone, as that of weight decay, counts only where nothing else is added.
    """
    if value is topology.loss or not topology.is_backward(value) or not is_float(value):
        return []
    node = value.producer()
    is_scattered = node is not None and node.op_type in _SCATTERS
    held = find_coefficients(value, states, through=Trait.MOVE) if is_scattered else find_coefficients(value, states)
    if not any(c >= NEXT_STATE for c in held.values()):
        return [value] if topology.may_be_state(value) else []

    def above(value: ir.Value) -> Sequence[ir.Value]:
        node = value.producer()
        return inputs_of(node) if node is not None and (value is output or _holds_one_of(held, value)) else ()

    output = value
    held_values = [v for v in reach([output], above) if above(v)]
    sums = [node for v in held_values if (node := v.producer()) is not None and node.op_type in _SUMS]
    added = [v for node in sums for v in inputs_of(node) if v not in held and not _holds_one_of(held, v)]
    return [v for v in added if not find_coefficients(v, held, least=0.0)] or added


def _holds_one_of(states: Collection[ir.Value], value: ir.Value) -> bool:
    """Return whether a value holds a state, as a decayed one does, and the next gain of a weight's rate."""
    return any(c >= NEXT_STATE for c in find_coefficients(value, states).values())
