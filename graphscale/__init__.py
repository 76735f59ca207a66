"""graphscale: loss scaling inside ONNX training graphs."""

from graphscale import presets
from graphscale.artifacts import resume_artifacts, scale_artifacts
from graphscale.diffing import DiffReport, diff
from graphscale.errors import GraphscaleError
from graphscale.fusing import export_weights, fuse
from graphscale.linting import Finding, LintReport, lint
from graphscale.loss_scale import DynamicLossScale, FixedLossScale, LossScale, get
from graphscale.mixed_precision import AutocastModel, autocast
from graphscale.pipeline import ScaledModel, inspect, scale
from graphscale.report import Report
from graphscale.session import Session, StepResult
from graphscale.stripping import strip
from graphscale.verification import VerifyReport, verify

__all__ = [
    "AutocastModel",
    "DiffReport",
    "DynamicLossScale",
    "Finding",
    "FixedLossScale",
    "GraphscaleError",
    "LintReport",
    "LossScale",
    "Report",
    "ScaledModel",
    "Session",
    "StepResult",
    "VerifyReport",
    "autocast",
    "diff",
    "export_weights",
    "fuse",
    "get",
    "inspect",
    "lint",
    "presets",
    "resume_artifacts",
    "scale",
    "scale_artifacts",
    "strip",
    "verify",
]
