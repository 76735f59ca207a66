"""The report of gradients that leave a graph in a small type."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import onnx_ir as ir

from graphscale.analysis.report import Report
from graphscale.analysis.roles.role_table import Role
from graphscale.process.summary import few
from graphscale.step.training_step import Step

__all__ = ["report_outputs"]

# By whether the quotients leave in float32.
_REMEDIES = (
    'gradient_dtype="float32" (--gradient-dtype float32) makes them float32 outputs',
    "the graph computes them in float16 from unscaled gradients",
)


def report_outputs(step: Step, direct: Sequence[ir.Value], widens: bool) -> Report:
    """Return the report of a step with the gradients that leave the graph in small types, or no longer do.

    Args:
        step: the step before its gradients are unscaled.
        direct: the outputs in small types that are quotients themselves.
        widens: True if these leave in float32.
    """
    assert step.report is not None
    half = [output for output, each in step.roles.outputs.items() if each.role is Role.GRADIENT]
    half = [value for value in half if value.dtype is ir.DataType.FLOAT16 and not (widens and value in direct)]
    warnings, gradients = list[str](), step.report.gradients
    if widens and direct:
        names = {value.name for value in direct}
        gradients = tuple(dataclasses.replace(g, dtype="FLOAT") if g.value in names else g for g in gradients)
        warnings.append(f"the gradients {few(sorted(filter(None, names)))} are float32 outputs, unlike in the original")
    if half:
        warnings.append(
            f"the gradients {few([value.name for value in half])} leave the graph in float16, where what is below 6e-8 "
            f"is 0 without the loss scale: {_REMEDIES[widens]}"
        )
    return dataclasses.replace(step.report, gradients=gradients, warnings=(*step.report.warnings, *warnings))
