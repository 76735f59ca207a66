"""The passes, one per file. In their order, they turn a training graph into a complete, safe mixed-precision step.

They are `onnx_ir` in-place passes for `onnx_ir.passes.Sequential`: `Sequential(*standard_passes())`. Optional passes,
and passes with other options than the defaults, are arguments: `standard_passes(ScaleLoss(1024), AddTelemetry())`.
"""

import importlib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import onnx_ir as ir

from graphscale.analysis.hints import Hints
from graphscale.analysis.updates import find_fused_updates
from graphscale.graph.walks import NodeIndex
from graphscale.passes.check_finite import CheckFinite
from graphscale.passes.graph_pass import GraphPass, run_passes
from graphscale.passes.guard_updates import GuardUpdates
from graphscale.passes.order_writes import OrderWrites
from graphscale.passes.preparation import replace_training_ops
from graphscale.passes.scale_loss import ScaleLoss
from graphscale.passes.step_pass import StepPass
from graphscale.passes.unscale_gradients import UnscaleGradients
from graphscale.passes.update_loss_scale import UpdateLossScale
from graphscale.process.stages import report_stage
from graphscale.step.training_step import Step

if TYPE_CHECKING:
    from graphscale.passes.inline_functions import InlineFunctions
    from graphscale.passes.lower_optimizers import LowerOptimizers
    from graphscale.passes.lower_precision import Autocast
    from graphscale.passes.lower_training_ops.lower_training_ops import LowerTrainingOps
    from graphscale.passes.split_gemm import SplitGemm
    from graphscale.passes.telemetry import AddTelemetry

    ORDER: tuple[type[GraphPass], ...]

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

# The passes that most steps do not need, by module: each is imported on first use.
_MODULES = {
    "AddTelemetry": "telemetry",
    "Autocast": "lower_precision",
    "InlineFunctions": "inline_functions",
    "LowerOptimizers": "lower_optimizers",
    "LowerTrainingOps": "lower_training_ops.lower_training_ops",
    "SplitGemm": "split_gemm",
}
_REQUIRED: dict[str, type[GraphPass]] = {
    "ScaleLoss": ScaleLoss,
    "UnscaleGradients": UnscaleGradients,
    "CheckFinite": CheckFinite,
    "UpdateLossScale": UpdateLossScale,
    "GuardUpdates": GuardUpdates,
    "OrderWrites": OrderWrites,
}
# The class names of all passes, in running order.
_NAMES = (
    "LowerOptimizers",
    "SplitGemm",
    "Autocast",
    "ScaleLoss",
    "UnscaleGradients",
    "CheckFinite",
    "UpdateLossScale",
    "AddTelemetry",
    "GuardUpdates",
    "OrderWrites",
)


def __getattr__(name: str) -> Any:
    if name == "ORDER":  # all passes, in running order
        return tuple(globals().get(each) or __getattr__(each) for each in _NAMES)
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    return value


def standard_passes(*passes: GraphPass) -> tuple[GraphPass, ...]:
    """Return the passes of a rewrite in their order: the given passes, and all that are not optional."""
    given = {type(one).__name__: one for one in passes}
    return tuple(given.get(name) or _REQUIRED[name]() for name in _NAMES if name in given or name in _REQUIRED)


def run_rewrite(
    model: ir.Model, hints: Hints, scale_loss: ScaleLoss, *passes: StepPass, index: NodeIndex | None = None
) -> Step:
    """Run the passes of a rewrite in their order, with nothing in between, and return the step.

    Unlike in a sequence of onnx_ir, each pass gets the step of the one before, and the original is not recorded.

    Args:
        model: the model, which is changed in place.
        hints: the user's names, in place of those of `scale_loss`.
        scale_loss: the first pass.
        passes: optional passes, and passes with options.
        index: the nodes of its graph, if they are known.
    """
    ordered = [each for each in standard_passes(*passes) if isinstance(each, StepPass)]
    report_stage(f"rewriting the graph ({scale_loss.name})", 0, len(ordered) + 1)
    step = scale_loss.begin(model, hints, index)
    for number, each in enumerate(ordered, 1):
        report_stage(f"rewriting the graph ({each.name})", number, len(ordered) + 1)
        step = each.run(step)
    return step


def scale_nodes(nodes: Iterable[ir.Node]) -> frozenset[ir.Node]:
    """Return the nodes that compute the next loss scale, or order writes."""
    kinds = [kind for kind in _REQUIRED.values() if kind.renews_scale]
    return frozenset(node for node in nodes if any(kind.inserted(node) for kind in kinds))
