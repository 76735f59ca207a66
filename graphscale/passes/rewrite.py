"""The present rewrite, shared by the passes in `model.meta` while they run, and never serialized."""

from __future__ import annotations

import abc
import dataclasses
from typing import ClassVar

import onnx_ir as ir
from onnx_ir.passes import PassResult

from graphscale.analysis.report import Report
from graphscale.analysis.training_graph import TrainingGraph
from graphscale.errors import PassOrderError
from graphscale.graph.builder import Builder
from graphscale.passes.graph_pass import GraphPass
from graphscale.passes.nodes.graph_scale import GraphScale
from graphscale.passes.nodes.write_order import write_in_place
from graphscale.policy.loss_scale import FixedLossScale
from graphscale.policy.names import ScaledValue

__all__ = ["Gradient", "Rewrite", "RewritePass", "StatePair"]

_KEY = "graphscale.rewrite"


@dataclasses.dataclass(frozen=True)
class Gradient:
    """A gradient in the rewritten graph.

    Attributes:
        name: the name in the original graph.
        unscaled: the quotient, in float32 or wider.
        checked: the values of the finite check: the quotient, or the whole gradient around it.
    """

    name: str
    unscaled: ir.Value
    checked: tuple[ir.Value, ...]


@dataclasses.dataclass(frozen=True)
class StatePair:
    """A piece of carried state in the rewritten graph.

    Attributes:
        input: its present value.
        next: its next value.
        in_place: True if the state is written in place; else `next` is a graph output to be fed back.
        how: its origin in the report: `analysis.report.StateReport.how`.
        guarded: True if a skipped step keeps the state.
    """

    input: ir.Value
    next: ir.Value
    in_place: bool
    how: str
    guarded: bool


@dataclasses.dataclass
class Rewrite:
    """The state of the present rewrite, beyond the graph itself.

    Attributes:
        model: the model.
        training_graph: the analysis of the original graph.
        report: the analysis as a report, made before any renaming.
        bound: the loss scale in graph mode.
        skip_nonfinite: True to check and guard the step for a fixed loss scale as well.
        scaled: the values where the scale enters, each with its product; filled by `ScaleLoss`.
        gradients: filled by `UnscaleGradients`.
        sums: values past the gradients in which finite gradients can overflow; filled by `UnscaleGradients`.
        all_finite: the scalar bool value, set by `CheckFinite`.
        applies: the flag of an applied step, `all_finite` or a policy's exception; set by `UpdateLossScale`.
        carried: filled by `UpdateLossScale`, `AddTelemetry` and `GuardUpdates`.
        telemetry: counters and outputs by their role; filled by `AddTelemetry`.
        activations: the values of the forward pass that telemetry checks, with dtypes; filled by `AddTelemetry`.
        done: the passes that ran.
    """

    model: ir.Model
    training_graph: TrainingGraph
    report: Report
    bound: GraphScale
    skip_nonfinite: bool
    scaled: dict[ir.Value, ir.Value] = dataclasses.field(default_factory=dict)
    gradients: list[Gradient] = dataclasses.field(default_factory=list)
    sums: list[ir.Value] = dataclasses.field(default_factory=list)
    all_finite: ir.Value | None = None
    applies: ir.Value | None = None
    carried: list[StatePair] = dataclasses.field(default_factory=list)
    telemetry: dict[ScaledValue, ir.Value] = dataclasses.field(default_factory=dict)
    activations: dict[ir.Value, ir.DataType] = dataclasses.field(default_factory=dict)
    done: set[type[GraphPass]] = dataclasses.field(default_factory=set)

    @property
    def checked(self) -> list[ir.Value]:
        """The values of the finite check, each once."""
        return list(dict.fromkeys((*(value for each in self.gradients for value in each.checked), *self.sums)))

    @property
    def is_fixed(self) -> bool:
        """Return whether the loss scale is fixed, without state."""
        return isinstance(self.bound.policy, FixedLossScale)

    def carry(self, build: Builder, state: ir.Value, value: ir.Value, how: str, in_place: bool, guarded: bool) -> None:
        """Add a piece of carried state, and write it in place on request; see `StatePair`."""
        if in_place:
            write_in_place(build, state, value)
        self.carried.append(StatePair(state, value, in_place, how, guarded))

    def attach(self) -> None:
        """Store the rewrite for the following passes."""
        self.model.meta[_KEY] = self

    @staticmethod
    def under_way(model: ir.Model) -> bool:
        """Return whether `ScaleLoss` has run on this model."""
        return _KEY in model.meta

    @staticmethod
    def detach(model: ir.Model) -> Rewrite:
        """End the present rewrite, and return it."""
        rewrite: Rewrite = model.meta.pop(_KEY)
        return rewrite


class RewritePass(GraphPass):
    """A pass that continues the rewrite of `ScaleLoss`.

    Attributes:
        after: the pass that must run on the model before.
    """

    after: ClassVar[type[GraphPass]]

    def call(self, model: ir.Model) -> PassResult:
        rewrite = model.meta.get(_KEY)
        if not isinstance(rewrite, Rewrite) or self.after not in rewrite.done:
            before = self.after.name
            raise PassOrderError(f"{self.name} needs the results of {before}; run {before} on this model first")
        if type(self) in rewrite.done:
            raise PassOrderError(f"{self.name} has run on this model already; run it once")
        rewrite.done.add(type(self))
        rewrite.bound.look_for_names()
        return PassResult(model, modified=self.rewrite(rewrite, self.builder(rewrite.bound.editor)))

    @abc.abstractmethod
    def rewrite(self, rewrite: Rewrite, build: Builder) -> bool:
        """Change the graph of `rewrite` with a builder of this pass's nodes, and return whether the graph changed."""
