"""Runs of one framework's sides in turns: their times, and conditions afterwards. Needs numpy alone."""

from __future__ import annotations

import dataclasses
import gc
import time
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from training_steps.workloads import INCREMENT_PERIOD, INITIAL_LOSS_SCALE, Arrays, Workload, workloads

__all__ = ["PLAIN", "Bench", "Side", "Sides", "Time"]

PLAIN = "plain"


class Side(Protocol):
    """One way to run a training step."""

    def step(self, batch: Any) -> float:
        """Run one step, and return its loss."""

    def weights(self) -> Arrays:
        """The present weights."""

    def loss_scale(self) -> tuple[float, int] | None:
        """The loss scale and the count of good steps; None where there is none."""


@dataclasses.dataclass(frozen=True)
class Sides:
    """The steps of a framework for a workload.

    Attributes:
        sides: by name; the unscaled step is `plain`.
        batches: in the framework's own form, to be fed in turn.
    """

    sides: dict[str, Side]
    batches: list[Any]


@dataclasses.dataclass(frozen=True)
class Time:
    """Seconds of a step.

    Attributes:
        cpu: of all threads of the process.
        wall: of the clock.
    """

    cpu: float
    wall: float


class Bench:
    """The sides of one framework.

    Args:
        make: makes the sides of a workload.
        quick: whether workloads are the tiny ones.
    """

    def __init__(self, make: Callable[[Workload], Sides], quick: bool) -> None:
        self._make, self._workloads = make, workloads(quick)
        self._made = Sides({}, [])
        self._counts: dict[str, int] = {}
        self._losses: dict[str, list[float]] = {}

    def prepare(self, name: str) -> list[str]:
        """Make the sides of a workload; return their names."""
        self._workload = self._workloads[name]
        self._made = self._make(self._workload)
        self._counts = dict.fromkeys(self._made.sides, 0)
        self._losses = {side: [] for side in self._made.sides}
        gc.collect()
        gc.freeze()  # what is there now is not looked through again before each turn: that takes longer than a turn
        return list(self._made.sides)

    def run(self, name: str, steps: int) -> Time:
        """The time of a step of one side, as a mean over so many."""
        side, first = self._made.sides[name], self._counts[name]
        batches = [self._made.batches[number % len(self._made.batches)] for number in range(first, first + steps)]
        gc.collect()
        cpu, wall = time.process_time(), time.perf_counter()
        losses = [side.step(batch) for batch in batches]
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        self._losses[name] += losses
        self._counts[name] += steps
        return Time(cpu / steps, wall / steps)

    def check(self) -> dict[str, Any]:
        """Compare all sides with the plain one, after as many steps.

        Returns:
            `deviation`: for each other side the largest difference of a weight, relative to the largest way that a
            weight of that tensor has gone; and `losses`, those of the plain side.

        Raises:
            ValueError: a loss is not finite, or a loss scale is not what so many good steps make of it.
        """
        sides, count = self._made.sides, self._counts[PLAIN]
        plain, first = sides[PLAIN].weights(), self._workload.weights()
        grown, good = divmod(count, INCREMENT_PERIOD)
        deviations = {}
        for name, side in sides.items():
            if self._counts[name] != count:
                raise ValueError(f"{name} has run {self._counts[name]} steps, plain {count}")
            if not np.isfinite(self._losses[name]).all():
                raise ValueError(f"{name}: a loss is not finite")
            if side.loss_scale() not in (None, (INITIAL_LOSS_SCALE * 2**grown, good)):
                raise ValueError(f"{name}: after {count} good steps, scale and count are {side.loss_scale()}")
            if name != PLAIN:
                weights = side.weights()
                deviations[name] = max(_deviation(weights[key], plain[key], first[key]) for key in first)
        return {"deviation": deviations, "losses": self._losses[PLAIN]}

    def close(self) -> None:
        """Free the sides."""
        self._made = Sides({}, [])
        gc.unfreeze()
        gc.collect()


def _deviation(actual: np.ndarray, wanted: np.ndarray, first: np.ndarray) -> float:
    way = float(np.abs(wanted - first).max())
    return float(np.abs(actual - wanted).max()) / (way or 1.0)
