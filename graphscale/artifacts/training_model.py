"""Loss scaling in the training model of an artifact folder."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Collection

import onnx_ir as ir
from onnx_ir.passes.common import InlinePass

from graphscale.analysis.hazards import unordered_readers
from graphscale.analysis.proof import prove
from graphscale.analysis.training_graph import TrainingGraph
from graphscale.analysis.values import node_name
from graphscale.artifacts.folder import buffer_of
from graphscale.artifacts.window import AccumulationWindow, Window
from graphscale.editing import PASS_KEY
from graphscale.errors import GradientError, ProofError
from graphscale.loss_scale import LossScale
from graphscale.passes import CheckFinite, Rewrite, ScaleLoss, UnscaleGradients
from graphscale.passes.guard_updates import _WRITES_INPUTS, _guard_written_input
from graphscale.report import Report, StateReport

__all__ = ["ScaledTraining", "inserted", "scale_training_model"]


@dataclasses.dataclass(frozen=True)
class ScaledTraining:
    """A training model with loss scaling.

    Attributes:
        states: `{name: initial value}` of the state, in the order of the model's inputs; none for a fixed scale.
        names: the names of the loss, the scale and the state, for the stamp.
        report: what was found and done.
    """

    states: dict[str, float]
    names: dict[str, str]
    report: Report


def scale_training_model(
    model: ir.Model,
    policy: LossScale,
    trainable: Collection[str],
    *,
    name: str,
    taken: Collection[str],
    target: str,
    loss: str | None,
    skip_nonfinite: bool,
) -> ScaledTraining:
    """Put loss scaling into a training model, in place.

    Args:
        model: the training model.
        policy: the loss scale.
        trainable: the parameters whose gradients are accumulated.
        name: what to call the model in messages.
        taken: names that the state must not get.
        target: the runtime.
        loss: the name of the loss, or None to find it.
        skip_nonfinite: guard running statistics for a fixed loss scale as well.

    Raises:
        GraphscaleError: the model is not acceptable.
    """
    nodes_before = len(model.graph)
    warnings = _inline(model)
    ScaleLoss(policy, loss=loss, target=target, skip_nonfinite=skip_nonfinite)(model)
    UnscaleGradients()(model)
    statistics = [node for node in model.graph if (node.domain, node.op_type) in _WRITES_INPUTS]
    if statistics:
        CheckFinite()(model)
    windows = AccumulationWindow(taken)
    windows(model)
    rewrite = Rewrite.detach(model)
    _check_accumulated(rewrite.training_graph, trainable, name)
    if rewrite.all_finite is not None:
        for node in statistics:
            for i, o in _WRITES_INPUTS[(node.domain, node.op_type)].items():
                _guard_written_input(rewrite, node, i, o, rewrite.all_finite)
        model.graph.sort()
    rewrite.bound.order_writes()
    _prove(model.graph, rewrite, windows.window)
    return _describe(model, rewrite, policy, windows.window, nodes_before, warnings)


def _inline(model: ir.Model) -> list[str]:
    if not model.functions:
        return []
    names = ", ".join(f"{domain}::{name}" for domain, name, _ in model.functions)
    InlinePass()(model)
    return [f"the model-local functions {names} were inlined"]


def _check_accumulated(graph: TrainingGraph, trainable: Collection[str], name: str) -> None:
    """Every trainable parameter's gradient is accumulated, scaled, and nothing else is scaled."""
    by_buffer = {}
    for node in graph.accumulators:
        buffer = node.inputs[0]
        if buffer is not None and node.op_type == "InPlaceAccumulatorV2":
            by_buffer[buffer.name] = node
    for parameter in trainable:
        if buffer_of(parameter) not in by_buffer:
            raise GradientError(
                f"{name} does not accumulate the gradient of {parameter!r} in {buffer_of(parameter)!r}, or the "
                "gradient cannot be traced to the loss; a training session would train it unscaled"
            )
