"""The choice between several outputs that may be the loss, by the derivatives in the backward pass."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping, Sequence

import onnx_ir as ir

from graphscale.analysis.loss_choice import Join, LossCandidate
from graphscale.checks.derivatives.gradient_bench import Differentiation, find_forms, open_bench
from graphscale.checks.derivatives.gradient_report import WeightCheck, count_agreeing, is_derivative
from graphscale.errors import GraphscaleError
from graphscale.graph.walks import ancestors

__all__ = ["choose_loss"]

# Beyond these numbers of weights, a choice takes minutes, and a question to the user is quicker.
_MANY = 2**25
_IR_VERSION = 10  # an IR version that every runtime loads


def choose_loss(graph: ir.Graph, candidates: Sequence[LossCandidate], join: Join) -> tuple[LossCandidate | None, bool]:
    """Return the loss whose gradients are its derivatives, as far as they can be checked.

    Args:
        graph: the main graph, with no calls of model-local functions in it.
        candidates: the candidates, the likeliest first; of several losses in one, the first is checked.
        join: makes one candidate of several losses; None where no scale fits all of them.

    Returns:
        the chosen candidate, or None, and whether the gradients of all candidates were checked. The choice is the first
        loss without a disagreeing gradient, if all gradients are checked. If other losses have gradients, too, it is
        all of these together, if every gradient is the derivative of one, and each loss has a gradient that is the
        derivative of no other; or, with stopped derivatives, a total of at least two such losses. Otherwise it is the
        first loss without a disagreeing gradient, or the likeliest one, if more gradients agree with it than with any
        other.
    """
    if sum(value.const_value.size for value in graph.initializers.values() if value.const_value is not None) > _MANY:
        return None, False
    model, counts = ir.Model(graph, ir_version=_IR_VERSION), [0] * len(candidates)
    first: LossCandidate | None = None
    derivatives: dict[ir.Value, set[ir.Value]] = {}
    are_checked = True
    for i, candidate in enumerate(candidates):
        checks = _check(model, candidate, candidate.losses[0]) if candidate.unscalings else []
        counts[i] = count_agreeing(checks)
        are_checked = are_checked and bool(checks or not candidate.unscalings)
        if is_derivative(checks):
            if all(each.weight is not None for each in checks):
                return candidate, True
            first = first or candidate
        agreeing = _find_derivatives(candidate, checks)
        if any(agreeing):
            agreed = {each.value for each, agrees in zip(candidate.unscalings, agreeing, strict=True) if agrees}
            derivatives.update((loss, agreed) for loss in candidate.losses)
    if first is None and counts[0] > max(counts[1:], default=counts[0]):
        first = candidates[0]
    if first is not None and all(loss in first.losses for loss in derivatives):
        return first, True
    refused = [loss for candidate in candidates if not candidate.unscalings for loss in candidate.losses]
    for losses in ([*derivatives], [*derivatives, *refused]):
        joint = join(losses) if len(losses) > 1 else None
        if joint is not None and _have_gradients_of_their_own(model, joint):
            return joint, True
    total = _find_total(derivatives)
    return next((candidate for candidate in candidates if candidate.losses[0] is total), None), are_checked


def _find_total(derivatives: Mapping[ir.Value, Collection[ir.Value]]) -> ir.Value | None:
    """Find the total of all other losses, if at least two of them have derivatives of their own."""
    for total in derivatives:
        parts = {loss: {*found} for loss, found in derivatives.items() if loss is not total}
        others = ([found for other, found in parts.items() if other is not loss] for loss in parts)
        own = [loss for loss, each in zip(parts, others, strict=True) if parts[loss].difference(*each)]
        if len(own) > 1 and parts.keys() <= ancestors([total]):
            return total
    return None


def _check(model: ir.Model, candidate: LossCandidate, loss: ir.Value) -> list[WeightCheck]:
    """Check the gradients of a candidate against one of its losses; return None if no evaluator runs the graph."""
    subject = Differentiation(model, loss, candidate.unscalings, candidate.scaled)
    with contextlib.suppress(GraphscaleError), contextlib.closing(open_bench(subject, {}, {}, 0)) as bench:
        return bench.check(directions=1)
    return []


def _find_derivatives(candidate: LossCandidate, checks: Sequence[WeightCheck]) -> list[bool]:
    """Return for each gradient of a candidate whether it is itself the derivative of the checked loss.

    Parts of a gradient do not count: the derivative of a term of a loss is a part, and the term may be a metric.
    """
    found = {check.gradient for check in checks if count_agreeing([check])}
    return [any(form.name in found for form in find_forms(each.value, *each.wholes)) for each in candidate.unscalings]


def _have_gradients_of_their_own(model: ir.Model, candidate: LossCandidate) -> bool:
    """Return whether every gradient is the derivative of one of several losses, and each loss has such a gradient."""
    found = [_find_derivatives(candidate, _check(model, candidate, loss)) for loss in candidate.losses]
    owners = [[i for i, derives in enumerate(each) if derives] for each in zip(*found, strict=True)]
    return all(owners) and all([i] in owners for i in range(len(found)))
