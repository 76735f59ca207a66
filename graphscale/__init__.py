"""graphscale: loss scaling inside ONNX training graphs."""

from graphscale.errors import GraphscaleError
from graphscale.loss_scale import DynamicLossScale, FixedLossScale, LossScale, get
from graphscale.pipeline import ScaledModel, inspect, scale
from graphscale.report import Report
from graphscale.session import Session

__all__ = [
    "DynamicLossScale",
    "FixedLossScale",
    "GraphscaleError",
    "LossScale",
    "Report",
    "ScaledModel",
    "Session",
    "get",
    "inspect",
    "scale",
]
