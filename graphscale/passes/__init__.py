"""The passes, one file each. In order they turn a training graph into one complete, safe mixed-precision step.

They are `onnx_ir` in-place passes, made for `onnx_ir.passes.Sequential`:

    Sequential(
        ScaleLoss("dynamic"), UnscaleGradients(), CheckFinite(), UpdateLossScale(), GuardUpdates(), OrderWrites()
    )

AddTelemetry goes between UpdateLossScale and GuardUpdates, Autocast before ScaleLoss.
"""

from graphscale.passes.check_finite import CheckFinite
from graphscale.passes.guard_updates import GuardUpdates
from graphscale.passes.lower_optimizers import LowerOptimizers
from graphscale.passes.lower_precision import Autocast
from graphscale.passes.order_writes import OrderWrites
from graphscale.passes.rewrite import Rewrite, rewrite_of
from graphscale.passes.scale_loss import ScaleLoss
from graphscale.passes.telemetry import AddTelemetry
from graphscale.passes.unscale_gradients import UnscaleGradients
from graphscale.passes.update_loss_scale import UpdateLossScale

__all__ = [
    "AddTelemetry",
    "Autocast",
    "CheckFinite",
    "GuardUpdates",
    "LowerOptimizers",
    "OrderWrites",
    "Rewrite",
    "ScaleLoss",
    "UnscaleGradients",
    "UpdateLossScale",
    "rewrite_of",
]
