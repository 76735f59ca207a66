"""What the passes tell each other, kept in `model.meta` while they run; it is never serialized."""

from __future__ import annotations

import dataclasses

import onnx_ir as ir

from graphscale.analysis.report import Report
from graphscale.analysis.training_graph import TrainingGraph
from graphscale.errors import PassOrderError
from graphscale.graph.undo import Snapshot
from graphscale.passes.nodes.bound import BoundLossScale

__all__ = ["Carried", "Gradient", "Rewrite", "rewrite_of"]

_KEY = "graphscale.rewrite"


@dataclasses.dataclass(frozen=True)
class Gradient:
    """A gradient in the rewritten graph.

    Attributes:
        name: the name it has in the original graph.
        scaled: the value that still has the loss scale in it.
        unscaled: the quotient, in float32 or wider.
        checked: what is tested for finiteness: the quotient, or the whole gradient that it is only a share of.
    """

    name: str
    scaled: ir.Value
    unscaled: ir.Value
    checked: tuple[ir.Value, ...]


@dataclasses.dataclass(frozen=True)
class Carried:
    """A piece of carried state in the rewritten graph.

    Attributes:
        input: its present value.
        next: its next value.
        in_place: whether it is written in place; else `next` is a graph output to be fed back.
    """

    input: ir.Value
    next: ir.Value
    in_place: bool


@dataclasses.dataclass
class Rewrite:
    """The state of a rewrite under way.

    Attributes:
        training_graph: the analysis of the original graph.
        report: the analysis as a report, made before anything was renamed.
        bound: the loss scale in graph mode.
        skip_nonfinite: a fixed loss scale is checked and guarded as well.
        snapshot: the model before, where these passes are to record what they did; None where their caller does.
        scaled: the values where the scale enters, each with its product; filled by `ScaleLoss`.
        gradients: filled by `UnscaleGradients`.
        all_finite: the scalar bool value, set by `CheckFinite`.
        applies: whether the step is to be applied, a scalar bool value: `all_finite`, unless the policy accepts a step
            that is not; set by `UpdateLossScale`.
        carried: filled by `GuardUpdates`.
        counters: the counts of steps and skips; filled by `AddTelemetry`.
        telemetry: counters and outputs by their role; filled by `AddTelemetry`.
        done: the passes that ran, in order.
    """

    training_graph: TrainingGraph
    report: Report
    bound: BoundLossScale
    skip_nonfinite: bool
    snapshot: Snapshot | None = None
    scaled: dict[ir.Value, ir.Value] = dataclasses.field(default_factory=dict)
    gradients: list[Gradient] = dataclasses.field(default_factory=list)
    all_finite: ir.Value | None = None
    applies: ir.Value | None = None
    carried: list[Carried] = dataclasses.field(default_factory=list)
    counters: list[Carried] = dataclasses.field(default_factory=list)
    telemetry: dict[str, ir.Value] = dataclasses.field(default_factory=dict)
    done: list[str] = dataclasses.field(default_factory=lambda: ["scale-loss"])

    @property
    def checked(self) -> list[ir.Value]:
        """What is tested for finiteness, each value once."""
        return list(dict.fromkeys(value for gradient in self.gradients for value in gradient.checked))

    def attach(self, model: ir.Model) -> None:
        """Let the following passes find this."""
        model.meta[_KEY] = self

    @staticmethod
    def under_way(model: ir.Model) -> bool:
        """Whether `ScaleLoss` has run on this model."""
        return _KEY in model.meta

    @staticmethod
    def detach(model: ir.Model) -> Rewrite:
        """End the rewrite under way, and return it."""
        rewrite = model.meta.pop(_KEY)
        assert isinstance(rewrite, Rewrite)
        return rewrite


def rewrite_of(model: ir.Model, pass_name: str, after: str = "scale-loss") -> Rewrite:
    """Return the rewrite under way, and note that this pass runs now.

    Raises:
        PassOrderError: the pass that must come before has not run on this model, or this one has.
    """
    rewrite = model.meta.get(_KEY)
    if not isinstance(rewrite, Rewrite) or after not in rewrite.done:
        raise PassOrderError(f"{pass_name} works on what {after} left behind; run {after} on this model first")
    if pass_name in rewrite.done:
        raise PassOrderError(f"{pass_name} has run on this model already; run it once")
    rewrite.done.append(pass_name)
    rewrite.bound.look_for_names()
    return rewrite
