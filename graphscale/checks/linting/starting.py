"""Rules on the values with which the loss scale and its counts begin: GS107, GS504 and GS505."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import onnx_ir as ir

from graphscale.checks.linting.lint_context import LintContext, rule
from graphscale.checks.linting.lint_report import Finding, report
from graphscale.checks.linting.view import number_of
from graphscale.checks.scaled_graph import COUNTERS
from graphscale.errors import InvalidLossScaleError
from graphscale.policy.dynamic_rule import BAD_STEPS, GOOD_STEPS, HYSTERESIS_LEFT, LOSS_SCALE, DynamicRule
from graphscale.policy.loss_scale import DynamicLossScale, LossScale, get_policy

__all__: list[str] = []

# Times this, the smallest float16 number above zero is larger than the largest.
_OVERFLOWS = 2.0**40
# The counters of telemetry that no other one exceeds, by the one that is not exceeded.
_BOUNDS = {"skipped_steps": "steps", "last_skip_step": "steps", "consecutive_skips": "skipped_steps"}


def _policy(context: LintContext) -> LossScale | None:
    """Return the policy that the metadata name, None without one."""
    try:
        return None if context.stamp is None else get_policy(context.stamp.policy)
    except InvalidLossScaleError:
        return None


def _rule(context: LintContext) -> DynamicRule | None:
    policy = _policy(context)
    return policy.rule if isinstance(policy, DynamicLossScale) else None


@rule("GS107")
def _scale_value(context: LintContext) -> Iterator[Finding]:
    if context.scale is None:
        return
    value = context.scale.value
    number = number_of(value, initial=True)
    if number is None or (context.stamp is None and value is not context.scale.scalars.symbol):
        return
    dynamic = _rule(context)
    least = 1.0 if dynamic is None else dynamic.min_loss_scale
    most = math.inf if dynamic is None or dynamic.max_loss_scale is None else dynamic.max_loss_scale
    name = f"the loss scale {value.name!r} begins with {number:g}"
    if not (math.isfinite(number) and number > 0 and np.float32(least) <= number <= np.float32(most)):
        ends = f"at least {least:g}" if most == math.inf else f"from {least:g} to {most:g}"
        yield report("GS107", name if dynamic is None else f"{name}, and its policy keeps it {ends}", value=value)
    elif number > _OVERFLOWS and context.has_gradients_in(ir.DataType.FLOAT16):
        yield report("GS107", f"{name}, times which every number of float16 but zero overflows", value=value)


@rule("GS504", "GS505")
def _counts(context: LintContext) -> Iterator[Finding]:
    policy, dynamic, is_named = _policy(context), _rule(context), any(_scale_value(context))
    values = {role: number_of(value, initial=True) for role, value in context.named.items()}
    numbers = {role: number for role, number in values.items() if number is not None}
    bounds = {role: numbers.get(bound, math.inf) for role, bound in _BOUNDS.items()}
    ranges: dict[str, tuple[float, float]] = {
        role: (0, bound if (bound := bounds.get(role, math.inf)) >= 0 else math.inf) for role in (*COUNTERS, BAD_STEPS)
    }
    firsts: dict[str, float] = {} if policy is None else {LOSS_SCALE: float(policy())}
    if dynamic is not None:
        firsts = dynamic.carried(dynamic.initial_state())
        ranges |= {role: dynamic.ranges[role] for role in (GOOD_STEPS, HYSTERESIS_LEFT)}
    for role, number in numbers.items():
        name = f"{context.named[role].name!r} begins with {number:g}"
        least, most = ranges.get(role, (-math.inf, math.inf))
        if role in ranges and not (least <= number <= most and number.is_integer()):
            ends = f"at least {least:g}" if most == math.inf else f"from {least:g} to {most:g}"
            yield report("GS504", f"{name}, and it is a count {ends}", value=context.named[role])
        elif role in firsts and number != np.float32(firsts[role]) and not (role == LOSS_SCALE and is_named):
            message = f"{name}, and the policy begins with {firsts[role]:g}"
            yield report("GS505", message, value=context.named[role])
