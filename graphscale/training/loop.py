"""The training loop: one record for each step, checkpoints at fixed intervals, metrics cut to them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from graphscale.errors import SessionError
from graphscale.policy.names import ScaledValue
from graphscale.session import GradientRange, Session
from graphscale.training.checkpoints import Checkpoints, Position
from graphscale.training.data import Arrays, Batches
from graphscale.training.metrics import MetricsFile
from graphscale.training.record import StepRecord
from graphscale.training.schedules import LearningRate
from graphscale.training.tensorboard import TensorBoard

__all__ = ["Trainer"]


class Trainer:
    """The training of a scaled step. The same arguments give the same run, bit for bit, resumed or not.

    Args:
        session: the session of the scaled step.
        batches: the batches, `batches[number]` from 0, and `per_epoch` of them in an epoch.
        learning_rate: a function of the number of applied steps, for `rate_input`; None without such an input.
        rate_input: the name of the learning rate's input, a scalar or of the shape [1].
        feeds: `{input name: array}`, constant feeds of every step.
        position: the position of a resumed run, whose state is already in the session.
        metrics: the file of all records, which stays open.
        tensorboard: event files of all records, which stay open, too.
        checkpoints: the folder of checkpoints; None for none.
        every: steps between checkpoints.

    Attributes:
        steps: the number of steps so far, those before a resume included.
        applied: the number of applied steps.
        checkpoint: the newest checkpoint of this trainer.
    """

    def __init__(
        self,
        session: Session,
        batches: Batches,
        learning_rate: LearningRate | None = None,
        rate_input: str = "learning_rate",
        feeds: Arrays | None = None,
        *,
        position: Position | None = None,
        metrics: MetricsFile | None = None,
        tensorboard: TensorBoard | None = None,
        checkpoints: Checkpoints | None = None,
        every: int | None = None,
    ) -> None:
        start = position or Position()
        self.session, self.batches, self.learning_rate = session, batches, learning_rate
        self.steps, self.applied = start.steps, start.applied
        self._rate = (rate_input, session.inputs[rate_input]) if learning_rate else None
        self._feeds = dict(feeds or {})
        self._metrics, self._tensorboard = metrics, tensorboard
        self._checkpoints, self._every = checkpoints, every
        self.checkpoint: Path | None = None
        self._scale = session.loss_scale
        self._fetch: list[str] | None = None
        self._measures_every = session.stamp.telemetry.get(ScaledValue.RANGES, {}).get("every")
        self._looks_forward = "activations" in session.stamp.telemetry
        self._ends_stuck = session.stamp.policy.get("config", {}).get("on_stuck") in ("flag", "stop")

    def run(self, total: int, stop: Callable[[], bool] = lambda: False) -> Iterator[StepRecord]:
        """Train up to `total` steps, those before a resume included.

        Each record is yielded when the step is in the metrics and, at an interval's end, in a checkpoint. The last step
        always has a checkpoint. A stuck loss scale (`record.stuck`), or a true result of `stop()` after a step, makes
        that step the last one.

        Raises:
            SessionError: a step cannot run, or a checkpoint cannot be written.
            OutputError: the metrics cannot be written.
        """
        while self.steps < total:
            record = self._step()
            for log in (self._metrics, self._tensorboard):
                if log is not None:
                    log.write(record)
            last = self.steps == total or record.stuck or stop()
            if last or (self._every and self.steps % self._every == 0):
                self.save()
            yield record
            if last:
                return

    def save(self) -> None:
        """Write a checkpoint of the present step, after all logs up to it are on the disk.

        Raises:
            SessionError, OutputError: as `run`.
        """
        size = self._metrics.sync() if self._metrics else None
        if self._tensorboard:
            self._tensorboard.sync()
        if self._checkpoints is not None:
            self.checkpoint = self._checkpoints.save(self.session, Position(self.steps, self.applied, size))

    def _step(self) -> StepRecord:
        number, scale = self.steps, self._scale
        rate = None if self.learning_rate is None else self.learning_rate(self.applied)
        feeds = {**self._feeds, **self.batches[number]}
        if self._rate is not None:
            name, spec = self._rate
            feeds[name] = np.full([1] * len(spec.shape), rate, dtype=spec.dtype)
        try:
            result = self.session.step(feeds, fetch=self._fetch)
        except SessionError as error:
            raise SessionError(f"step {number + 1} of the run: {error}") from error
        loss = self.session.stamp.names[ScaledValue.LOSS]
        scalars = self._scalars(result)
        self._fetch = [loss, *scalars]
        self._scale = self.session.loss_scale
        self.steps += 1
        self.applied += result.applied
        return StepRecord(
            step=self.steps,
            epoch=number // self.batches.per_epoch + 1,
            loss=float(np.asarray(result[loss]).item()),
            loss_scale=scale,
            next_loss_scale=self._scale,
            applied=bool(result.applied),
            good_steps=self.session.good_steps,
            learning_rate=rate,
            cause=result.cause,
            offender=result.offender,
            zero_fraction=result.zero_fraction,
            activation=(result.activation or "") if self._looks_forward else None,
            ranges=self._ranges(),
            stuck=self._ends_stuck and result.stuck,
            outputs=scalars,
        )

    def _ranges(self) -> Mapping[str, GradientRange] | None:
        """Return the ranges measured in the last step, empty for none; None for a step without ranges."""
        if self._measures_every is None:
            return None
        is_due = (self.session.counters[ScaledValue.STEPS] - 1) % self._measures_every == 0
        return self.session.ranges if is_due else {}

    def _scalars(self, result: Mapping[str, Any]) -> dict[str, float]:
        """Return the outputs that are single numbers, without those in the record's own columns."""
        own = set(self.session.stamp.names.values())
        arrays = {name: np.asarray(value) for name, value in result.items() if name not in own}
        numbers = {name: a for name, a in arrays.items() if a.shape in ((), (1,)) and a.dtype.kind in "fiu"}
        return {name: float(array.item()) for name, array in numbers.items()}
