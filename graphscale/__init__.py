"""graphscale: loss scaling inside ONNX training graphs."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from graphscale import presets
from graphscale.errors import GraphscaleError
from graphscale.loss_scale import DynamicLossScale, FixedLossScale, LossScale, get

if TYPE_CHECKING:
    from graphscale.artifacts import resume_artifacts, scale_artifacts
    from graphscale.diffing import DiffReport, diff
    from graphscale.fusing import export_weights, fuse  # type: ignore[no-redef]  # modules are named so, too
    from graphscale.linting import Finding, LintReport, lint  # type: ignore[no-redef]  # modules are named so, too
    from graphscale.mixed_precision import AutocastModel, autocast
    from graphscale.pipeline import ScaledModel, inspect, scale
    from graphscale.replicas import ReplicatedSession, split  # type: ignore[no-redef]  # modules are named so, too
    from graphscale.report import Report
    from graphscale.session import Session, StepResult
    from graphscale.stripping import strip
    from graphscale.verification import VerifyReport, verify  # type: ignore[no-redef]  # modules are named so, too

__all__ = [
    "AutocastModel",
    "DiffReport",
    "DynamicLossScale",
    "Finding",
    "FixedLossScale",
    "GraphscaleError",
    "LintReport",
    "LossScale",
    "ReplicatedSession",
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
    "split",
    "strip",
    "verify",
]

# Where the rest is: what works on graphs is imported when it is asked for, since policies need numpy alone.
_MODULES = {
    "artifacts": ("resume_artifacts", "scale_artifacts"),
    "diffing": ("DiffReport", "diff"),
    "fusing": ("export_weights", "fuse"),
    "linting": ("Finding", "LintReport", "lint"),
    "mixed_precision": ("AutocastModel", "autocast"),
    "pipeline": ("ScaledModel", "inspect", "scale"),
    "replicas": ("ReplicatedSession", "split"),
    "report": ("Report",),
    "session": ("Session", "StepResult"),
    "stripping": ("strip",),
    "verification": ("VerifyReport", "verify"),
}


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            value = globals()[name] = getattr(importlib.import_module(f"graphscale.{module}"), name)
            return value
    raise AttributeError(f"module 'graphscale' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
