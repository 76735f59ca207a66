"""The state of a loss scale, and the reports of telemetry, after a step, by the rule on numpy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import onnx_ir as ir

from graphscale.checks.verification.pair import Pair
from graphscale.errors import VerifyError
from graphscale.files.tensor_files import Arrays
from graphscale.passes.nodes.gradient_ranges import ROWS
from graphscale.policy.dynamic_rule import DynamicRule, ScaleState
from graphscale.policy.eager import next_state
from graphscale.policy.loss_scale import DynamicLossScale
from graphscale.policy.names import COUNTERS, ScaledValue

__all__ = ["Oracle"]

_LARGEST = float(np.finfo(np.float32).max)


class Oracle:
    """The rule of a scaled graph's policy.

    Attributes:
        rule: the rule; None for a fixed scale.
        initial: the scale at the beginning.
        gradients: the names of the gradients in telemetry.
        activations: the names of the forward values in telemetry.
    """

    def __init__(self, pair: Pair) -> None:
        self.step, scale, values = pair.step, pair.step.scale, pair.step.telemetry
        self._states, self._stuck = scale.states, scale.stuck
        self.rule: DynamicRule | None = scale.policy.rule if isinstance(scale.policy, DynamicLossScale) else None
        self.initial = float(scale.policy())
        self._names, telemetry = pair.step.stamp.names, pair.step.stamp.telemetry
        self.gradients = tuple(telemetry.get("gradients", ()))
        self.activations = tuple(telemetry.get("activations", ()))
        self._every = int(telemetry.get(ScaledValue.RANGES, {}).get("every", 0))
        self._counters = {role: values[role] for role in COUNTERS if role in values}
        self._ranges = values.get(ScaledValue.RANGES) if self._every and self.gradients else None

    def starts(self) -> list[Arrays]:
        """Return first states for a step, by input name, beginning with the initial one."""
        rule = self.rule
        if rule is None:
            return [self._feeds({ScaledValue.LOSS_SCALE: self.initial}, i) for i in range(2 if self._every else 1)]
        first = rule.carried(rule.initial_state())
        about_to_grow: dict[ScaledValue, float] = {ScaledValue.GOOD_STEPS: rule.steps_to_growth - 1}
        variants: list[dict[ScaledValue, float]] = [
            {},
            about_to_grow,
            {ScaledValue.GOOD_STEPS: max(0, rule.steps_to_growth - 2)},
            {ScaledValue.LOSS_SCALE: max(rule.min_loss_scale, float(np.float32(1e-30)))},
            {ScaledValue.LOSS_SCALE: rule.min_loss_scale * 1.25 or 0.75, **about_to_grow},
            {ScaledValue.LOSS_SCALE: _LARGEST / 1.5, **about_to_grow},
            {ScaledValue.LOSS_SCALE: 3.0, ScaledValue.GOOD_STEPS: rule.steps_to_growth // 2},
        ]
        if rule.counts_hysteresis:
            variants += [
                {ScaledValue.HYSTERESIS_LEFT: 1, **about_to_grow},
                {ScaledValue.HYSTERESIS_LEFT: 1},
                {ScaledValue.HYSTERESIS_LEFT: 2},
            ]
        if rule.counts_bad_steps:
            variants += [{ScaledValue.BAD_STEPS: (rule.max_consecutive_skips or 1) - 1}, {ScaledValue.BAD_STEPS: 1}]
        return [self._feeds({**first, **variant}, i) for i, variant in enumerate(variants)]

    def _feeds(self, values: Mapping[ScaledValue, float], count: int) -> Arrays:
        # Ranges are measured in every other step.
        steps = count * self._every if self._every and count % 2 == 0 else 7 + count
        counters: dict[ScaledValue, float] = {
            ScaledValue.STEPS: steps,
            ScaledValue.SKIPPED_STEPS: 3 + count,
            ScaledValue.CONSECUTIVE_SKIPS: count,
            ScaledValue.LAST_SKIP_STEP: 5,
        }
        states = self._states or {ScaledValue.LOSS_SCALE: self.step.scale.value}
        feeds = _arrays(states, values) | _arrays(self._counters, counters)
        if self._ranges is not None:
            numbers = np.linspace(0, 1, len(ROWS) * (len(self.gradients) + 1), dtype=np.float32)
            feeds[self._ranges.name or ""] = numbers.reshape(len(ROWS), -1)
        return feeds

    def applies(self, feeds: Mapping[str, Any], finite: bool) -> bool:
        """Return whether a step is applied."""
        if self.rule is None:
            return finite or self.step.all_finite is None
        stuck = next_state(self.rule, self._state(feeds), finite)[1]
        return finite or (stuck and self.rule.on_stuck == "accept")

    def after(self, feeds: Mapping[str, Any], finite: bool) -> Arrays:
        """Return `{state: next value}` of the loss scale and of the counters."""
        values = {} if self.rule is None else self.rule_alone(feeds, finite)
        found = {state.name or "": values[role] for role, state in self._states.items() if role in values}
        return found | (self._counted(feeds, self.applies(feeds, finite)) if self._counters else {})

    def rule_alone(self, feeds: Mapping[str, Any], finite: bool) -> dict[ScaledValue, np.ndarray[Any, Any]]:
        """Return `{role: next value}` of the loss scale, and `stuck` if the policy has it."""
        assert self.rule is not None
        state, stuck = next_state(self.rule, self._state(feeds), finite)
        states = self._states.items()
        found = {role: np.asarray(getattr(state, role), dtype=_dtype(value)) for role, value in states}
        return found if self._stuck is None else {**found, ScaledValue.STUCK: np.asarray(stuck)}

    def ranges(self, feeds: Mapping[str, Any], gradients: Arrays) -> Arrays:
        """Return `{state: next value}` of the ranges of a step's unscaled gradients, if known."""
        if self._ranges is None or any(name not in gradients for name in self.gradients):
            return {}
        name, steps = self._ranges.name or "", self._counters[ScaledValue.STEPS]
        if (int(self._counted(feeds, True)[steps.name or ""]) - 1) % self._every:
            return {name: np.asarray(feeds[name])}
        arrays = [gradients[each].ravel() for each in self.gradients]
        with np.errstate(over="ignore"):
            columns = [*arrays, np.concatenate([array.astype(np.float64) for array in arrays])]
            found = [_range(array) for array in columns]
            return {name: np.asarray(found, dtype=np.float32).T}

    def telemetry(
        self, feeds: Mapping[str, Any], finite: bool, gradients: Arrays, values: Mapping[str, Any]
    ) -> Iterator[tuple[str, Any]]:
        """Yield the known names and values of the outputs that report on a step.

        The gradients are unscaled; the values by name include the activations of telemetry.
        """
        if self.step.all_finite is not None:
            yield self._names[ScaledValue.ALL_FINITE], np.asarray(finite)
        if not self.gradients or any(name not in gradients for name in self.gradients):
            return
        arrays = [gradients[name] for name in self.gradients]
        bad = [i for i, array in enumerate(arrays) if not np.isfinite(array).all()]
        cause = 0 if not bad else 1 if np.isnan(arrays[bad[0]]).any() else 2
        yield self._names[ScaledValue.CAUSE], np.asarray(cause, dtype=np.int64)
        yield self._names[ScaledValue.OFFENDER], np.asarray(bad[0] if bad else -1, dtype=np.int64)
        if self.activations and all(name in values for name in self.activations):
            found = (i for i, name in enumerate(self.activations) if not np.isfinite(values[name]).all())
            first = -1 if finite else next(found, -1)
            yield self._names[ScaledValue.ACTIVATION], np.asarray(first, dtype=np.int64)
        for ranges in self.ranges(feeds, gradients).values():
            yield self._names[ScaledValue.ZERO_FRACTION], ranges[ROWS.index("zeros"), -1]
            return
        nonzero, total = sum(np.count_nonzero(a) for a in arrays), max(1, sum(a.size for a in arrays))
        yield self._names[ScaledValue.ZERO_FRACTION], np.float32(1) - np.float32(nonzero) / np.float32(total)

    def _state(self, feeds: Mapping[str, Any]) -> ScaleState:
        assert self.rule is not None
        values = {role: feeds[state.name or ""].item() for role, state in self._states.items()}
        hysteresis = int(values.get(ScaledValue.HYSTERESIS_LEFT, self.rule.hysteresis))
        scale, good_steps = np.float32(values[ScaledValue.LOSS_SCALE]), int(values[ScaledValue.GOOD_STEPS])
        return ScaleState(scale, good_steps, hysteresis, int(values.get(ScaledValue.BAD_STEPS, 0)))

    def _counted(self, feeds: Mapping[str, Any], applied: bool) -> Arrays:
        before = {role: feeds[state.name or ""].item() for role, state in self._counters.items()}
        steps = before[ScaledValue.STEPS] + 1
        following: dict[ScaledValue, float] = {
            ScaledValue.STEPS: steps,
            ScaledValue.SKIPPED_STEPS: before[ScaledValue.SKIPPED_STEPS] + (not applied),
            ScaledValue.CONSECUTIVE_SKIPS: 0 if applied else before[ScaledValue.CONSECUTIVE_SKIPS] + 1,
            ScaledValue.LAST_SKIP_STEP: before[ScaledValue.LAST_SKIP_STEP] if applied else steps,
        }
        return _arrays(self._counters, following)


def _range(array: np.ndarray[Any, Any]) -> tuple[float, float, float]:
    """Return the largest magnitude of finite elements, and the shares of zeros and of non-finite elements."""
    finite, size = array[np.isfinite(array)], max(1, array.size)
    largest = np.abs(finite.astype(np.float64)).max(initial=0.0)
    return float(largest), np.count_nonzero(array == 0) / size, (array.size - finite.size) / size


def _arrays(states: Mapping[ScaledValue, ir.Value], numbers: Mapping[ScaledValue, float]) -> Arrays:
    """Convert numbers by role to arrays, with the names and types of states."""
    known = {state: numbers[role] for role, state in states.items() if role in numbers}
    return {state.name or "": np.asarray(number, dtype=_dtype(state)) for state, number in known.items()}


def _dtype(value: ir.Value) -> Any:
    if value.dtype is None:
        raise VerifyError(f"the counter {value.name!r} of the scaled graph has no type")
    return value.dtype.numpy()
