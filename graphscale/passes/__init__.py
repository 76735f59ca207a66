"""The passes, one per file. In their order, they turn a training graph into a complete, safe mixed-precision step.

They are `onnx_ir` in-place passes for `onnx_ir.passes.Sequential`: `Sequential(*standard_passes())`. Optional passes,
and passes with other options than the defaults, are arguments: `standard_passes(ScaleLoss(1024), AddTelemetry())`.
"""

from collections.abc import Iterable

import onnx_ir as ir

from graphscale.analysis.hints import Hints
from graphscale.passes.check_finite import CheckFinite
from graphscale.passes.graph_pass import GraphPass, run_passes
from graphscale.passes.guard_updates import GuardUpdates
from graphscale.passes.inline_functions import InlineFunctions
from graphscale.passes.lower_optimizers import LowerOptimizers
from graphscale.passes.lower_precision import Autocast
from graphscale.passes.lower_training_ops.lower_training_ops import LowerTrainingOps, replace_training_ops
from graphscale.passes.order_writes import OrderWrites
from graphscale.passes.scale_loss import ScaleLoss
from graphscale.passes.split_gemm import SplitGemm, find_fused_updates
from graphscale.passes.step_pass import StepPass
from graphscale.passes.telemetry import AddTelemetry
from graphscale.passes.unscale_gradients import UnscaleGradients
from graphscale.passes.update_loss_scale import UpdateLossScale
from graphscale.process.stages import report_stage
from graphscale.step.step import Step

__all__ = [
    "ORDER",
    "AddTelemetry",
    "Autocast",
    "CheckFinite",
    "GraphPass",
    "GuardUpdates",
    "InlineFunctions",
    "LowerOptimizers",
    "LowerTrainingOps",
    "OrderWrites",
    "ScaleLoss",
    "SplitGemm",
    "StepPass",
    "UnscaleGradients",
    "UpdateLossScale",
    "find_fused_updates",
    "replace_training_ops",
    "run_passes",
    "run_rewrite",
    "scale_nodes",
    "standard_passes",
]

# All passes, in running order.
ORDER: tuple[type[GraphPass], ...] = (
    LowerOptimizers,
    SplitGemm,
    Autocast,
    ScaleLoss,
    UnscaleGradients,
    CheckFinite,
    UpdateLossScale,
    AddTelemetry,
    GuardUpdates,
    OrderWrites,
)


def standard_passes(*passes: GraphPass) -> tuple[GraphPass, ...]:
    """Return the passes of a rewrite in their order: the given passes, and all that are not optional."""
    by_kind = {type(one): one for one in passes}
    return tuple(by_kind.get(kind) or kind() for kind in ORDER if kind in by_kind or not kind.optional)


def run_rewrite(model: ir.Model, hints: Hints, *passes: GraphPass) -> Step:
    """Run the passes of a rewrite, as `standard_passes` orders them, with nothing in between, and return the step.

    Unlike in a sequence of onnx_ir, each pass gets the step of the one before, and the original is not recorded.

    Args:
        model: the model, which is changed in place.
        hints: the user's names, in place of those of the passes.
        passes: passes with options, and optional ones.
    """
    step: Step | None = None
    ordered = standard_passes(*passes)
    for number, each in enumerate(ordered):
        report_stage(f"rewriting the graph ({each.name})", number, len(ordered))
        if isinstance(each, Autocast):
            each.rewrite(model, hints)
        elif isinstance(each, ScaleLoss):
            step = each.begin(model, hints)
        elif isinstance(each, StepPass) and step is not None:
            step = each.run(step)
    assert step is not None
    return step


def scale_nodes(nodes: Iterable[ir.Node]) -> frozenset[ir.Node]:
    """Return the nodes that compute the next loss scale, or order writes."""
    kinds = [kind for kind in ORDER if kind.renews_scale]
    return frozenset(node for node in nodes if any(kind.inserted(node) for kind in kinds))
