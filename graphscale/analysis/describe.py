"""The analysis as a report."""

from __future__ import annotations

import onnx_ir as ir

from graphscale.analysis.report import GradientReport, PlaceReport, Report, StateReport
from graphscale.analysis.training_graph import TrainingGraph
from graphscale.graph.values import node_name

__all__ = ["describe"]


def describe(graph: TrainingGraph) -> Report:
    """Return what was found as a report, with the names that the values have now."""
    return Report(
        loss=graph.loss.name or "",
        loss_found=graph.loss_found,
        places=tuple(
            PlaceReport(place.value.name or "")
            if place.edge is None
            else PlaceReport(place.value.name or "", node_name(place.edge.node), place.edge.idx)
            for place in graph.places
        ),
        coverage=graph.coverage.share,
        contractions=graph.coverage.total,
        missed=tuple(node_name(node) for node in graph.coverage.missed),
        gradients=tuple(_gradient(value) for value in graph.gradients),
        state=tuple(StateReport(u.input.name or "", u.output.name, u.how) for u in graph.updates),
        accumulators=tuple(node_name(node) for node in graph.accumulators),
        warnings=graph.warnings,
    )


def _gradient(value: ir.Value) -> GradientReport:
    dtype = "?" if value.dtype is None else value.dtype.name
    shape = "?" if value.shape is None else "[" + ",".join(str(d) for d in value.shape) + "]"
    return GradientReport(value.name or "", dtype, shape, value.is_graph_output())
