"""understand: the step of an original training graph."""

from __future__ import annotations

import onnx_ir as ir

from graphscale.analysis.hints import NO_HINTS, Hints
from graphscale.analysis.report import GradientReport, PlaceReport, Report, StateReport
from graphscale.analysis.training_graph import analyse
from graphscale.graph.values import node_name
from graphscale.graph.walks import NodeIndex
from graphscale.step.training_step import Step

__all__ = ["make_report", "understand"]


def understand(
    model: ir.Model, hints: Hints = NO_HINTS, index: NodeIndex | None = None, *, asking: bool = True
) -> Step:
    """Find the losses of a training graph, the places of the scale, the gradients, and the carried state.

    The graph is not changed.

    Args:
        model: the model, with no calls of model-local functions in it.
        hints: the user's names; the roles that the model states come after these.
        index: the nodes of its graph, if they are known.
        asking: True to refuse a graph with an open role of an output; else such a role is a proposal.

    Raises:
        LossError, SeedNotFoundError, NonlinearGradientError, UnknownOperatorError, GradientError, UpdateError,
            RolesError, UnsupportedModelError: the message names the value, node or body, and the remedy.
    """
    return Step(**vars(analyse(model.graph, hints.stated_by(model), index, asking=asking)), model=model)


def make_report(step: Step) -> Report:
    """Report a step, with the present names of its values."""
    return Report(
        loss=step.loss.name or "",
        loss_found=step.loss_found,
        places=tuple(
            PlaceReport(place.value.name or "")
            if place.edge is None
            else PlaceReport(place.value.name or "", node_name(place.edge.node), place.edge.idx)
            for place in step.places
        ),
        coverage=step.coverage.share,
        contractions=step.coverage.total,
        missed=tuple(node_name(node) for node in step.coverage.missed),
        gradients=tuple(_gradient(value) for value in step.gradients),
        state=tuple(StateReport(state.input.name or "", state.output.name, state.how) for state in step.states),
        accumulators=tuple(node_name(node) for node in step.accumulators),
        warnings=step.warnings,
        roles=step.roles.table().entries,
    )


def _gradient(value: ir.Value) -> GradientReport:
    dtype = "?" if value.dtype is None else value.dtype.name
    shape = "?" if value.shape is None else "[" + ",".join(str(d) for d in value.shape) + "]"
    return GradientReport(value.name or "", dtype, shape, value.is_graph_output())
