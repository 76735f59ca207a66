"""Runs of one framework's sides on a device in turns, and their conditions. Needs numpy alone.

A step does not wait for the device more than its side must: its loss stays there, but for the last one of each turn,
and the clock is read when the device has finished.
"""

from __future__ import annotations

import dataclasses
import gc
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from training_steps.sides import PLAIN
from training_steps.workloads import INCREMENT_PERIOD, INITIAL_LOSS_SCALE, Arrays, Workload

__all__ = ["COMPARED_STEPS", "FLOAT16", "DeviceBench", "DeviceSide", "Facts", "Ways", "next_state", "tolerance"]

FLOAT16 = "float16"  # the names of sides in float16 begin with it
COMPARED_STEPS = 5  # whose losses must agree; a skipped step is run again on the same batch
_MOST_SKIPPED = 20  # of the steps before that: a loss scale that is still too large then points to a defect
# Of the losses of those steps, relative to the float32 plain ones: in float16 numbers have 11 bits.
_LOSSES, _FLOAT16_LOSSES = 1e-3, 5e-3
# Of the weights after those steps, as the norm of what differs, relative to that of the way that a tensor has gone. A
# GPU adds up in any order, and Adam makes a whole step of a rounding error: single weights may differ altogether. In
# float16 without a loss scale gradients underflow, and weights may go anywhere.
_WEIGHTS, _FLOAT16_WEIGHTS = 2e-2, 0.2

State = tuple[float, int]


class DeviceSide(Protocol):
    """One way to run a training step."""

    def step(self, batch: Any, *, fetch: bool) -> float | None:
        """Run one step; return its loss if it is to be fetched, else None without waiting for it."""

    def weights(self) -> Arrays:
        """The present weights."""

    def loss_scale(self) -> State | None:
        """The loss scale and the count of good steps; None where there is none."""

    def close(self) -> None:
        """Free everything."""


@dataclasses.dataclass(frozen=True)
class Facts:
    """The work of a side's step beside computing. None: it cannot be had, or there is no such thing.

    Attributes:
        memcpy_nodes: Memcpy nodes in the graphs that ONNX Runtime executes.
        memcpy_in_branches: number of them in branches.
        host_nodes: the nodes that ran on the CPU in a step, `{operator: how many}`.
        inserted_on_host: number of them that graphscale inserted.
        copies: tensors that came to the host in a step.
        syncs: number of times in a step that the host waited for the device.
        memory: bytes of the device's memory that the side took.
        launches: CUDA kernels of the finite check in a step, by the graph that ONNX Runtime executes.
    """

    memcpy_nodes: int | None = None
    memcpy_in_branches: int | None = None
    host_nodes: dict[str, int] | None = None
    inserted_on_host: int | None = None
    copies: int | None = None
    syncs: int | None = None
    memory: int | None = None
    launches: int | None = None


@dataclasses.dataclass(frozen=True)
class Ways:
    """The steps of a framework for a workload.

    Attributes:
        makers: functions that make each side.
        batches: on the device, to be fed in turn.
        facts: finds the facts of sides.
        synchronize: waits for the device.
        unsupported: why the framework cannot run a side on this device; None where it can.
    """

    makers: Mapping[str, Callable[[], DeviceSide]]
    batches: list[Any]
    facts: Callable[[Sequence[str]], dict[str, Facts]]
    synchronize: Callable[[], None]
    unsupported: Callable[[str], str | None] = lambda side: None


class DeviceBench:
    """The sides of one framework.

    Args:
        ways: opens a workload.
        workloads: by name.
        only: the sides to run; the plain one always is.
    """

    def __init__(
        self, ways: Callable[[Workload], Ways], workloads: Mapping[str, Workload], only: tuple[str, ...]
    ) -> None:
        self._open, self._workloads, self._only = ways, workloads, only
        self._sides: dict[str, DeviceSide] = {}
        self._counts: dict[str, int] = {}

    def prepare(self, name: str) -> dict[str, Any]:
        """Make the sides of a workload.

        Returns:
            `facts`, those of each side as a dict, and `left_out`, `{side: why it cannot be run}`.
        """
        self._workload = self._workloads[name]
        self._ways = self._open(self._workload)
        wanted = [side for side in self._ways.makers if side == PLAIN or side in self._only]
        reasons = {side: self._ways.unsupported(side) for side in wanted}
        left_out = {side: reason for side, reason in reasons.items() if reason is not None}
        run = [side for side in wanted if side not in left_out]
        facts = {side: dataclasses.asdict(found) for side, found in self._ways.facts(run).items()}
        self._sides = {side: self._ways.makers[side]() for side in run}
        self._counts = dict.fromkeys(run, 0)
        return {"facts": facts, "left_out": left_out}

    def check(self) -> dict[str, Any]:
        """Run the first steps of all sides, which must do the same.

        Returns:
            for each side its `losses`, how many steps it `skipped`, and the `distance` of its weights from the plain
            ones, relative to the way that these have gone.

        Raises:
            ValueError: a loss or a weight differs too much, or a loss scale does not follow the rule.
        """
        first, found = self._workload.weights(), {}
        plain: Arrays = {}
        for name, side in self._sides.items():
            losses, skipped = self._first_steps(name, side)
            weights = side.weights()
            plain = plain or weights
            apart = max(_distance(weights[key], plain[key], first[key]) for key in first)
            if not apart <= self._farthest(name):
                raise ValueError(f"the weights of {name} are {apart:.1e} of their way from the plain ones")
            found[name] = {"losses": losses, "skipped": skipped, "distance": apart}
            wanted = found[PLAIN]["losses"]
            if not np.allclose(losses, wanted, rtol=tolerance(name), atol=0):
                raise ValueError(f"the losses of {name} are {losses}, the plain ones {wanted}")
        return found

    def run(self, name: str, steps: int) -> dict[str, Any]:
        """Run one side for a turn.

        Returns:
            `seconds` of a step, as a mean over so many; whether a step was `skipped`; and the last `loss`.
        """
        side, count = self._sides[name], self._counts[name]
        batches = [self._batch(count + number) for number in range(steps)]
        before = side.loss_scale()
        gc.collect()
        self._ways.synchronize()
        begin = time.perf_counter()
        for batch in batches[:-1]:
            side.step(batch, fetch=False)
        loss = side.step(batches[-1], fetch=True)
        self._ways.synchronize()
        seconds = (time.perf_counter() - begin) / steps
        self._counts[name] += steps
        for _ in range(steps):
            before = before and next_state(before, finite=True)
        return {"seconds": seconds, "skipped": side.loss_scale() != before, "loss": loss}

    def close(self) -> None:
        """Free the sides."""
        for side in self._sides.values():
            side.close()
        self._sides = {}
        gc.collect()

    def _farthest(self, name: str) -> float:
        """Return the largest distance of a side's weights from the plain ones."""
        if not name.startswith(FLOAT16):
            return _WEIGHTS
        return math.inf if self._sides[name].loss_scale() is None else _FLOAT16_WEIGHTS

    def _batch(self, number: int) -> Any:
        return self._ways.batches[number % len(self._ways.batches)]

    def _first_steps(self, name: str, side: DeviceSide) -> tuple[list[float], int]:
        """The losses of steps that were applied, and how many were not."""
        losses: list[float] = []
        skipped, state = 0, side.loss_scale()
        if state not in (None, (INITIAL_LOSS_SCALE, 0)):
            raise ValueError(f"{name} begins with the loss scale and count {state}")
        while len(losses) < COMPARED_STEPS:
            loss = side.step(self._batch(len(losses)), fetch=True)
            before, state = state, side.loss_scale()
            assert loss is not None
            if before is None or state == next_state(before, finite=True):
                losses.append(loss)
            elif state == next_state(before, finite=False) and skipped < _MOST_SKIPPED and name.startswith(FLOAT16):
                skipped += 1
            else:
                raise ValueError(f"{name}: after a step the loss scale and count {before} became {state}")
        self._counts[name] = COMPARED_STEPS
        return losses, skipped


def next_state(state: State, *, finite: bool) -> State:
    """The loss scale and the count of good steps after a step, by the rule."""
    scale, good = state
    if not finite:
        return max(scale / 2, 1.0), 0
    return (scale * 2, 0) if good + 1 >= INCREMENT_PERIOD else (scale, good + 1)


def tolerance(side: str) -> float:
    """Return the largest relative distance of a side's losses from others."""
    return _FLOAT16_LOSSES if side.startswith(FLOAT16) else _LOSSES


def _distance(actual: np.ndarray, wanted: np.ndarray, first: np.ndarray) -> float:
    way = float(np.linalg.norm(wanted - first))
    return float(np.linalg.norm(actual - wanted)) / (way or 1.0)
