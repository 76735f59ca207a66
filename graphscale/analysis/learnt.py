"""The terms that move states: gradients without a contraction, of weights that are learnt element by element.

Such a weight is read by the loss. Its next value adds a term that depends on the weight itself, on the target, and in a
smooth way on a sum over the tail of the loss. A running total adds a number that does not depend on it; an average has
weights that sum to one; a prediction is no sum over the batch.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Container, Iterable, Sequence

import onnx_ir as ir

from graphscale.analysis.loss import is_differentiable, is_number, smooth_operands
from graphscale.analysis.places import find_held_numbers
from graphscale.analysis.topology import Topology
from graphscale.analysis.updates import (
    DIRECT,
    NEXT_STATE,
    Factors,
    find_coefficients,
    find_held,
    find_terms,
    known_factors,
)
from graphscale.graph.values import inputs_of, is_float
from graphscale.graph.walks import reach
from graphscale.operators import Kind, Trait, has_trait, rule_of

__all__ = ["GradientLikeValues", "find_learnt_terms", "find_summands"]

_SCATTERS = ("ScatterND", "ScatterElements")
_SUMS = ("Add", "Sub", "Sum", *_SCATTERS)
# The functions of gradients in optimizers.
_BENDING = ("Pow", "Sign")
_ARITHMETIC = {"Add": operator.add, "Sub": operator.sub, "Mul": operator.mul, "Div": operator.truediv}


class GradientLikeValues:
    """The values of a graph that look like gradients: above moments, rates, powers and signs.

    Args:
        topology: the topology of the graph.
    """

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._states = topology.states | find_held_numbers(topology)
        self._read = topology.descendants({v for v in self._states if v in topology.forward})
        self._fed = topology.descendants({v for v in self._states if v not in topology.forward and is_float(v)})

    def of(self, outputs: Iterable[ir.Value]) -> list[ir.Value]:
        """Return those by which some outputs change their state, or the outputs themselves."""
        summands = {output: find_summands(self._topology, output, self._states) for output in outputs}
        weights = self._states & self._topology.forward
        moved = [o for o, terms in summands.items() if o not in terms and _holds_one_of(self._topology, weights, o)]
        # Beside next weights, an output without a state is no gradient.
        added = [v for o, terms in summands.items() if o not in terms or not moved for v in terms]
        found = (v for v in reach(added, self._above) if not self._above(v))
        found = (v for v in found if v in added or (v in self._read and is_differentiable(v)))
        moments = self._states - self._topology.forward
        return [v for v in found if not _holds_one_of(self._topology, moments, v)]

    def _above(self, value: ir.Value) -> Sequence[ir.Value]:
        node = value.producer()
        rule = None if node is None or node not in self._topology.backward else rule_of(node)
        if node is None or rule is None:
            return ()
        operands = inputs_of(node)
        if node.op_type in _BENDING or (value in self._fed and rule.kind is Kind.QUOTIENT):
            return operands[:1]
        if value in self._fed and rule.kind in (Kind.LINEAR, Kind.PRODUCT):
            return operands
        factors = operands if node.op_type == "Mul" else ()
        return [v for v in factors if (maker := v.producer()) is not None and maker.op_type in _BENDING]


def find_learnt_terms(topology: Topology, moved: Iterable[tuple[ir.Value, ir.Value]]) -> list[ir.Value]:
    """Find the terms that move weights of the loss by its derivatives.

    Args:
        topology: the topology of the graph.
        moved: next weights that no known gradient moves, each with its weight.
    """
    found, like = dict[ir.Value, None](), GradientLikeValues(topology)
    for output, weight in moved:
        following, scatters = topology.descendants({weight}), _is_scattered(output)
        if not _is_average(topology, output, weight, following):
            terms = (_without_measures(topology, v, following) for v in like.of([output]))
            found.update((v, None) for v in terms if v in following and _is_derivative(topology, v, scatters))
    return [*found]


def _without_measures(topology: Topology, value: ir.Value, following: Container[ir.Value]) -> ir.Value:
    """Return the factor that depends on no other gradient, of a term that a measure of all gradients bounds."""
    while value in topology.propagated and (node := value.producer()) is not None and node.op_type in ("Mul", "Div"):
        factors = [v for v in inputs_of(node)[: 1 if node.op_type == "Div" else 2] if v in following]
        if not factors:
            break
        value = min(factors, key=lambda v: (v in topology.propagated, is_number(v)))
    return value


def _is_derivative(topology: Topology, value: ir.Value, scatters: bool) -> bool:
    """Return whether a value of the backward pass may be a derivative of the loss, without a contraction.

    Args:
        topology: the topology of the graph.
        value: the value.
        scatters: whether it is a sum once it is scattered.
    """
    late = topology.fed_late
    if not topology.is_backward(value) or (late and not topology.late_inputs(value) & late):
        return False

    def above(each: ir.Value) -> Sequence[ir.Value]:
        return () if each in topology.forward else smooth_operands(each)

    values = [*reach([value], above)]
    sums = values if scatters else [v for v in values if _is_sum(v) or is_number(v)]
    return any(v in topology.tail and v in topology.activation_dependent for v in reach(sums, above))


def _is_average(topology: Topology, output: ir.Value, state: ir.Value, following: Container[ir.Value]) -> bool:
    """Return whether an output is an average of a state and others, with numbers that sum to one.

    Args:
        topology: the topology of the graph.
        output: the output.
        state: the state in it.
        following: the values that depend on the state.
    """
    constants = known_factors(topology.flat.origins)

    def number(value: ir.Value, depth: int = 8) -> float:
        known, node = constants[value], value.producer()
        if known or value in following or value in topology.activation_dependent:
            return known
        operands = () if node is None or depth == 0 else tuple(number(v, depth - 1) for v in inputs_of(node))
        if not is_number(value):
            return 0.0
        if node is not None and node.op_type in _ARITHMETIC and len(operands) == 2 and all(operands):
            return float(_ARITHMETIC[node.op_type](*operands))
        return math.modf(math.pi * (topology.number(value) + 1))[0]  # an unknown number

    factors = Factors(number)

    def terms(value: ir.Value) -> list[tuple[ir.Value, float]]:
        node = value.producer()
        is_leaf = node is None or value in topology.forward or factors[value]
        found = [] if node is None or is_leaf else find_terms(node, value, factors, DIRECT)
        return [(topology.origin(operand), c) for operand, c in found if c]

    # The share of the state, and the sum of all shares: the value of the sum where all its operands are one.
    share, total = dict[ir.Value, float](), dict[ir.Value, float]()
    for value in sorted(reach([output], lambda v: [operand for operand, _ in terms(v)]), key=topology.number):
        parts = terms(value)
        share[value] = sum(c * share[v] for v, c in parts) if parts else float(value is state)
        total[value] = sum(c * total[v] for v, c in parts) if parts else 1.0
    return not math.isclose(share[output], 1.0) and math.isclose(total[output], 1.0, rel_tol=1e-6)


def find_summands(
    topology: Topology, value: ir.Value, states: Collection[ir.Value], least: float = NEXT_STATE
) -> list[ir.Value]:
    """Return the terms that an output adds to its state, or the output itself where it has no state.

    A share of the state, such as weight decay, counts only where it is the only term.

    Args:
        topology: the topology of the graph.
        value: the output.
        states: the values that may be its state.
        least: the least share of its state in the output.
    """
    if value is topology.loss or not topology.is_backward(value) or not is_float(value):
        return []
    through = Trait.MOVE if _is_scattered(value) else DIRECT
    held = find_coefficients(value, states, topology.factors, through)
    if not any(c >= least for c in held.values()):
        return [value] if topology.may_be_state(value) else []

    def above(value: ir.Value) -> Sequence[ir.Value]:
        return topology.flat.above(value) if value is output or _holds_one_of(topology, held, value) else ()

    output = value
    held_values = [v for v in reach([output], above) if above(v)]
    sums = [node for v in held_values if (node := v.producer()) is not None and node.op_type in _SUMS]
    added = [v for node in sums for v in inputs_of(node) if v not in held and not _holds_one_of(topology, held, v)]
    return [v for v in added if not find_coefficients(v, held, topology.factors, least=0.0)] or added


def _holds_one_of(topology: Topology, states: Collection[ir.Value], value: ir.Value) -> bool:
    """Return whether a value contains a state, such as a decayed state or the next gain of a weight's rate."""
    return bool(find_held([value], states, topology.factors))


def _is_scattered(value: ir.Value) -> bool:
    node = value.producer()
    return node is not None and node.op_type in _SCATTERS


def _is_sum(value: ir.Value) -> bool:
    node = value.producer()
    return node is not None and (node.op_type in _SCATTERS or has_trait(node, Trait.REDUCTION))
