"""The assignment of a role to each input and output, from all evidence at once.

The loss and the gradients are known. Every other output is the next value of an input, or is not read by a later step.
Pairs are found by elimination within exact type and shape, in rounds of ever weaker evidence: an output contains its
previous value with a coefficient near one, or with any coefficient; depends on it without a contraction between, or at
all, on paths apart from the gradients; is another form of the next value of a state. The remaining outputs are a
question.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import onnx_ir as ir

from graphscale.analysis.edits import Plan
from graphscale.analysis.roles.answers import Answers
from graphscale.analysis.roles.changed_batches import may_be_batch
from graphscale.analysis.roles.conventions import (
    gradients_by_convention,
    metrics_by_convention,
    pairs_by_convention,
    pairs_by_order,
)
from graphscale.analysis.roles.fixed import assign_fixed_roles, assign_predictions, doubt_constants
from graphscale.analysis.roles.leaving_gradients import Gradients
from graphscale.analysis.roles.pairs import (
    confirm_kept_numbers,
    doubt_replaced_weights,
    is_weight,
    may_begin_anew,
    may_hold_moment,
    pair_by_coefficients,
    pair_by_dependence,
    pair_other_forms,
)
from graphscale.analysis.roles.proposals import doubt_surplus, propose
from graphscale.analysis.roles.recurrent import pair_recurrent
from graphscale.analysis.roles.role_table import Assigned, Role, Roles
from graphscale.analysis.roles.step_interface import Interface
from graphscale.analysis.topology import Topology
from graphscale.analysis.updates import NEXT_STATE, Update, same_type
from graphscale.errors import RolesError, suggest
from graphscale.graph.values import is_float, is_scalar, value_label

__all__ = ["assign_roles"]


def assign_roles(
    topology: Topology, plan: Plan, named: Sequence[Update], gradients: Collection[ir.Value], answers: Answers
) -> Roles:
    """Assign a role to each input and output of a main graph.

    Args:
        topology: the topology of the graph, for its loss.
        plan: the places of the loss scale, and of the divisions by it.
        named: the pairs that the user named.
        gradients: the values that the user named as places where the scale comes out.
        answers: all answers of the user, these names included.

    Raises:
        RolesError: an answer contradicts the graph.
    """
    step, stated = _assign(topology, plan, named, gradients, answers, ()), list[Update]()
    for pairs_by in (pairs_by_convention, pairs_by_order):
        if found := pairs_by(step):
            stated += found
            step = _assign(topology, plan, named, gradients, answers, stated)
    for output, assigned in {**metrics_by_convention(step), **gradients_by_convention(step)}.items():
        if (value := step.outputs[output].pair) is not None:
            step.inputs[value] = Assigned(*_role_of_input(step, value))
        step.outputs[output] = assigned
    inputs = dict.fromkeys((*topology.graph.inputs, *step.inputs))
    outputs = dict.fromkeys(topology.graph.outputs)
    return Roles({value: step.inputs[value] for value in inputs}, {value: step.outputs[value] for value in outputs})


def _assign(
    topology: Topology,
    plan: Plan,
    named: Sequence[Update],
    gradients: Collection[ir.Value],
    answers: Answers,
    stated: Sequence[Update],
) -> Interface:
    step = Interface(topology, plan)
    _take_answers(step, named, answers)
    for update in stated:
        step.pair(update.output, update.input, update.how)
    found = Gradients(step)
    found.pair_compared(gradients)
    places = [value for value in step.open_outputs() if value in gradients]
    step.outputs.update((value, Assigned(Role.GRADIENT, answers.evidence(value.name))) for value in places)
    assign_fixed_roles(step)
    pair_by_coefficients(step, ir.Value.is_graph_input)
    found.pair_compared()
    found.assign()  # The moments in sums with gradients have their next values now.
    found.assign_counted()
    pair_by_coefficients(step, ir.Value.is_initializer)
    doubt_replaced_weights(step)
    pair_recurrent(step)
    assign_predictions(step)
    pair_by_dependence(step, lambda value: is_weight(step, value))
    pair_by_dependence(step, may_hold_moment)
    confirm_kept_numbers(step)
    pair_other_forms(step)
    found.doubt_noise()
    propose(step)
    doubt_constants(step)
    found.doubt()
    doubt_surplus(step)
    others = [value for value in topology.graph.inputs if value not in step.inputs]
    step.inputs.update({value: Assigned(*_role_of_input(step, value)) for value in others})
    return step


def _take_answers(step: Interface, named: Sequence[Update], answers: Answers) -> None:
    outputs = {value.name: value for value in step.graph.outputs}
    # An average may contain the weight whose next value it is named to be.
    confirmed = {u.input for u in named if step.held(u.output).get(u.input, 0.0) >= NEXT_STATE}
    shared = {u.input for u in named if u.input in step.held_possibly(u.output)}
    for role, names in ((Role.METRIC, answers.metrics), (Role.GRADIENT, answers.gradients)):
        for name in names:
            if name not in outputs:
                source, hint = answers.sources.get(name, "roles"), suggest(name, outputs, "there are")
                raise RolesError(f"{source}: the graph has no output {name!r}{hint}")
            _refuse_contradiction(step, outputs[name], role, None, shared, answers)
            step.outputs[outputs[name]] = Assigned(role, answers.evidence(name))
    for update in named:
        _refuse_contradiction(step, update.output, Role.STATE, update.input, confirmed, answers)
        step.pair(update.output, update.input, update.how)


def _refuse_contradiction(
    step: Interface,
    output: ir.Value,
    role: Role,
    value: ir.Value | None,
    confirmed: Collection[ir.Value],
    answers: Answers,
) -> None:
    """Refuse an answer if the output contains one other input of its type, without an answer of its own.

    Raises:
        RolesError: the output contains such an input.
    """
    source = answers.sources.get(output.name or "")
    if (answers.forced and source is None) or is_scalar(output) or step.copied_input(output) is not None:
        return
    if value is not None and value in step.held_possibly(output):
        return
    near_one = {v: c for v, c in step.held(output).items() if NEXT_STATE <= c <= 1 / NEXT_STATE}
    held = {v: c for v, c in near_one.items() if same_type(output, v)}
    if held.keys() & confirmed and (value is None or value in step.topology.ancestors([output])):
        return
    if len(held) == 1 and value not in held:
        other, coefficient = next(iter(held.items()))
        if value is None and may_be_batch(step, output, other):
            return
        if value is not None and value in step.topology.forward and may_begin_anew(step, output, other):
            return
        said = f"a {role.value}" if value is None else f"the next value of {value.name!r}"
        where, remedy = ("", "pass --force-roles") if source is None else (f"{source}: ", "name its role with --roles")
        raise RolesError(
            f"{where}output {value_label(output)} is named {said}, but it holds {other.name!r} {coefficient:g} times, "
            f"and no other input of its type; correct it, or {remedy}"
        )


def _role_of_input(step: Interface, value: ir.Value) -> tuple[Role, str]:
    if value.is_initializer():
        return Role.CONSTANT, "it has a value, and no output is its next value"
    if is_scalar(value):
        return Role.HYPERPARAMETER, "one number, and no output is its next value"
    if is_float(value) and value in step.weights_like(value) and step.gradients_like(value):
        return Role.WEIGHT, "a gradient of its type leaves the graph"
    return Role.BATCH, "no output is its next value"
