"""check-finite: test whether all gradients are finite."""

from __future__ import annotations

import dataclasses

from graphscale.graph.builder import Builder
from graphscale.graph.marks import CHECK_FINITE
from graphscale.passes.nodes.finite import all_finite
from graphscale.passes.step_pass import StepPass
from graphscale.passes.unscale_gradients import UnscaleGradients
from graphscale.step.training_step import Step

__all__ = ["CheckFinite"]


@dataclasses.dataclass(frozen=True)
class CheckFinite(StepPass):
    """Test all elements of all unscaled gradients for finiteness: one scalar bool value, `all_finite`.

    Before: `dw = Div(dw.scaled, current_loss_scale)`
    After:  the same, and `all_finite = Not(IsNaN(Sum(ReduceSum(Mul(dw, 0)), ...)))`
    On CUDA `all_finite = Not(IsNaN(ReduceSum(Sum(MatMul(zeros, Reshape(dw)), ...))))`: fewer kernels, and one read; or
    `IsAllFinite(dw, ...)` where the target has that kernel.

    A step with a fixed loss scale is not checked, as in TensorFlow, unless `skip_nonfinite` is True.
    """

    name = CHECK_FINITE
    sign = "∞?"
    after = UnscaleGradients

    def apply(self, step: Step, build: Builder) -> Step:
        if not step.skips:
            return step
        flag = all_finite(build, step.checked, step.scale.target)
        return dataclasses.replace(step, all_finite=flag, guard=flag, modified=True)
