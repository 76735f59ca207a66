"""graphscale: loss scaling inside ONNX training graphs."""

from __future__ import annotations

from graphscale import process  # noqa: F401  # before all other imports

# isort: split
import importlib
from typing import TYPE_CHECKING, Any

from graphscale.errors import GraphscaleError
from graphscale.policy.loss_scale import DynamicLossScale, FixedLossScale, LossScale, get

if TYPE_CHECKING:
    __version__: str

    from graphscale import exporters  # noqa: F401
    from graphscale.analysis.report import Report
    from graphscale.checks.derivatives import GradientCheck, WeightCheck, check_gradients
    from graphscale.checks.diffing import DiffReport, diff
    from graphscale.checks.linting import Finding, LintReport, lint
    from graphscale.checks.verification import VerifyReport, verify
    from graphscale.entries.inspection import inspect, roles
    from graphscale.entries.lowered import lower
    from graphscale.mixed_precision import AutocastModel, autocast
    from graphscale.ort.artifacts import resume_artifacts, scale_artifacts
    from graphscale.ort.fusing import export_weights, fuse
    from graphscale.ort.standard_forms import LoweredModel, LoweringReport, lower_training_ops
    from graphscale.pipeline import ScaledModel, scale
    from graphscale.policy import presets
    from graphscale.replicas import ReplicatedSession, split
    from graphscale.session import Session, StepResult
    from graphscale.stripping import strip

__all__ = [
    "AutocastModel",
    "DiffReport",
    "DynamicLossScale",
    "Finding",
    "FixedLossScale",
    "GradientCheck",
    "GraphscaleError",
    "LintReport",
    "LossScale",
    "LoweredModel",
    "LoweringReport",
    "ReplicatedSession",
    "Report",
    "ScaledModel",
    "Session",
    "StepResult",
    "VerifyReport",
    "WeightCheck",
    "autocast",
    "check_gradients",
    "diff",
    "export_weights",
    "fuse",
    "get",
    "inspect",
    "lint",
    "lower",
    "lower_training_ops",
    "presets",
    "resume_artifacts",
    "roles",
    "scale",
    "scale_artifacts",
    "split",
    "strip",
    "verify",
]

# All other names, by module: each is imported on first use, since policies need numpy alone.
_MODULES = {
    "ort.artifacts": ("resume_artifacts", "scale_artifacts"),
    "checks.derivatives": ("GradientCheck", "WeightCheck", "check_gradients"),
    "checks.diffing": ("DiffReport", "diff"),
    "ort.fusing": ("export_weights", "fuse"),
    "checks.linting": ("Finding", "LintReport", "lint"),
    "entries.inspection": ("inspect", "roles"),
    "entries.lowered": ("lower",),
    "mixed_precision": ("AutocastModel", "autocast"),
    "pipeline": ("ScaledModel", "scale"),
    "replicas": ("ReplicatedSession", "split"),
    "analysis.report": ("Report",),
    "session": ("Session", "StepResult"),
    "ort.standard_forms": ("LoweredModel", "LoweringReport", "lower_training_ops"),
    "stripping": ("strip",),
    "checks.verification": ("VerifyReport", "verify"),
}

_SUBPACKAGES = {"exporters": "exporters", "presets": "policy.presets"}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("graphscale")
    if name in _SUBPACKAGES:
        value = globals()[name] = importlib.import_module(f"graphscale.{_SUBPACKAGES[name]}")
        return value
    for module, names in _MODULES.items():
        if name in names:
            value = globals()[name] = getattr(importlib.import_module(f"graphscale.{module}"), name)
            return value
    raise AttributeError(f"module 'graphscale' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
