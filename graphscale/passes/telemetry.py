"""telemetry: count steps and skips, and show the cause of a skip and the share of gradients that underflow."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import onnx_ir as ir

from graphscale.analysis.report import TELEMETRY
from graphscale.errors import InvalidLossScaleError, TargetError
from graphscale.graph.builder import Builder
from graphscale.passes.nodes.forward_values import find_forward_values
from graphscale.passes.nodes.gradient_ranges import add_ranges, read_zeros
from graphscale.passes.nodes.gradient_statistics import find_offender, zero_fraction
from graphscale.passes.nodes.step_counters import add_counters
from graphscale.passes.step_pass import StepPass, carry
from graphscale.passes.update_loss_scale import UpdateLossScale
from graphscale.policy.dynamic_rule import MAX_COUNT
from graphscale.policy.names import ScaledValue
from graphscale.step.training_step import Carried, Step
from graphscale.targets import target_names

__all__ = ["FORMS", "AddTelemetry"]

# The names of other forms than the plain one.
FORMS = ("ranges", "activations", "ranges,activations")


@dataclasses.dataclass(frozen=True)
class AddTelemetry(StepPass):
    """Add counters to the carried state, and outputs that describe the step.

    After:  `steps.next = Add(steps, 1); skipped_steps.next = Add(skipped_steps, Cast(Not(all_finite)))`
            `consecutive_skips.next = Where(all_finite, 0, Add(consecutive_skips, 1))`
            `last_skip_step.next = Where(all_finite, last_skip_step, steps.next)`
            `skip_cause, first_offender = If <then: 0, -1; else: ...> (all_finite)`
            `zero_fraction = 1 - nonzero elements / elements`, over all gradients that are checked
            ranges: `gradient_ranges.next = If <measured; gradient_ranges> ((steps.next - 1) % every == 0)`, and the
            zero fraction is read from it; activations: `first_activation`, a third result of the first If

    `steps` counts all steps, applied or not. Counters are int64; float32 where the target writes them in place, exact
    to 2**24 steps. The cause is 0 for none, 1 for NaN, 2 for infinity; the offender is an index into the gradients.

    Attributes:
        ranges: True to measure the largest magnitude and the shares of zeros and overflow of each gradient in the first
            step, and in every `every`-th after it. The ranges are carried state, float32 of the shape [3, gradients +
            1].
        every: steps from one measurement of the ranges to the next, from 1 to 2**24.
        activations: True to also find, after a non-finite step, the first non-finite value of the forward pass: inputs
            first, then results in the order of nodes, -1 for none.

    Raises:
        InvalidLossScaleError: (a ValueError) `every` is out of its range.
    """

    ranges: bool = False
    every: int = 100
    activations: bool = False

    name = "telemetry"
    sign = "#"
    optional = True
    after = UpdateLossScale

    def __post_init__(self) -> None:
        if type(self.every) is not int or not 1 <= self.every <= MAX_COUNT:
            raise InvalidLossScaleError(f"telemetry measures ranges every 1 to 2**24 steps; got every={self.every!r}")

    @classmethod
    def of(cls, telemetry: Any) -> AddTelemetry | None:
        """Return the pass for a form of telemetry: None for False, a pass itself, a new one for True and names.

        Raises:
            InvalidLossScaleError: (a ValueError) the form does not exist.
        """
        if isinstance(telemetry, cls) or telemetry is False:
            return telemetry or None
        if telemetry is True:
            return cls()
        if telemetry not in FORMS:
            forms = " or ".join(map(repr, FORMS))
            raise InvalidLossScaleError(
                f"telemetry: expected {forms}; for the counts alone --telemetry without a value (True in Python); "
                f"got {telemetry!r}"
            )
        return cls(**dict.fromkeys(telemetry.split(","), True))

    def to_stamp(self, step: Step, checked: list[str]) -> dict[str, Any]:
        """Return the options for the metadata, with the names of the checked gradients and activations."""
        return {
            "gradients": checked,
            **({ScaledValue.RANGES.value: {"every": self.every}} if self.ranges else {}),
            **({"activations": [value.name or "" for value in step.activations]} if self.activations else {}),
        }

    @classmethod
    def from_stamp(cls, telemetry: Mapping[str, Any]) -> AddTelemetry | None:
        """Return the pass with the options in the metadata, None without telemetry."""
        if not telemetry:
            return None
        ranges = telemetry.get(ScaledValue.RANGES)
        return cls(ranges is not None, **(ranges or {}), activations="activations" in telemetry)

    def apply(self, step: Step, build: Builder) -> Step:
        finite, applies, gradients = step.all_finite, step.guard, step.checked
        if finite is None or applies is None:
            raise InvalidLossScaleError(
                "telemetry describes skipped steps, and a fixed loss scale skips none; add skip_nonfinite "
                "(--skip-nonfinite), or choose a dynamic one"
            )
        target = step.scale.target
        if (self.ranges or self.activations) and target.cuda:
            raise TargetError(
                f"telemetry of ranges and activations needs branches, and target {target.name!r} has no control flow; "
                f"choose {target_names(lambda each: not each.cuda)}, or telemetry without them"
            )
        states, values = add_counters(build, applies, in_place=target.in_place), dict[ScaledValue, ir.Value]()
        carried = [_carry(build, *pair, in_place=target.in_place) for pair in states.values()]
        activations: dict[ir.Value, ir.DataType] = {}
        if gradients:
            if self.activations:
                activations = find_forward_values(step.model, step.loss, {state.input for state in step.states})
            found = find_offender(build, gradients, finite, target, activations)
            if self.ranges:
                measured = add_ranges(build, gradients, states[ScaledValue.STEPS][1], self.every)
                states[ScaledValue.RANGES] = measured
                carried.append(_carry(build, *measured, in_place=target.in_place))
                zeros = read_zeros(build, measured[1], len(gradients))
            else:
                zeros = zero_fraction(build, gradients)
            roles = (ScaledValue.CAUSE, ScaledValue.OFFENDER, ScaledValue.ACTIVATION)
            values = dict(zip(roles, found, strict=False)) | {ScaledValue.ZERO_FRACTION: zeros}
            for role, value in values.items():
                build.editor.output(value, value.name or role.wanted)
        return dataclasses.replace(
            step,
            carried=(*step.carried, *carried),
            telemetry={role: state for role, (state, _) in states.items()} | values,
            activations=activations,
            modified=True,
        )


def _carry(build: Builder, state: ir.Value, value: ir.Value, *, in_place: bool) -> Carried:
    build.editor.output(value, f"{state.name}.next")
    return carry(build, state, value, TELEMETRY, in_place=in_place, guarded=False)
