"""The evidence for one of several candidates for the loss: their fit to the backward pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx_ir as ir

from graphscale.analysis.attempt import Attempt, TryTogether
from graphscale.analysis.loss import find_carried_number
from graphscale.analysis.loss_choice import LossCandidate, choose_by_derivatives
from graphscale.analysis.roles.answers import Answers
from graphscale.analysis.topology import Topology
from graphscale.analysis.updates import NEXT_STATE, find_coefficients, same_type
from graphscale.graph.values import constant_tensor, is_scalar
from graphscale.graph.walks import follows_from_numbers
from graphscale.operators import rule_of

__all__ = ["choose_attempt", "join_earlier_losses"]

# The first parts of the evidence exclude a candidate, the others rank it.
_EXCLUDING = 2


def _evidence(attempt: Attempt, attempts: Sequence[Attempt]) -> tuple[int, ...]:
    """Rank a choice of the loss by its fit to the backward pass.

    The backward pass of a loss reads ancestors of the loss, other than constants. A loss depends on activations and on
    no gradients, and needs no unscaling of another candidate. Its backward pass covers the most contractions, begins
    with a constant where possible, and reads the most values of its forward pass. A non-linear function of another
    candidate (a perplexity) is a metric; a total ranks above its parts.
    """
    topology, plan = attempt.topology, attempt.solver.plan
    others = {other.topology.loss for other in attempts} - {topology.loss}
    read_values = topology.forward & topology.ancestors(plan.unscaled)
    read_values = {v for v in read_values if v in topology.states or constant_tensor(v) is None}
    below, nonlinear = set(others), 0
    for node in topology.nodes:
        is_forward = any(value in topology.forward for value in node.outputs)
        if is_forward and any(operand in below for operand in node.inputs):
            below.update(node.outputs)
            rule = rule_of(node)
            nonlinear += rule is None or rule.bends
    # A loss within reach of another choice's scale is a metric of that choice's gradients, such as their norm, unless
    # it is a total. For the mean prediction as the loss, residuals would be gradients, and their square a metric.
    below_places = sum(
        topology.loss in other.reached
        and (other.begins_with_constants or not attempt.begins_with_constants)
        and other.topology.loss not in attempt.reached
        and other.topology.loss not in topology.forward
        and not other.misfits
        for other in attempts
    )
    # The norm of the gradients is computed from another choice's gradients, which leave the graph.
    from_gradients = sum(_holds_gradients(topology, other) for other in attempts if other is not attempt)
    return (
        bool(read_values),
        topology.loss in topology.activation_dependent,
        -below_places,
        -from_gradients,
        -len(others & plan.unscaled.keys()),
        attempt.coverage.covered > 0,
        -attempt.misfits,
        -len(attempt.coverage.missed),
        attempt.coverage.covered,
        attempt.begins_with_constants,
        len(read_values),
        -nonlinear,
        len(topology.forward),
    )


def _holds_gradients(topology: Topology, other: Attempt) -> bool:
    """Return whether a candidate for the loss depends on an output that is a gradient of another candidate."""
    leaving = (value for value in other.solver.plan.unscaled if value.is_graph_output() and not is_scalar(value))
    return any(value in topology.forward for value in leaving)


def choose_attempt(
    graph: ir.Graph | None,
    attempts: Sequence[Attempt],
    failed: Mapping[ir.Value, bool],
    answers: Answers,
    join: TryTogether,
) -> tuple[Attempt, str, bool]:
    """Choose a loss by its evidence, and by its derivatives where the evidence leaves several.

    Args:
        graph: the main graph; None if it cannot be run.
        attempts: the candidates whose backward pass can be scaled.
        failed: the others, each with True if it has no backward pass. One with a backward pass may be the loss, and so
            may an ancestor of the choice, for instance of an average.
        answers: the answers of the user.
        join: tries several losses at once.

    Returns:
        the choice, the evidence for it, and whether it is certain.
    """
    ranks = {a: _evidence(a, attempts) if len(attempts) > 1 else () for a in attempts}
    best, *others = sorted(attempts, key=lambda a: ranks[a], reverse=True)
    if answers.losses:
        return best, answers.evidence(best.topology.loss.name), True
    rivals: Sequence[Attempt] = [best, *(a for a in others if ranks[a][:_EXCLUDING] == ranks[best][:_EXCLUDING])]
    rivals = _leave_excluded(rivals)
    best, topology = rivals[0], rivals[0].topology
    alike = {*topology.losses, *topology.anew}
    parts = [v for v, is_metric in failed.items() if v not in alike and (not is_metric or v in topology.forward)]
    parts = [value for value in parts if len(rivals) > 1 or not best.excludes_value(value)]
    parts = [value for value in parts if not follows_from_numbers(value) or follows_from_numbers(topology.loss)]
    how, doubted = "the scalar output that the backward pass differentiates", list[ir.Value]()
    is_certain = True
    if len(rivals) > 1 or parts:
        tried = {a.candidate(): a for a in rivals}

        def join_candidates(losses: Sequence[ir.Value]) -> LossCandidate | None:
            joint = join(losses)
            if joint is None:
                return None
            tried[candidate := joint.candidate()] = joint
            return candidate

        refused = [LossCandidate((v,), (), ()) for v in parts if not failed[v]]
        chosen, has_run = (
            (None, False) if graph is None else choose_by_derivatives(graph, [*tried, *refused], join_candidates)
        )
        total = _find_total(rivals, parts) if chosen is None and has_run else None
        if total is not None:
            # Stopped derivatives are derivatives of no output.
            best, how = total, "the backward pass reads values of all its parts"
        elif has_run and chosen is None and not parts and _lead_to_one_graph(rivals):
            how = "the likeliest one, and each other one leads to the same scaled graph"
        elif chosen is None:
            best, is_certain = _join_likeliest(rivals, join), False
            doubted = [*(rival.topology.loss for rival in rivals), *parts]
        else:
            best, how = tried[chosen], "the backward pass computes its derivatives"
    earlier = [a.topology.loss for a in sorted(attempts, key=lambda a: ranks[a], reverse=True)]
    earlier += [value for value, is_metric in failed.items() if not is_metric]
    joined = join_earlier_losses(graph, best, [value for value in earlier if value not in best.topology.losses], join)
    if joined is not None:
        best, is_one = joined
        is_certain, how = is_one, "each has gradients of its own, the last by the next weights of the first"
    doubted = [value for value in doubted if value not in best.topology.losses]
    if doubted or not is_certain:
        names = ", ".join(repr(value.name) for value in doubted)
        how = "the likeliest, but no derivative " + (f"excludes {names}" if names else "proves it")
        return best, f"it is {how}", False
    number = _find_carried_number(best)
    if number is not None:
        return best, f"it may be a running sum or average, and the next value of {number.name!r}", False
    return best, how, True


def _find_carried_number(attempt: Attempt) -> ir.Value | None:
    """Find a number whose next value may be the loss, a stored one only where the file may store state."""
    topology, number = attempt.topology, None
    for may_be_stored in (True, False):
        found = (find_carried_number(topology.graph, loss, may_be_stored) for loss in topology.losses)
        number = next((value for value in found if value is not None), None)
        if number is None or number.is_graph_input() or topology.may_store_state(attempt.solver.plan.unscaled.keys()):
            break
    return number


def _lead_to_one_graph(rivals: Sequence[Attempt]) -> bool:
    """Return whether all candidates lead to the same edits, and none is computed from another, such as a total."""
    losses = {rival.topology.loss for rival in rivals}
    return all(a.edits_as(rivals[0]) and losses & a.topology.forward == {a.topology.loss} for a in rivals)


def _find_total(rivals: Sequence[Attempt], parts: Sequence[ir.Value]) -> Attempt | None:
    """Return the candidate that is a total of all others and further values."""
    values = [*(rival.topology.loss for rival in rivals), *parts]
    totals = (a for a in rivals if all(v is a.topology.loss or a.contains(v) for v in values))
    return next(totals, None)


def _leave_excluded(rivals: Sequence[Attempt]) -> Sequence[Attempt]:
    """Return the candidates that no other excludes, if they exclude all others."""
    excluding = {rival: [a for a in rivals if a is not rival and a.excludes(rival)] for rival in rivals}
    left = [rival for rival, others in excluding.items() if not others]
    excluded = (others for others in excluding.values() if others)
    return left if left and all(any(a in left for a in others) for others in excluded) else rivals


def _join_likeliest(rivals: Sequence[Attempt], join: TryTogether) -> Attempt:
    """Return the likeliest attempt, or a better one at several losses, each with cotangents of its own."""
    fits = not rivals[0].misfits and not rivals[0].solver.unscales_cotangents
    for first in rivals[:1] if fits else rivals:
        best = first
        for rival in rivals:
            joint = None if rival is first else join((*best.topology.losses, *rival.topology.losses))
            if joint is not None and joint.differentiates_all and not joint.misfits:
                best = joint
        if best is not first:
            return best
    return rivals[0]


def join_earlier_losses(
    graph: ir.Graph | None, last: Attempt, earlier: Sequence[ir.Value], join: TryTogether
) -> tuple[Attempt, bool] | None:
    """Join a loss and an earlier one whose gradients move its weights, where that protects more contractions.

    Examples are the losses of a critic before its actor, and of a step before a second.

    Args:
        graph: the main graph; None if it cannot be run.
        last: the choice of the loss.
        earlier: other candidates, the likeliest first.
        join: tries several losses at once.

    Returns:
        both losses in one attempt, and whether no other candidate may be the earlier one; None if there is none.
    """
    joints: dict[ir.Value, Attempt] = {}
    held = {*last.topology.graph.inputs, *last.topology.graph.initializers.values()}
    for loss in earlier if last.topology.reads_next_weights else ():
        if any(c >= NEXT_STATE and same_type(loss, value) for value, c in find_coefficients(loss, held).items()):
            continue  # the next value of a state of one element
        joint = join((loss, *last.topology.losses))
        if joint is None or not joint.topology.anew or joint.misfits or joint.coverage.missed:
            continue
        if joint.coverage.covered > last.coverage.covered:
            joints[loss] = joint
    if len(joints) < 2:
        return next(((joint, True) for joint in joints.values()), None)
    tried = {joint.candidate(loss): joint for loss, joint in joints.items()}
    chosen = None if graph is None else choose_by_derivatives(graph, [*tried], lambda losses: None)[0]
    return (next(iter(joints.values())), False) if chosen is None else (tried[chosen], True)
