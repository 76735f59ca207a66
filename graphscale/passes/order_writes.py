"""order-writes: make every in-place write wait for the readers of the old value."""

from __future__ import annotations

import dataclasses

from graphscale.graph.builder import Builder
from graphscale.passes.guard_updates import GuardUpdates
from graphscale.passes.step_pass import StepPass
from graphscale.step.training_step import Step

__all__ = ["OrderWrites"]


@dataclasses.dataclass(frozen=True)
class OrderWrites(StepPass):
    """Make each value that is written in place depend on all readers of the overwritten state.

    ONNX Runtime does not order an in-place write after the other readers of the old value. Where a reader is no
    ancestor of the written value, one element of its result becomes an operand without effect:

    After:  `seen = IsNaN(first element of r); never = And(seen, Not(seen)); w.ordered = Where(never, state, w)`

    The last pass of a sequence.
    """

    name = "order-writes"
    sign = "1·2"
    renews_scale = True
    after = GuardUpdates

    def apply(self, step: Step, build: Builder) -> Step:
        if not (step.scale.target.in_place or step.accumulators):
            return step
        from graphscale.passes.nodes.write_order import order_writes  # few targets write in place

        return dataclasses.replace(step, modified=order_writes(build))
