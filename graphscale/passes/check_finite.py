"""check-finite: test whether all gradients are finite."""

from __future__ import annotations

import dataclasses

import onnx_ir as ir
from onnx_ir.passes import InPlacePass, PassResult

from graphscale.passes.rewrite import rewrite_of
from graphscale.policy.loss_scale import FixedLossScale

__all__ = ["CheckFinite"]

NAME = "check-finite"


@dataclasses.dataclass(frozen=True)
class CheckFinite(InPlacePass):
    """Test all elements of all unscaled gradients for finiteness: one scalar bool value, `all_finite`.

    Before: `dw = Div(dw.scaled, current_loss_scale)`
    After:  the same, and `all_finite = Not(IsNaN(Sum(ReduceSum(Mul(dw, 0)), ...)))`, or `IsAllFinite(dw, ...)` where
    the target has that kernel.

    A fixed loss scale is not checked, as in TensorFlow, unless `skip_nonfinite` was asked for.
    """

    def call(self, model: ir.Model) -> PassResult:
        rewrite = rewrite_of(model, NAME, after="unscale-gradients")
        if isinstance(rewrite.bound.policy, FixedLossScale) and not rewrite.skip_nonfinite:
            return PassResult(model, modified=False)
        rewrite.all_finite = rewrite.bound.check(rewrite.checked)
        return PassResult(model, modified=True)
