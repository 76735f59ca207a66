"""update-loss-scale: adjust the loss scale by the finite check."""

from __future__ import annotations

import dataclasses

from graphscale.analysis.report import STATE_OF_SCALE
from graphscale.graph.builder import Builder
from graphscale.passes.check_finite import CheckFinite
from graphscale.passes.nodes.graph_scale import add_decision, add_rule
from graphscale.passes.step_pass import StepPass
from graphscale.step.training_step import Carried, Step

__all__ = ["UpdateLossScale"]


@dataclasses.dataclass(frozen=True)
class UpdateLossScale(StepPass):
    """Call the update rule, a model-local function, and write the new state.

    After:  `current_loss_scale.next, good_steps.next =
             graphscale.UpdateLossScale <increment_period, multiplier> (current_loss_scale, good_steps, all_finite)`

    A fixed loss scale has no update. A policy that reports a stuck scale gets the output `stuck`.
    """

    name = "update-loss-scale"
    sign = "S′"  # noqa: RUF001
    renews_scale = True
    after = CheckFinite

    def apply(self, step: Step, build: Builder) -> Step:
        if step.scale.is_fixed:
            return step
        assert step.all_finite is not None
        scale, _ = add_rule(build, step.model, step.scale, step.all_finite)
        carried = (
            Carried(scale.states[role], value, scale.target.in_place, STATE_OF_SCALE, guarded=False)
            for role, value in scale.next.items()
        )
        guard = add_decision(build, scale, step.all_finite)
        return dataclasses.replace(step, scales=(scale,), guard=guard, carried=(*step.carried, *carried), modified=True)
