"""The analysis of a training graph: its loss, the places of the scale, its gradients and its updates."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import onnx_ir as ir

from graphscale.analysis.edits import Plan
from graphscale.analysis.hints import NO_HINTS, Hints
from graphscale.analysis.loss import find_loss_candidates
from graphscale.analysis.loss_set import LossChoice, choose_losses
from graphscale.analysis.roles.answers import Answers
from graphscale.analysis.roles.assignment import assign_roles
from graphscale.analysis.roles.role_table import Role, Roles
from graphscale.analysis.solution import solve_losses
from graphscale.analysis.topology import Topology
from graphscale.analysis.training_result import TrainingGraph
from graphscale.analysis.updates import Update, find_held_initializers, same_type, zeros_as_inputs
from graphscale.errors import LossError, RolesError, SeedNotFoundError, UpdateError, suggest
from graphscale.flow.flat_graph import FlatGraph
from graphscale.graph.values import (
    constant_number,
    inputs_of,
    is_float,
    is_scalar,
    uses_of,
    value_label,
    values_by_name,
)
from graphscale.graph.walks import NodeIndex
from graphscale.operators import Trait, has_trait
from graphscale.process.stages import report_stage

__all__ = ["TrainingGraph", "analyse"]


def analyse(
    graph: ir.Graph, hints: Hints = NO_HINTS, index: NodeIndex | None = None, *, asking: bool = True
) -> TrainingGraph:
    """Analyse the main graph of a model.

    Args:
        graph: the main graph, with no calls of model-local functions in it.
        hints: the user's names.
        index: the nodes of the graph, if they are known.
        asking: True to refuse a graph with an open role of an output; else such a role is a proposal.

    Raises:
        LossError, SeedNotFoundError, NonlinearGradientError, UnknownOperatorError, GradientError, UpdateError,
            RolesError, UnsupportedModelError: the message names the value, node or body, and the remedy.
    """
    named, answers, index = list[Update](), hints.answers, index or NodeIndex(graph)
    if answers.states:
        from graphscale.analysis.named_values import resolve_pairs

        named = resolve_pairs(graph, answers)
    with zeros_as_inputs(graph, named):
        result = _analyse_inputs(graph, hints, named, index, asking)
        with zeros_as_inputs(graph, result.updates) as more:
            return analyse(graph, hints, index, asking=asking) if more else result


def _analyse_inputs(
    graph: ir.Graph, hints: Hints, named: Sequence[Update], index: NodeIndex, asking: bool
) -> TrainingGraph:
    """Analyse a main graph whose states are inputs, but for those that no pair is known of."""
    report_stage("looking for the loss, the gradients and the carried state")
    answers = hints.answers
    edge, chosen, losses = None, list[ir.Value](), list[ir.Value]()
    if hints.seed is not None or hints.gradients or answers.losses:
        from graphscale.analysis.named_values import resolve_gradient, resolve_loss, resolve_seed

        values = values_by_name(graph)
        edge = None if hints.seed is None else resolve_seed(graph, hints.seed)
        # The scale comes out here; a gradient of a roles file may be computed from these values.
        chosen = [resolve_gradient(values, name) for name in hints.gradients]
        losses = [resolve_loss(values, name, answers.label(name, "--loss")) for name in answers.losses]
    others = {*answers.states, *answers.gradients, *answers.metrics, *hints.gradients}
    rest = {value for value in graph.outputs if value.name in others}
    candidates = find_loss_candidates(graph, rest)
    if not (candidates or losses):
        from graphscale.analysis.body_checks import refuse_losses  # few steps return no number
        from graphscale.analysis.loss_rivals import find_unreduced_losses

        refuse_losses(FlatGraph(graph))
        candidates = find_unreduced_losses(graph, rest)
    held = find_held_initializers(graph, index.holders)
    try:
        choice = choose_losses(
            candidates, lambda losses: solve_losses(graph, losses, held, edge, chosen, index), answers, losses
        )
    except (LossError, SeedNotFoundError) as error:
        if answers.accepted:
            raise type(error)(f"{error}; there is no proposal for the loss that --accept could take") from error
        raise
    return _finish(graph, choice, named, set(chosen), answers, asking)


def _finish(
    graph: ir.Graph,
    choice: LossChoice,
    named: Sequence[Update],
    chosen: set[ir.Value],
    answers: Answers,
    asking: bool,
) -> TrainingGraph:
    solution = choice.solution
    topology, plan = solution.topology, solution.solver.plan
    # An output that scales with the loss is a gradient, unless the user answers otherwise: a moment may decay at once.
    gradients = {v for v in plan.unscaled if v.is_graph_output()} | chosen
    wrong = next((u for u in named if u.output in gradients and u.input in topology.forward), None)
    if wrong is not None:
        raise UpdateError(
            f"{answers.label(wrong.output.name or '', '--update')}={wrong.input.name}: the output is a gradient, it "
            "scales with the loss; it cannot be the next value of a weight"
        )
    if solution.coverage.total == 0:
        _refuse_held(gradients - chosen, topology, plan)
    roles = assign_roles(topology, plan, named, chosen, answers)
    if not choice.certain:
        losses = {v: roles.outputs[v] for v in topology.losses}
        doubted = {v: dataclasses.replace(each, evidence=choice.how, certain=False) for v, each in losses.items()}
        roles = dataclasses.replace(roles, outputs={**roles.outputs, **doubted})
    if answers.accepted:
        roles = roles.accept()
    states = {output.name for output in roles.states()}
    for name in answers.kept:
        if name not in states:
            raise RolesError(
                f"{answers.label(name, '--keep')}: the graph has no carried state of this name among its "
                f"outputs{suggest(name, sorted(filter(None, states)), 'there are')}"
            )
    if asking and not all(each.certain for each in roles.outputs.values()):
        from graphscale.analysis.roles.roles_file import ask

        raise ask(roles.table())
    updates, warnings = _updates(roles, named, answers), [*solution.coverage.warnings(), *choice.warnings]
    if any(map(is_scalar, roles.inputs)) or any(map(_meets_number, plan.unscaled)):
        from graphscale.analysis.remarks import make_remarks  # it is about numbers

        warnings += make_remarks(topology, plan, roles, updates)
    accumulators = topology.nodes_like(lambda operator: bool(operator.traits & Trait.ACCUMULATOR))
    places = sorted(plan.places, key=lambda p: topology.position(p.value if p.edge is None else p.edge.node.outputs[0]))
    return TrainingGraph(
        graph=graph,
        loss=topology.loss,
        loss_found=choice.how,
        places=tuple(places),
        unscalings=tuple(sorted(plan.unscaled.values(), key=lambda u: topology.position(u.value))),
        roles=roles,
        updates=updates,
        accumulators=tuple(sorted(accumulators, key=topology.index.__getitem__)),
        coverage=solution.coverage,
        terms=_find_unchecked_terms(topology, plan, roles, updates),
        degrees=plan.degrees(),
        topology=topology,
        warnings=tuple(warnings),
    )


def _find_unchecked_terms(
    topology: Topology, plan: Plan, roles: Roles, updates: Sequence[Update]
) -> tuple[ir.Value, ...]:
    """Find the terms that are to be checked beside the gradients, if a batch reaches weights past all of these."""
    batches = {value for value, each in roles.inputs.items() if each.role is Role.BATCH and is_float(value)}
    ends = {value.producer() for value in plan.unscaled}
    weights = {u.output: u.input for u in updates if u.input in topology.forward and is_float(u.output) and not u.kept}
    if batches.isdisjoint(topology.ancestors(weights, stop=ends.__contains__)):
        return ()
    from graphscale.analysis.past_gradients import find_moving_terms  # few steps read a batch there

    return find_moving_terms(topology, plan, batches, weights)


def _meets_number(value: ir.Value) -> bool:
    """Return whether a gradient, or a cast of it, is an operand beside a constant number."""
    casts = [use.node.outputs[0] for use in uses_of(value) if has_trait(use.node, Trait.CAST)]
    readers = (use.node for each in (value, *casts) for use in uses_of(each))
    return any(constant_number(operand) is not None for node in readers for operand in inputs_of(node))


def _refuse_held(gradients: set[ir.Value], topology: Topology, plan: Plan) -> None:
    """Refuse a gradient that may be the next value of a state, where no contraction separates the optimizer.

    Such a value contains the state, or is its product with a value where the scale enters: an exponentiated gradient.
    """
    for value in (output for output in topology.graph.outputs if output in gradients):
        node = value.producer()
        factors = inputs_of(node) if node is not None and node.op_type in ("Mul", "Div") else ()
        is_entered = not plan.scaled_values.isdisjoint(factors)
        products = (v for v in factors if is_entered and v in topology.states and same_type(v, value))
        state = next(iter((*topology.held(value), *products)), None)
        if state is not None:
            raise UpdateError(
                f"output {value_label(value)} could be the next value of {state.name!r}, or a gradient, and no "
                f"contraction tells where the optimizer begins; name the gradient: --gradient {value.name}, or the "
                "optimizer's operand"
            )


def _updates(roles: Roles, named: Sequence[Update], answers: Answers) -> tuple[Update, ...]:
    """Return the certain pairs of carried state, first those that the user named."""
    pairs = {update.output: update.input for update in named} | roles.states()
    return tuple(
        Update(output, value, roles.outputs[output].evidence, output.name in answers.kept)
        for output, value in pairs.items()
    )
