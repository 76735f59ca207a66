"""update-loss-scale: adjust the loss scale by the finite check."""

from __future__ import annotations

import dataclasses

from graphscale.analysis.report import STATE_OF_SCALE
from graphscale.graph.builder import Builder
from graphscale.passes.check_finite import CheckFinite
from graphscale.passes.rewrite import Rewrite, RewritePass, StatePair

__all__ = ["UpdateLossScale"]


@dataclasses.dataclass(frozen=True)
class UpdateLossScale(RewritePass):
    """Call the update rule, a model-local function, and write the new state.

    After:  `current_loss_scale.next, good_steps.next =
             graphscale.UpdateLossScale <increment_period, multiplier> (current_loss_scale, good_steps, all_finite)`

    A fixed loss scale has no update. A policy that reports a stuck scale gets the output `stuck`.
    """

    name = "update-loss-scale"
    sign = "S′"  # noqa: RUF001
    renews_scale = True
    after = CheckFinite

    def rewrite(self, rewrite: Rewrite, build: Builder) -> bool:
        if rewrite.is_fixed:
            rewrite.applies = rewrite.all_finite
            return False
        assert rewrite.all_finite is not None
        bound = rewrite.bound
        bound.write(build, rewrite.all_finite)
        rewrite.applies = bound.applies(build, rewrite.all_finite)
        rewrite.carried += [
            StatePair(state, value, bound.target.in_place, STATE_OF_SCALE, guarded=False)
            for state, value in bound.next_state.items()
        ]
        return True
