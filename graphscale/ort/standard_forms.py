"""Training steps of standard operators alone: `graphscale.lower_training_ops`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from importlib.metadata import version
from typing import Any

import onnx

from graphscale.collector import paused_collector
from graphscale.files.model_result import ModelResult
from graphscale.files.training_info import to_proto
from graphscale.files.writing import MARK_KEY
from graphscale.graph.damage import name_damage
from graphscale.graph.stamp import refuse_scaled
from graphscale.passes import LowerTrainingOps, run_passes
from graphscale.passes.preparation import prepare
from graphscale.pipeline import Model, open_copy
from graphscale.process.summary import Row, Summary, few

__all__ = ["LoweredModel", "LoweringReport", "lower_training_ops"]


@dataclasses.dataclass(frozen=True, repr=False)
class LoweringReport(Summary):
    """The report of `lower_training_ops`.

    Attributes:
        replaced: `{operator: nodes}`, the replaced nodes.
        states: `{output: input}` of the states that these nodes wrote in place: each next value is an output.
        nodes_before: number of nodes before.
        nodes_after: number of nodes after.
        warnings: notes for the user, a sentence each.
    """

    replaced: dict[str, int]
    states: dict[str, str]
    nodes_before: int
    nodes_after: int
    warnings: tuple[str, ...]

    def _summarize(self) -> tuple[str, Iterable[Row]]:
        replaced = ", ".join(f"{count} {op}" for op, count in self.replaced.items())
        rows: list[Row] = [
            ("replaced", replaced or "none"),
            ("nodes", f"{self.nodes_before} before, {self.nodes_after} after"),
        ]
        rows.append(("states as outputs", few(list(self.states))))
        if self.warnings:
            rows.append(("warnings", few(self.warnings, 1)))
        return "operators in standard ONNX", rows

    def to_dict(self) -> dict[str, Any]:
        """Return the report as values for JSON."""
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True, repr=False)
class LoweredModel(ModelResult):
    """The result of `lower_training_ops`.

    Attributes:
        model: the model of standard operators: a ModelProto if one was given, else an onnx_ir model.
        report: the replaced operators.
    """

    report: LoweringReport

    def _summarize(self) -> tuple[str, Iterable[Row]]:
        return self.report._summarize()


@name_damage
@paused_collector()
def lower_training_ops(model: Model) -> LoweredModel:
    """Replace the operators of ONNX Runtime's training builds by standard ones.

    The result runs on stock ONNX Runtime; inputs, outputs and weights keep their names. The next value of a state that
    was written in place, such as an accumulated gradient or a running mean, becomes the output `NAME.next`, to be fed
    back. The model given is not changed.

    Args:
        model: a path, an onnx_ir model or a ModelProto, without a loss scale.

    Raises:
        UnsupportedModelError: an operator has no standard form.
        AlreadyScaledError: the model carries a loss scale.
    """
    work, name = open_copy(model)
    refuse_scaled(work, name)
    before = len(work.graph)
    warnings = prepare(work)
    lowering = LowerTrainingOps()
    run_passes(work, lowering)
    work.metadata_props[MARK_KEY] = version("graphscale")
    report = LoweringReport(lowering.counts, lowering.exposed, before, len(work.graph), tuple(warnings))
    return LoweredModel(to_proto(work) if isinstance(model, onnx.ModelProto) else work, report)
