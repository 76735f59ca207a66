"""The update rule of a dynamic loss scale, on numpy: TensorFlow's, with the options of its peers.

    finite:      if good + 1 >= period:  n = scale * growth;  scale = n if n is finite;  good = 0
                 else:                   good = good + 1
    not finite:  good = 0;  scale = max(scale / multiplier, minimum);  the step is skipped

The model-local function UpdateLossScale is the rule as ONNX nodes.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from graphscale.errors import InvalidLossScaleError
from graphscale.policy.names import ScaledValue

__all__ = ["DynamicRule", "ScaleState", "check_number"]

# The largest count of steps that a float32 counter holds exactly: the in-place targets keep one.
MAX_COUNT = 2**24

_CHOICES = {
    "growth_delay": ("none", "always", "first"),
    "hysteresis_refill": ("growth", "good", "decrease"),
    "on_stuck": ("hold", "flag", "stop", "reset", "accept"),
    "arithmetic": ("float32", "float64"),
}


@dataclasses.dataclass(frozen=True)
class ScaleState:
    """The state of a dynamic loss scale.

    Attributes:
        loss_scale: the scale of the next step.
        good_steps: finite steps in a row since the scale changed; -1 where the next growth takes one more step.
        hysteresis_left: the number of non-finite steps until the scale falls.
        bad_steps: non-finite steps in a row.
    """

    loss_scale: np.float32
    good_steps: int
    hysteresis_left: int
    bad_steps: int = 0


@dataclasses.dataclass(frozen=True)
class DynamicRule:
    """The numbers and kinds of a dynamic loss scale, which `DynamicLossScale` documents.

    Raises:
        InvalidLossScaleError: (a ValueError) a value is out of its range.
    """

    initial_loss_scale: float = 2.0**15
    increment_period: int = 2000
    multiplier: float = 2.0
    growth_factor: float | None = None
    backoff_factor: float | None = None
    min_loss_scale: float = 1.0
    max_loss_scale: float | None = None
    growth_delay: str = "none"
    hysteresis: int = 1
    hysteresis_refill: str = "growth"
    max_consecutive_skips: int | None = None
    on_stuck: str = "hold"
    arithmetic: str = "float32"

    def __post_init__(self) -> None:
        for name, value in self._checked().items():
            object.__setattr__(self, name, value)

    def _checked(self) -> dict[str, Any]:
        floor = check_number("min_loss_scale", self.min_loss_scale, minimum=0.0)
        least = {"minimum": floor} if floor > 0 else {"above": 0.0}
        initial = check_number("initial_loss_scale", self.initial_loss_scale, **least)
        bounds: dict[str, dict[str, float]] = {
            "max_loss_scale": {"minimum": initial},
            "multiplier": {"above": 1.0},
            "growth_factor": {"above": 1.0},
            "backoff_factor": {"above": 0.0, "below": 1.0},
        }
        optional = {field.name for field in dataclasses.fields(self) if field.default is None}
        checked: dict[str, Any] = {"min_loss_scale": floor, "initial_loss_scale": initial}
        for name, bound in bounds.items():
            if getattr(self, name) is not None or name not in optional:
                checked[name] = check_number(name, getattr(self, name), **bound)
        for name in ("increment_period", "hysteresis", "max_consecutive_skips"):
            if getattr(self, name) is not None or name not in optional:
                checked[name] = _check_count(name, getattr(self, name))
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                wanted = ", ".join(map(repr, choices))
                raise InvalidLossScaleError(f"{name} must be one of {wanted}; got {getattr(self, name)!r}")
        if self.steps_to_growth > MAX_COUNT:  # float32 counts no further
            raise InvalidLossScaleError("growth_delay='always' needs an increment_period below 2**24 steps")
        return checked

    @property
    def growth(self) -> float:
        """The factor of a growth."""
        return self.multiplier if self.growth_factor is None else self.growth_factor

    @property
    def counts_hysteresis(self) -> bool:
        """True if a decrease can take more than one non-finite step."""
        return self.hysteresis > 1

    @property
    def counts_bad_steps(self) -> bool:
        """True if non-finite steps in a row are counted."""
        return self.max_consecutive_skips is not None and self.on_stuck != "hold"

    @property
    def steps_to_growth(self) -> int:
        """The count of good steps at which the scale grows."""
        return self.increment_period + (self.growth_delay == "always")

    @property
    def good_steps_at_start(self) -> int:
        """The count of good steps at the beginning, and after a non-finite step."""
        return -1 if self.growth_delay == "first" else 0

    @property
    def ranges(self) -> dict[ScaledValue, tuple[float, float]]:
        """The least and the largest number of each field of a reachable state; a scale is also above 0."""
        most = np.finfo(np.float32).max if self.max_loss_scale is None else np.float32(self.max_loss_scale)
        return {
            ScaledValue.LOSS_SCALE: (float(np.float32(self.min_loss_scale)), float(most)),
            ScaledValue.GOOD_STEPS: (self.good_steps_at_start, self.steps_to_growth - 1),
            ScaledValue.HYSTERESIS_LEFT: (1, self.hysteresis),
            ScaledValue.BAD_STEPS: (0, math.inf),
        }

    def initial_state(self) -> ScaleState:
        """Return the state at the beginning."""
        return ScaleState(np.float32(self.initial_loss_scale), self.good_steps_at_start, self.hysteresis)

    def carried(self, state: ScaleState) -> dict[ScaledValue, float]:
        """Return the numbers of a state that a graph carries from step to step, by role."""
        needless = set() if self.counts_hysteresis else {ScaledValue.HYSTERESIS_LEFT}
        needless |= set() if self.counts_bad_steps else {ScaledValue.BAD_STEPS}
        return {role: float(getattr(state, role)) for role in self.ranges if role not in needless}

    def find_fault(self, state: ScaleState) -> str | None:
        """Return the first number of a state out of the rule's ranges, in words, or None."""
        for role, (least, most) in self.ranges.items():
            number = getattr(state, role)
            if not (least <= number <= most) or (role is ScaledValue.LOSS_SCALE and number <= 0):
                return f"the {role.words} is {number:g}, out of the range from {least:g} to {most:g}"
        return None


def check_number(
    name: str, value: Any, *, minimum: float = -math.inf, above: float = -math.inf, below: float = math.inf
) -> float:
    """Return a float32 number within the bounds, also after rounding to float32.

    Raises:
        InvalidLossScaleError: the value is not such a number.
    """
    wanted = f"a finite float32 number of at least {minimum:g}"
    if above > minimum:
        wanted = f"a finite float32 number above {above:g}, such as {2 * above or 1:g}"
    if below < math.inf:
        wanted = f"a number above {above:g} and below {below:g}, such as 0.5"
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        raise InvalidLossScaleError(f"{name} must be {wanted}; got {value!r}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    with np.errstate(over="ignore"):
        held = np.float32(number)
    if not (np.isfinite(held) and number >= minimum and above < held < below):
        raise InvalidLossScaleError(f"{name} must be {wanted}; got {value!r}")
    return number


def _check_count(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise InvalidLossScaleError(f"{name} must be a whole number of steps; got {value!r}")
    if not 1 <= value <= MAX_COUNT:
        raise InvalidLossScaleError(f"{name} must be from 1 to 2**24 steps; got {value!r}")
    return int(value)
