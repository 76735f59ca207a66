"""graphscale: loss scaling inside ONNX training graphs."""

from graphscale.artifacts import resume_artifacts, scale_artifacts
from graphscale.errors import GraphscaleError
from graphscale.fusing import export_weights, fuse
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
    "export_weights",
    "fuse",
    "get",
    "inspect",
    "resume_artifacts",
    "scale",
    "scale_artifacts",
]
