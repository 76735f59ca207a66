"""Weak evidence for pairs: dependences, other forms, and types alone. Most steps need none of it."""

from __future__ import annotations

import onnx_ir as ir

from graphscale.analysis.roles.facts import Evidence, Facts, Found, Gradients, Row, Strength, without_stored
from graphscale.analysis.updates import NEXT_STATE
from graphscale.graph.cones import follows_from_numbers
from graphscale.graph.values import inputs_of, is_float, is_known_zero, is_scalar

__all__ = ["find_weak_evidence", "possibilities"]


def _dependences(facts: Facts, gradients: Gradients, output: ir.Value) -> Found:
    """Yield the inputs that an output depends on, on paths apart from gradients and the loss."""
    for value, is_plain in facts.dependence.alike(output):
        if _may_hold_state(facts, output, value):
            strength = Strength.PLAIN if is_plain else Strength.DEPENDS
            yield value, Evidence(strength, "it depends on its previous value")


def _shifts(facts: Facts, gradients: Gradients, output: ir.Value) -> Found:
    """Yield the inputs outside the loss whose next value a handed-through input may be: that of the last step."""
    source = facts.copied_input(output)
    if source is not None and source.is_graph_input() and source is not output and not is_scalar(source):
        for value in facts.inputs_like(output):
            if value is not source and facts.is_ignored(value):
                yield value, Evidence(Strength.DEPENDS, "the value of the last step")


def _compared(facts: Facts, gradients: Gradients, output: ir.Value) -> Found:
    """Yield the inputs outside the loss that a gradient or a number is compared with: its values of the last step."""
    if gradients.includes(output):
        for value in gradients.met(output):
            yield value, Evidence(Strength.PLAIN, "the gradient that the next step compares with its own")
    is_number = is_scalar(output) and is_float(output) and not output.shape
    for node in (each for view in facts.views(output) for each in facts.comparing(view)) if is_number else ():
        for other in map(facts.copied_input, inputs_of(node)):
            if other is not None and facts.is_ignored(other):
                yield other, Evidence(Strength.DEPENDS, "the number that the next step compares with its own")


def _other_forms(facts: Facts, gradients: Gradients, output: ir.Value) -> Found:
    """Yield the weights whose next value is another output in another form, such as float16 casts of masters."""
    if output in facts.behind_gradients and any(view.is_graph_output() for view in facts.views(output)[1:]):
        for value in facts.inputs_like(output):
            if value in facts.topology.forward and not is_scalar(value) and value not in facts.topology.targets:
                yield value, Evidence(Strength.DEPENDS, "it is another form of the next value of a state")


def _stored_numbers(facts: Facts, gradients: Gradients, output: ir.Value) -> Found:
    """Yield the stored numbers that an output holds: counts, averages, rates; a constant is added to a metric."""
    node = output.producer()
    if not is_scalar(output) or node is None:
        return
    is_choice = node.op_type in ("Where", "If", "Max", "Min")
    for value, c in facts.held(output).items():
        if c >= NEXT_STATE and is_scalar(value) and not value.is_graph_input():
            is_next = not is_float(output) or c != 1 or (facts.stores_weights and is_choice)
            if is_next or (facts.stores_weights and not any(map(ir.Value.is_graph_input, facts.sources_of(output)))):
                yield value, Evidence(Strength.PLAIN, "it is computed from a number in the graph")


def find_weak_evidence(facts: Facts, gradients: Gradients, output: ir.Value) -> Found:
    """Yield the weak evidence for the pairs of an output."""
    for find in (_dependences, _shifts, _compared, _other_forms, _stored_numbers):
        yield from find(facts, gradients, output)


def possibilities(facts: Facts, output: ir.Value) -> Row:
    """Return the inputs that an output may replace by the types and readers of the two alone."""
    fitting = (v for v in facts.inputs_like(output) if _may_hold_state(facts, output, v))
    possible = (value for value in fitting if _may_replace(facts, output, value))
    return without_stored(facts, dict.fromkeys(possible, Evidence(Strength.TYPE, "it has the type of an open input")))


def _may_hold_state(facts: Facts, output: ir.Value, value: ir.Value) -> bool:
    """Return whether a value may be the state that an output replaces: an input, a stored weight, moment, or key."""
    if value.is_graph_input():
        return True
    if is_scalar(value) and value.uses() and value not in facts.topology.states:
        return False
    return facts.stores_weights or not value.uses() or value in facts.held_possibly(output)


def _may_replace(facts: Facts, output: ir.Value, value: ir.Value) -> bool:
    """Return whether an output could be the next value of an input of its type, by the two alone."""
    topology, is_backward = facts.topology, output in facts.behind_gradients
    is_stored = value.is_initializer() and not value.is_graph_input()
    if not value.uses():
        return not (is_stored and is_scalar(value) and is_float(value))  # a remaining constant
    if is_stored:
        if value in topology.forward or output in topology.forward:
            return False
        return is_backward or not (facts.factors[value] or is_known_zero(value))
    if is_scalar(value) and is_float(value):
        # A metric reads a batch; a number computed from numbers may be a schedule's. The loss reads no next rate.
        return output not in topology.forward and facts.is_ignored(value) and follows_from_numbers(output)
    # An input that enters behind the last contraction is a target or similar.
    return is_backward or (not topology.late_inputs(value) and is_float(value))
