"""The state that a graph carries from step to step, through outputs or in place."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Collection, Iterable, Iterator, Sequence

import onnx_ir as ir

from graphscale.analysis.scales import sources_of
from graphscale.analysis.updates import NEXT_STATE, find_coefficients, is_constant_view, same_type
from graphscale.checks.linting.view import View
from graphscale.checks.patterns import assigns, input_at
from graphscale.graph.values import is_scalar
from graphscale.operators import Trait, has_trait, optimizer_of, written_inputs
from graphscale.step.training_step import Carried

__all__ = ["Carry", "State", "find_in_place", "find_states", "held_state"]


class Carry(enum.Enum):
    """The ways in which a state gets its next value."""

    OUTPUT = "a graph output is the next value"
    WRITE = "an in-place operator assigns the next value"
    ADD = "an in-place operator adds to it"
    OPTIMIZER = "an optimizer operator writes it in place"
    STATISTIC = "an operator writes a running statistic in place"


@dataclasses.dataclass(frozen=True)
class State:
    """A piece of carried state.

    Attributes:
        value: its present value: a graph input or an initializer, or the sequence for a sequence of weights.
        next: the next value, or the added one.
        carry: the way of carrying.
        node: the operator that writes in place; None for an output.
    """

    value: ir.Value
    next: ir.Value
    carry: Carry
    node: ir.Node | None = None


def find_states(
    view: View, carried: Sequence[Carried] | None, not_states: Collection[ir.Value], losses: Collection[ir.Value]
) -> list[State]:
    """Find the carried state, in graph order of the outputs, then of the operators that write in place.

    Args:
        view: the graph.
        carried: the carried state of a graph that graphscale scaled; None for others, whose outputs are paired with
            inputs and weights in them with a coefficient of at least 0.5, as in `analysis.updates`.
        not_states: outputs that are no state: the loss, the finite check.
        losses: the outputs that could be the loss.
    """
    if carried is not None:
        found = [State(each.input, each.next, Carry.OUTPUT) for each in carried if not each.in_place]
    else:
        found = _without_constants(view, [*_paired(view, not_states)], losses)
    known = {state.value for state in found}
    return found + [state for state in find_in_place(view.nodes) if state.value not in known]


def _paired(view: View, not_states: Collection[ir.Value]) -> Iterator[State]:
    free, constants = set(view.graph.inputs), [value for value in sources_of(view.graph) if not value.is_graph_input()]
    weights = {value for value in constants if not is_scalar(value)}
    scalars = {value for value in constants if is_scalar(value) and _is_like_state(value)}
    for output in view.graph.outputs:
        if output in not_states or output.producer() is None:
            continue
        best = held_state(output, free) or (None if is_constant_view(output) else held_state(output, weights))
        if best is None and _depends_on_constants(view, output):
            best = held_state(output, scalars)
        if best is not None:
            for states in (free, weights, scalars):
                states.discard(best)
            yield State(best, output, Carry.OUTPUT)


def _without_constants(view: View, states: list[State], losses: Collection[ir.Value]) -> list[State]:
    """Drop initializers that are no inputs, unless a loss depends on one: a gradient may contain a constant."""
    weights = {state.value for state in states if not state.value.is_graph_input() and not is_scalar(state.value)}
    if not weights or not weights.isdisjoint(view.ancestors(losses)):
        return states
    return [state for state in states if state.value not in weights]


def held_state(output: ir.Value, states: Collection[ir.Value]) -> ir.Value | None:
    """Return the state with the largest coefficient in an output, of at least 0.5."""
    coefficients = find_coefficients(output, states) if states else {}
    near = {v: c for v, c in coefficients.items() if c >= NEXT_STATE and same_type(output, v)}
    return max(near, key=lambda value: near[value], default=None)


def _is_like_state(value: ir.Value) -> bool:
    """Return whether a number is selected or counted up, and an operand: a constant is rarely both."""
    uses = [(use.node.op_type, use.idx) for use in value.uses()]
    kept = any(op == "Add" or (op == "Where" and index > 0) for op, index in uses)
    return kept and any(op not in ("Where", "Identity") for op, _ in uses)


def _depends_on_constants(view: View, output: ir.Value) -> bool:
    """Return whether a scalar is computed from constants and flags alone."""
    node, may_be_scalar = output.producer(), output.shape is None or is_scalar(output)
    is_computed = node is not None and node.op_type not in ("Identity", "Constant")
    return is_computed and may_be_scalar and output in view.numbers(frozenset())


def find_in_place(nodes: Iterable[ir.Node]) -> Iterator[State]:
    """Yield the states that nodes write in place, by their operators."""
    for node in nodes:
        optimizer = optimizer_of(node)
        if has_trait(node, Trait.ACCUMULATOR):
            written = [(node.inputs[0], node.inputs[1], Carry.WRITE if assigns(node) else Carry.ADD)]
        elif optimizer is not None and optimizer.inputs:
            written = [(node.inputs[optimizer.inputs.index("params")], node.outputs[0], Carry.OPTIMIZER)]
        else:
            pairs = {i: node.outputs[o] for i, o in written_inputs(node).items() if o < len(node.outputs)}
            written = [(input_at(node, i), value, Carry.STATISTIC) for i, value in pairs.items()]
        for state, value, carry in written:
            if state and value and (carry is Carry.OPTIMIZER or state.producer() is None):
                yield State(state, value, carry, node)
