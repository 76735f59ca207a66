"""TensorBoard event files, through tensorboardX."""

from __future__ import annotations

import functools
import os
import time
from pathlib import Path
from typing import Any

from graphscale.errors import OutputError, TrainingError, reporting
from graphscale.process.extras import install_command
from graphscale.training.record import StepRecord

__all__ = ["TensorBoard", "check_logdir"]

_FLUSH_EVERY = 5.0  # seconds: the largest delay in a running TensorBoard


def check_logdir(folder: str | os.PathLike[str]) -> None:
    """Check that event files can be written to a folder, existing or not, without writing.

    Raises:
        TrainingError: tensorboardX is not installed.
        OutputError: the folder cannot exist.
    """
    try:
        import tensorboardX  # noqa: F401
    except ImportError as error:
        raise TrainingError(
            f"--logdir needs tensorboardX, which cannot be imported here ({error}); install it: "
            f"{install_command('tensorboard')}"
        ) from error
    path = Path(folder).absolute()
    existing = next(parent for parent in (path, *path.parents) if parent.exists())
    if not existing.is_dir():
        raise OutputError(f"--logdir {folder}: {existing} is a file, not a folder")


class TensorBoard:
    """The event file of a run: a scalar for each number of a step's record.

    tensorboardX's SummaryWriter writes in a thread: a full disk ends the thread silently, which then blocks the
    training. So its inner writer is used directly.

    Args:
        folder: the folder of event files, created if missing.
        resume_after: the last step to keep: events of later steps are purged. None for a new run.

    Raises:
        TrainingError, OutputError: as `check_logdir`; every method raises an OutputError if it cannot write.
    """

    def __init__(self, folder: str | os.PathLike[str], resume_after: int | None = None) -> None:
        check_logdir(folder)
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import SessionLog

        self._reported = functools.partial(reporting, OutputError, f"cannot write to --logdir {folder}")
        with self._reported():
            os.makedirs(folder, exist_ok=True)
            # File names have the time in seconds; a quickly resumed run must not replace its first part.
            suffix = f".{os.getpid()}.{resume_after or 0}"
            self._writer: Any = EventsWriter(os.path.join(folder, "events"), suffix)
            if resume_after is not None:
                self._add(step=resume_after + 1, file_version="brain.Event:2")
                self._add(step=resume_after + 1, session_log=SessionLog(status=SessionLog.START))
        self.sync()

    def write(self, record: StepRecord) -> None:
        """Log the numbers of one step."""
        from tensorboardX.proto.summary_pb2 import Summary

        numbers = record.to_row()
        for gradient, measured in (record.ranges or {}).items():
            numbers |= {f"{kind}/{gradient}": number for kind, number in measured._asdict().items()}
        values = [
            Summary.Value(tag=name, simple_value=float(value))
            for name, value in numbers.items()
            if name not in ("step", "epoch") and isinstance(value, bool | int | float)
        ]
        with self._reported():
            self._add(step=record.step, summary=Summary(value=values))
        if time.monotonic() - self._flushed > _FLUSH_EVERY:
            self.sync()

    def sync(self) -> None:
        """Flush the buffer to the file."""
        with self._reported():
            self._writer.flush()
        self._flushed = time.monotonic()

    def close(self) -> None:
        """Flush the buffer, and close the file."""
        with self._reported():
            self._writer.close()

    def _add(self, **fields: Any) -> None:
        from tensorboardX.proto.event_pb2 import Event

        self._writer.write_event(Event(wall_time=time.time(), **fields))
