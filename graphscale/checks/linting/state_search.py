"""The state that a graph carries from step to step, through outputs or in place."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Container, Iterable, Iterator

import onnx_ir as ir

from graphscale.analysis.updates import NEXT_STATE, find_coefficients, same_type
from graphscale.checks.linting.view import View
from graphscale.checks.patterns import assigns, input_at
from graphscale.graph.values import is_scalar
from graphscale.operators import Trait, has_trait, optimizer_of, written_inputs
from graphscale.step.training_step import Step

__all__ = ["Carry", "State", "find_in_place", "find_states"]


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


def find_states(view: View, step: Step) -> list[State]:
    """Return the carried state of a step: that with a next value among the outputs, then that written in place."""
    pairs = {each.next: each.input for each in step.carried if not each.in_place}
    if not step.scales:
        known = (item for item in step.roles.outputs.items() if item[1].certain)
        pairs = {output: each.pair for output, each in known if each.pair is not None}
        pairs |= _find_held(view, pairs, () if step.roles.outputs else view.graph.inputs)
    found = [State(value, following, Carry.OUTPUT) for following, value in pairs.items()]
    carried = {*pairs.values()}
    return found + [state for state in find_in_place(view.nodes) if state.value not in carried]


def _find_held(
    view: View, known: Container[ir.Value], inputs: Iterable[ir.Value]
) -> Iterator[tuple[ir.Value, ir.Value]]:
    """Yield further outputs with the states that they hold: inputs of a graph without roles, and stored numbers.

    The next value of a stored number is computed from constants and flags alone.
    """
    free, stored = {*inputs}, {v for v in view.graph.initializers.values() if not v.is_graph_input() and _is_state(v)}
    for output in view.graph.outputs if free or stored else ():
        node = output.producer()
        is_number = node is not None and node.op_type not in ("Identity", "Constant") and _may_be_number(view, output)
        held = find_coefficients(output, free | stored if is_number else free) if output not in known else {}
        near = {v: c for v, c in held.items() if c >= NEXT_STATE and same_type(output, v)}
        if near:
            yield output, (best := max(near, key=lambda value: near[value]))
            free.discard(best)
            stored.discard(best)


def _may_be_number(view: View, output: ir.Value) -> bool:
    return (output.shape is None or is_scalar(output)) and output in view.numbers(frozenset())


def _is_state(value: ir.Value) -> bool:
    """Return whether a value is a number that is selected or counted up, and an operand: a constant is rarely both."""
    uses = [(use.node.op_type, use.idx) for use in value.uses()]
    kept = any(op == "Add" or (op == "Where" and index > 0) for op, index in uses)
    return is_scalar(value) and kept and any(op not in ("Where", "Identity") for op, _ in uses)


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
