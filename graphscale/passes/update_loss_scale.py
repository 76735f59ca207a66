"""update-loss-scale: let the loss scale adjust itself from the finite check."""

from __future__ import annotations

import dataclasses

import onnx_ir as ir
from onnx_ir.passes import InPlacePass, PassResult

from graphscale.passes.rewrite import Carried, rewrite_of
from graphscale.policy.loss_scale import FixedLossScale

__all__ = ["UpdateLossScale"]

NAME = "update-loss-scale"


@dataclasses.dataclass(frozen=True)
class UpdateLossScale(InPlacePass):
    """Call the update rule, a model-local function, and write the new state.

    After:  `current_loss_scale.next, good_steps.next =
             graphscale.UpdateLossScale <increment_period, multiplier> (current_loss_scale, good_steps, all_finite)`

    A fixed loss scale has nothing to update. A policy that tells when it is stuck gets the output `stuck`.
    """

    def call(self, model: ir.Model) -> PassResult:
        rewrite = rewrite_of(model, NAME, after="check-finite")
        if isinstance(rewrite.bound.policy, FixedLossScale):
            rewrite.applies = rewrite.all_finite
            return PassResult(model, modified=False)
        assert rewrite.all_finite is not None
        rewrite.bound.write(rewrite.all_finite)
        rewrite.applies = rewrite.bound.applies(rewrite.all_finite)
        in_place = rewrite.bound.target.in_place
        rewrite.carried += [Carried(state, value, in_place) for state, value in rewrite.bound.next_state.items()]
        return PassResult(model, modified=True)
