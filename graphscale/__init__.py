"""graphscale: loss scaling inside ONNX training graphs."""

from graphscale import presets
from graphscale.artifacts import resume_artifacts, scale_artifacts
from graphscale.errors import GraphscaleError
from graphscale.fusing import export_weights, fuse
from graphscale.loss_scale import DynamicLossScale, FixedLossScale, LossScale, get
from graphscale.mixed_precision import AutocastModel, autocast
from graphscale.pipeline import ScaledModel, inspect, scale
from graphscale.report import Report
from graphscale.session import Session, StepResult

__all__ = [
    "AutocastModel",
    "DynamicLossScale",
    "FixedLossScale",
    "GraphscaleError",
    "LossScale",
    "Report",
    "ScaledModel",
    "Session",
    "StepResult",
    "autocast",
    "export_weights",
    "fuse",
    "get",
    "inspect",
    "presets",
    "resume_artifacts",
    "scale",
    "scale_artifacts",
]
