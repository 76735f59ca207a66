"""A loss scale as values of a graph."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import onnx_ir as ir

from graphscale.policy.loss_scale import FixedLossScale, LossScale
from graphscale.policy.names import ScaledValue
from graphscale.targets import Target

__all__ = ["Scale"]


@dataclasses.dataclass(frozen=True, eq=False)
class Scale:
    """A loss scale in a graph.

    Attributes:
        policy: its policy.
        target: the runtime that executes the graph.
        value: the scale, a scalar float32 value.
        states: its state by role, including `loss_scale`; none of a fixed scale.
        next: the next value of each state, by role, once the update rule is in the graph.
        stuck: the flag of a stuck scale; None for a policy without a reaction to one.
    """

    policy: LossScale
    target: Target
    value: ir.Value
    states: Mapping[ScaledValue, ir.Value] = dataclasses.field(default_factory=dict)
    next: Mapping[ScaledValue, ir.Value] = dataclasses.field(default_factory=dict)
    stuck: ir.Value | None = None

    @property
    def is_fixed(self) -> bool:
        """True for a fixed scale, which has no state."""
        return isinstance(self.policy, FixedLossScale)
