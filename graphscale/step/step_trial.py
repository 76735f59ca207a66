"""The trial of a scaled step beside its original, in a child process with limits; a missing runtime is no fault."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import onnx_ir as ir

from graphscale.errors import TrialError
from graphscale.files.limits import TRIAL_MEMORY, TRIAL_SECONDS, current_limits
from graphscale.graph.releases import installed_runtime
from graphscale.process.child import ChildError, call_in_child
from graphscale.process.stages import report_stage
from graphscale.targets import get_target

if TYPE_CHECKING:
    from graphscale.analysis.report import Report

__all__ = ["try_scaled"]

# Both models are loaded, and each value of a run has its own memory.
_SHARE = 8
# The program of the child, which the compiler does not import: it runs models.
_PROGRAM = "graphscale.checks.verification.trial:run_trial"


def try_scaled(original: Any, prepared: ir.Model, scaled: ir.Model, report: Report, kept: Iterable[str] = ()) -> Report:
    """Try a scaled step beside its original; return the report with the result, or the reason for none.

    Args:
        original: the model given to `scale`.
        prepared: the same, in the mixed precision of the scaled one, with the training operators replaced that the
            target lacks.
        scaled: the scaled model.
        report: the report of its scaling.
        kept: outputs that are the next values of states on skipped steps, too.

    Raises:
        TrialError: the scaled step does other things than its original.
    """
    report_stage("trying the scaled step")
    try:
        found = _run((original, prepared, scaled), report, kept)
    except ChildError as error:
        return dataclasses.replace(report, trial=f"not tried: {error}")
    if fault := found.get("fault"):
        raise TrialError(
            f"the scaled step fails its trial: {fault}; --no-try writes it, and verify ORIGINAL SCALED says more"
        )
    return dataclasses.replace(report, trial=found["text"])


def _run(models: tuple[Any, ir.Model, ir.Model], report: Report, kept: Iterable[str]) -> dict[str, str]:
    limits, target = current_limits(), get_target(report.target or "")
    if importlib.util.find_spec("onnxruntime") is None:
        raise ChildError("no onnxruntime is installed")
    if target.in_place and installed_runtime(target) is None:
        raise ChildError(f"{target.runs_on} is not installed, and target {target.name!r} needs it")
    memory = limits.max_memory or TRIAL_MEMORY
    tensors = (value.const_value for value in models[-1].graph.initializers.values())
    size = sum(tensor.nbytes for tensor in tensors if tensor is not None)
    if size > memory // _SHARE:
        raise ChildError(f"its {size} bytes of weights are more than an eighth of {memory} (--max-memory)")
    seconds = limits.max_seconds or TRIAL_SECONDS
    found: dict[str, str] = call_in_child(_PROGRAM, *models, report, {*kept}, seconds=seconds, memory=memory)
    return found
