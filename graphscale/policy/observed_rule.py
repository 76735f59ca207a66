"""The policy of an update rule that somebody else wrote, by its values on a grid of states."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from graphscale.errors import InvalidLossScaleError
from graphscale.policy.dynamic_rule import MAX_COUNT, ScaleState
from graphscale.policy.eager import next_state
from graphscale.policy.loss_scale import DynamicLossScale, LossScale

__all__ = ["ObservedLossScale", "Rule", "identify_policy"]

# A rule: the next scale and count by the scale, the count of good steps, and whether the gradients are finite.
Rule = Callable[[np.float32, int, bool], tuple[np.float32, int]]
_LARGEST, _LEAST = np.finfo(np.float32).max, np.float32(2.0**-149)
_SOME = np.float32(2.0**10)
_SCALES = [np.float32(x) for x in (_LEAST, 2.0**-126, 2.0**-20, 0.7, 1, 1.5, 2, 3, _SOME, 2.0**15, 2.0**24, 2.0**125)]
_ENDS = [np.float32(2.0**126), np.float32(2.0**127), _LARGEST]


class ObservedLossScale(LossScale):
    """A loss scale by a rule of its own: a record of its values, that cannot be used without its graph.

    Args:
        initial_loss_scale: the scale at the beginning.
        rows: states with the next ones: scale, count, whether the gradients are finite, next scale, next count.
        faults: the reasons why it is no rule of a loss scale, a sentence each.
    """

    def __init__(self, initial_loss_scale: float, rows: Sequence[Sequence[float]] = (), faults: Sequence[str] = ()):
        self.initial_loss_scale, self.rows, self.faults = initial_loss_scale, tuple(map(tuple, rows)), tuple(faults)

    def __call__(self) -> np.float32:
        """Return the scale at the beginning."""
        return np.float32(self.initial_loss_scale)

    def update(self, grads: Any) -> tuple[None, bool]:
        """Refuse an update: the rule is in a graph."""
        raise InvalidLossScaleError(f"{self!r} is computed by its graph alone")

    def get_config(self) -> dict[str, Any]:
        """Return the scale at the beginning, the rows and the faults."""
        return {"initial_loss_scale": self.initial_loss_scale, "rows": self.rows, "faults": self.faults}

    def __repr__(self) -> str:
        return "a rule of its own" if self.rows else "a scale that the caller feeds"

    @property
    def table(self) -> str:
        """The rows in words."""
        return "; ".join(
            f"scale {s:g}, count {c:g}, {'finite' if ok else 'not finite'}: scale {n:g}, count {m:g}"
            for s, c, ok, n, m in self.rows
        )


def identify_policy(rule: Rule, initial: float, numbers: Iterable[float]) -> LossScale:
    """Identify the policy that a rule computes, or record its values.

    Args:
        rule: the rule.
        initial: the scale at the beginning.
        numbers: the constants of its computation, one of them its period.
    """
    counts = {int(x) + d for x in numbers if 0 <= x <= MAX_COUNT and x == int(x) for d in (-2, -1, 0, 1)}
    counts = {c for c in counts if c >= 0} | {0, 1}
    growing = [c for c in sorted(counts) if rule(_SOME, c, True)[0] > _SOME]
    # Some rules are a policy's until the scale overflows.
    is_bounded = all(np.isfinite(rule(_LARGEST, count, True)[0]) for count in growing)
    alike = None
    if growing:
        reached = sorted(c for c in counts if c <= growing[0])
        fitting = (p for p in _candidates(rule, initial, growing[0]) if _is_equal(rule, p, reached, to_end=is_bounded))
        alike = next(fitting, None)
        if alike is not None and is_bounded:
            return alike
    shown = sorted({0, *growing[:1]})
    states = itertools.product((_SOME, _LARGEST), shown, (True, False))
    rows = [[float(x) for x in (s, c, ok, *rule(s, c, ok))] for s, c, ok in states]
    return ObservedLossScale(initial, rows, tuple(_find_faults(rule, sorted(counts), initial, alike)))


def _candidates(rule: Rule, initial: float, count: int) -> Iterator[DynamicLossScale]:
    """Yield policies with the numbers that single values of a rule show; it grows first at a count."""
    with np.errstate(all="ignore"):
        growth = float(rule(_SOME, count, True)[0] / _SOME)
        backoff = float(rule(_SOME, 0, False)[0] / _SOME)
        large, near = np.float32(2.0**120), np.float32(0.99 * _LARGEST)
        grown, most = rule(large, count, True)[0], rule(near, count, True)[0]
        floor = float(rule(_LEAST, 0, False)[0])
    # A growth ends at a limit, or is left out where it overflows.
    is_left_out = most == near or not np.isfinite(most)
    limit = float(grown) if grown <= large else None if is_left_out else float(most)
    # Both spellings of a period give one rule; that of flax comes first where the limit is flax's, too.
    delay, period = ("always", count) if limit == _LARGEST else ("none", count + 1)
    for kind in ("float32", "float64"):
        for factors in ({"multiplier": growth}, {"growth_factor": growth, "backoff_factor": backoff}):
            numbers: dict[str, Any] = {"min_loss_scale": floor, "max_loss_scale": limit, **factors}
            numbers |= {"growth_delay": delay, "arithmetic": kind}
            with contextlib.suppress(InvalidLossScaleError):
                yield DynamicLossScale(initial, period, **numbers)


def _is_equal(rule: Rule, policy: DynamicLossScale, counts: Sequence[int], *, to_end: bool) -> bool:
    """Return whether a rule is a policy's on the grid of its reachable states, all or those without overflow."""
    least, most = policy.rule.ranges["loss_scale"]  # type: ignore[index]
    scales = [s for s in (*_SCALES, *_ENDS[: len(_ENDS) * to_end]) if least <= s <= most]
    for scale, count, finite in itertools.product(scales, counts, (True, False)):
        following, _ = next_state(policy.rule, ScaleState(scale, count, 1), finite)
        if rule(scale, count, finite) != (following.loss_scale, following.good_steps):
            return False
    return True


def _find_faults(rule: Rule, counts: Sequence[int], initial: float, alike: LossScale | None) -> Iterator[str]:
    """Yield the reasons why a rule is no rule of a loss scale, once each."""
    if not 0 < initial < np.inf:
        yield f"it begins with {initial:g}"
    for count in counts:
        grown = rule(_LARGEST, count, True)[0]
        if not np.isfinite(grown):
            text = f"it grows without a bound: from {_LARGEST:.3g} to {grown:g}, where no step is applied any more"
            yield text + ("" if alike is None else f"; below that it is {alike!r}")
            break
    for count in [c for c in counts if c and rule(_SOME, c, True)[0] > _SOME][:1]:
        grown, following = rule(_SOME, count, True)
        if rule(grown, following, True)[0] > grown:
            yield f"from count {count} on it grows at every step: a growth does not start the count again"
    for scale, count in itertools.product((_SOME, np.float32(2.0**24)), counts):
        lowered = rule(scale, count, False)[0]
        if not 0 < lowered < scale:
            yield f"after a non-finite gradient the scale {scale:g} becomes {lowered:g}, and should fall"
            return
