"""Learning rates: pure functions of the number of applied steps, so that a skipped step does not advance them."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from graphscale.errors import TrainingError

__all__ = ["SCHEDULES", "LearningRate"]

# The settings of each schedule, beyond warmup.
SCHEDULES: dict[str, tuple[str, ...]] = {
    "constant": (),
    "linear": ("final", "decay_steps"),
    "cosine": ("final", "decay_steps"),
    "polynomial": ("final", "decay_steps", "power"),
    "step": ("final", "decay_steps", "decay_rate"),
    "exponential": ("final", "decay_steps", "decay_rate"),
}
_REPEATED = ("step", "exponential")  # schedules of endless decay: decay_steps is the length of one round


@dataclasses.dataclass(frozen=True)
class LearningRate:
    """A learning rate, with `t` the number of steps applied so far, less those of the warmup.

    constant: `base`. linear, cosine and polynomial go from `base` to `final` in `decay_steps` steps, and stay there:
    `p = min(t / decay_steps, 1)` gives `final + (base - final) * f`, f being `1 - p`, `(1 + cos(pi * p)) / 2` (SGDR,
    arXiv:1608.03983) and `(1 - p) ** power`. step: `base * decay_rate ** floor(t / decay_steps)`. exponential:
    `base * decay_rate ** (t / decay_steps)`; both not below `final`. In the warmup, step i of n (from 1) has
    `base * i / n`.

    Args:
        base: the learning rate, above 0.
        schedule: one of `SCHEDULES`.
        warmup: applied steps of linear growth at the beginning.
        final: the last, or lowest, learning rate.
        decay_steps: applied steps of the decay, or of one round. linear, cosine and polynomial: None for the rest of
            the run, which `for_run` fills in. step and exponential need a number.
        decay_rate: the factor of each round, above 0 and not above 1. Default: 0.1.
        power: the power of the polynomial, above 0. Default: 1.

    Raises:
        TrainingError: a value is out of range, missing, or not one of this schedule's.
    """

    base: float
    schedule: str = "constant"
    warmup: int = 0
    final: float | None = None
    decay_steps: int | None = None
    decay_rate: float | None = None
    power: float | None = None

    def __post_init__(self) -> None:
        if self.schedule not in SCHEDULES:
            raise TrainingError(f"--schedule {self.schedule} does not exist; there are {', '.join(SCHEDULES)}")
        for name, option in _OPTIONS.items():
            value = getattr(self, name)
            if value is not None and name not in SCHEDULES[self.schedule]:
                fitting = [schedule for schedule, names in SCHEDULES.items() if name in names]
                raise TrainingError(f"{option} goes with --schedule {' or '.join(fitting)}, not {self.schedule}")
        if self.schedule in _REPEATED and self.decay_steps is None:
            raise TrainingError(f"--schedule {self.schedule} needs --decay-steps, the applied steps of each round")
        _require(0 < self.base < math.inf, "--learning-rate", self.base, "a finite number above 0")
        _require(self.warmup >= 0, "--warmup", self.warmup, "a number of steps, 0 or more")
        final, rate, power = self.final, self.decay_rate, self.power
        _require(final is None or 0 <= final <= self.base, _OPTIONS["final"], final, f"from 0 to {self.base}")
        _require(self.decay_steps is None or self.decay_steps >= 1, "--decay-steps", self.decay_steps, "1 or more")
        _require(rate is None or 0 < rate <= 1, "--decay-rate", rate, "above 0 and not above 1")
        _require(power is None or 0 < power < math.inf, "--power", power, "a finite number above 0")

    def for_run(self, steps: int) -> LearningRate:
        """Return the learning rate for a run of a number of steps: an open decay lasts from the warmup to the end."""
        if self.decay_steps is not None or "decay_steps" not in SCHEDULES[self.schedule]:
            return self
        return dataclasses.replace(self, decay_steps=max(1, steps - self.warmup))

    def __call__(self, applied: int) -> float:
        """Return the learning rate of the step after a number of applied steps."""
        if applied < self.warmup:
            return self.base * (applied + 1) / self.warmup
        final, after = self.final or 0.0, applied - self.warmup
        if self.decay_steps is None:
            return self.base
        rounds = after / self.decay_steps
        if self.schedule in _REPEATED:
            rate = 0.1 if self.decay_rate is None else self.decay_rate
            return max(self.base * rate ** (math.floor(rounds) if self.schedule == "step" else rounds), final)
        left = 1 - min(rounds, 1.0)
        if self.schedule == "cosine":
            left = (1 - math.cos(math.pi * left)) / 2
        elif self.power is not None:
            left **= self.power
        return final + (self.base - final) * left

    def settings(self) -> dict[str, Any]:
        """Return the settings for a checkpoint: `{option: value}`."""
        names = {"base": "--learning-rate", "schedule": "--schedule", "warmup": "--warmup", **_OPTIONS}
        return {option: getattr(self, name) for name, option in names.items()}


_OPTIONS = {
    "final": "--final-learning-rate",
    "decay_steps": "--decay-steps",
    "decay_rate": "--decay-rate",
    "power": "--power",
}


def _require(holds: bool, option: str, value: Any, wanted: str) -> None:
    if not holds:
        raise TrainingError(f"{option} {value}: expected {wanted}")
