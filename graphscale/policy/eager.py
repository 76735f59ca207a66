"""Loss scaling without a graph: the dynamic rule on numpy, and the test of gradients."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from graphscale.policy.dynamic_rule import DynamicRule, ScaleState

__all__ = ["are_finite", "flatten", "next_state"]

_ML_FLOATS = {np.dtype(kind) for kind in (ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2)}


def next_state(rule: DynamicRule, state: ScaleState, finite: bool) -> tuple[ScaleState, bool]:
    """Adjust the scale to one step.

    Returns:
        the state for the next step, and whether the scale is stuck.
    """
    with np.errstate(over="ignore", under="ignore"):
        return (_good(rule, state), False) if finite else _bad(rule, state)


def _good(rule: DynamicRule, state: ScaleState) -> ScaleState:
    counted = state.good_steps + 1
    if counted < rule.steps_to_growth:
        left = state.hysteresis_left if rule.hysteresis_refill == "growth" else rule.hysteresis
        return ScaleState(state.loss_scale, counted, left)
    grown = np.float32(_dtype(rule)(state.loss_scale) * _dtype(rule)(rule.growth))
    if rule.max_loss_scale is not None:
        grown = min(grown, np.float32(rule.max_loss_scale))
    return ScaleState(grown if np.isfinite(grown) else state.loss_scale, 0, rule.hysteresis)


def _bad(rule: DynamicRule, state: ScaleState) -> tuple[ScaleState, bool]:
    floor, bad_steps = np.float32(rule.min_loss_scale), state.bad_steps + 1
    lowers = state.hysteresis_left <= 1
    stuck = lowers and bool(state.loss_scale <= floor)
    if rule.max_consecutive_skips is not None:
        stuck = stuck or bad_steps >= rule.max_consecutive_skips
    if stuck and rule.on_stuck == "reset":
        return rule.initial_state(), True
    if not lowers:
        left = state.hysteresis_left - 1
        return ScaleState(state.loss_scale, rule.good_steps_at_start, left, bad_steps), stuck
    if rule.backoff_factor is None:
        lowered = np.float32(_dtype(rule)(state.loss_scale) / _dtype(rule)(rule.multiplier))
    else:
        lowered = np.float32(_dtype(rule)(state.loss_scale) * _dtype(rule)(rule.backoff_factor))
    left = rule.hysteresis if rule.hysteresis_refill == "decrease" else state.hysteresis_left
    return ScaleState(max(lowered, floor), rule.good_steps_at_start, left, bad_steps), stuck


def _dtype(rule: DynamicRule) -> type[np.float32 | np.float64]:
    return np.float64 if rule.arithmetic == "float64" else np.float32


def are_finite(grads: Any) -> bool:
    """Return whether all gradients in nested sequences and mappings are finite; None is ignored."""
    return all(map(_is_all_finite, flatten(grads)))


def flatten(grads: Any) -> Iterator[Any]:
    """Yield the gradients in nested sequences and mappings, without None."""
    if grads is None:
        return
    if isinstance(grads, Mapping):
        grads = list(grads.values())
    if isinstance(grads, Sequence) and not isinstance(grads, str | bytes):
        for item in grads:
            yield from flatten(item)
    else:
        yield grads


def _is_all_finite(gradient: Any) -> bool:
    array = np.asarray(gradient)
    if not (np.issubdtype(array.dtype, np.floating) or array.dtype in _ML_FLOATS):
        raise TypeError(f"a gradient must be an array of a floating-point dtype; got {array.dtype}")
    return bool(np.isfinite(array).all())
