"""Losses whose gradients move the weights of another loss: of a critic before its actor, of a step before a second."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import onnx_ir as ir

from graphscale.analysis.attempt import Attempt
from graphscale.analysis.loss_choice import LossChoice
from graphscale.analysis.updates import NEXT_STATE, find_coefficients, same_type

__all__ = ["join_earlier_losses"]


def join_earlier_losses(
    graph: ir.Graph | None,
    last: Attempt,
    earlier: Sequence[ir.Value],
    join: Callable[[Sequence[ir.Value]], Attempt | None],
) -> tuple[Attempt, bool] | None:
    """Join a loss and an earlier one whose gradients move its weights, where that protects more contractions.

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
    chosen = None if graph is None else LossChoice.choose(graph, [*tried], lambda losses: None)[0]
    return (next(iter(joints.values())), False) if chosen is None else (tried[chosen], True)
