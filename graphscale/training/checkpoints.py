"""Checkpoints of a run: one state file each, with the position and the settings of the run."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from graphscale.errors import GraphscaleError, OutputError, TrainingError, one_line, reporting
from graphscale.files.external_data import leaves_folder
from graphscale.session import Session
from graphscale.training.data import Arrays, load_arrays

__all__ = ["Checkpoints", "Position"]

_NAME = re.compile(r"step-(\d{8,})\.safetensors")
_TEMPORARY = ".graphscale-*.tmp"  # a partial checkpoint of a killed process
_LOCK = ".lock"
_KEY = "graphscale.train"
_HASH = "sha256:"
_SHOWN = 200  # characters of a value

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Position:
    """The position of a run.

    Attributes:
        steps: the number of steps so far, skipped ones included, which is the number of the next batch.
        applied: the number of applied steps, on which the learning rate depends.
        metrics_bytes: the size of the metrics file; None for a run without metrics.
    """

    steps: int = 0
    applied: int = 0
    metrics_bytes: int | None = None

    @classmethod
    def read(cls, noted: Mapping[str, Any]) -> Position:
        """Return the position in a checkpoint.

        Raises:
            KeyError, TypeError: a field is missing or unknown.
        """
        return cls(**{field.name: noted[field.name] for field in dataclasses.fields(cls)} | dict(noted))

    def find_fault(self, path: Path) -> str | None:
        """Return the reason why the position does not fit a checkpoint's name, or None."""
        for name, value in vars(self).items():
            if type(value) is not int and (name, value) != ("metrics_bytes", None):
                return f"its {name} is {_shown(value)}; it must be a whole number"
            if value is not None and not 0 <= value < 2**63:
                return f"its {name} is {_shown(value)}; it must be from 0 to 2**63 - 1"
        if self.applied > self.steps:
            return f"it has {self.applied} applied steps of {self.steps}"
        if path.name != self.file_name:
            return f"it is of step {self.steps}, whose checkpoint is {self.file_name}; rename it to that"
        return None

    @property
    def file_name(self) -> str:
        """The name of the position's checkpoint."""
        return f"step-{self.steps:08d}.safetensors"


class Checkpoints:
    """The checkpoints of one run in one folder, `step-00001234.safetensors` and so on.

    Args:
        folder: the folder of the checkpoints; the run creates a missing one.
        keep: the number of newest checkpoints to keep.

    Attributes:
        settings: the settings that define the run, `{user's name: JSON value}`. Messages do not show a value that
            begins with "sha256:".

    Raises:
        OutputError: the folder cannot exist. TrainingError: `keep` is below 1.
    """

    def __init__(self, folder: str | os.PathLike[str], keep: int = 3) -> None:
        self.folder = Path(folder)
        self.settings: Mapping[str, Any] = {}
        self._keep = keep
        self._seen: list[Path] | None = None
        if keep < 1:
            raise TrainingError(f"--keep-checkpoints {keep}: expected 1 or more")
        existing = next(path for path in (self.folder.absolute(), *self.folder.absolute().parents) if path.exists())
        if not existing.is_dir():
            raise OutputError(f"--checkpoint-dir {folder}: {existing} is a file, not a folder")

    def all(self) -> list[Path]:
        """Every checkpoint, the oldest first."""
        found = self._list()
        self._seen = found if self._seen is None else self._seen
        return found

    def _list(self) -> list[Path]:
        with reporting(TrainingError, f"cannot read {self.folder}"), suppress(FileNotFoundError):
            names = [path for path in self.folder.iterdir() if _NAME.fullmatch(path.name)]
            return sorted(names, key=lambda path: (len(path.name), path.name))
        return []

    def refuse_existing(self) -> None:
        """Check that a new run replaces no checkpoint.

        Raises:
            TrainingError: the folder has a checkpoint.
        """
        if paths := self.all():
            raise TrainingError(
                f"{self.folder} holds checkpoints of a run already, the newest {paths[-1].name}; continue it with "
                "--resume, or name another folder"
            )

    def newest_state(self) -> Arrays:
        """Read the arrays of the newest checkpoint; none without a checkpoint.

        Raises:
            TrainingError: the checkpoint is damaged.
        """
        return self._newest(load_arrays) or {}

    def resume(self, session: Session) -> Position | None:
        """Load the state of the newest checkpoint into a session.

        Returns:
            the position of the run; None without a checkpoint.

        Raises:
            TrainingError: the checkpoint is damaged, of another step, not from `graphscale train`, or of a run with
                other settings, which the message names.
        """
        extra = self._newest(session.load_state)
        if extra is None:
            return None
        path = self.all()[-1]
        try:
            noted = json.loads(extra[_KEY])
            position, settings = Position.read(noted["position"]), dict(noted["settings"].items())
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
            raise TrainingError(f"cannot resume from {path}: graphscale train has not written it") from error
        if (fault := position.find_fault(path)) is not None:
            raise TrainingError(f"cannot resume from {path}: {fault}")
        if differing := list(_differences(settings, json.loads(json.dumps(self.settings)))):
            raise TrainingError(
                f"cannot resume from {path}, the run would be another: {'; '.join(differing)}. Give what it had, or "
                "begin a new run from its weights with --state and another --checkpoint-dir"
            )
        return position

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Create the folder, lock it against other runs, and remove the files of killed processes.

        Raises:
            OutputError: the folder cannot be made.
            TrainingError: another run is writing there, or has done so since this run listed the checkpoints.
        """
        with ExitStack() as stack:
            with reporting(OutputError, f"cannot write to {self.folder}"):
                self.folder.mkdir(parents=True, exist_ok=True)
                lock = self.folder / _LOCK
                if lock.is_symlink() or (lock.exists() and not lock.is_file()):  # a pipe would wait
                    raise OutputError(f"cannot write to {self.folder}: {lock} is no regular file; remove it")
                self._lock(stack.enter_context(lock.open("a")).fileno())
                self._refuse_newer()
                for path in self.folder.glob(_TEMPORARY):
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
            yield

    def save(self, session: Session, position: Position) -> Path:
        """Write a checkpoint, atomically and through to the disk, and remove the oldest ones.

        Raises:
            SessionError, OutputError: the checkpoint cannot be written, and the existing ones remain; or an old one
                cannot be removed.
        """
        path = self.folder / position.file_name
        noted = {"position": dataclasses.asdict(position), "settings": self.settings}
        session.save_state(path, extra={_KEY: json.dumps(noted)})
        for old in self.all()[: -self._keep]:
            self._remove(old)
        return path

    def _remove(self, path: Path) -> None:
        with reporting(OutputError, f"cannot remove {path}"):
            path.unlink()

    def _refuse_newer(self) -> None:
        """Check that no other run has written checkpoints between the listing and the lock."""
        if self._seen is not None and self._list() != self._seen:
            raise TrainingError(
                f"another run has written checkpoints to {self.folder} while this one started; start it again"
            )

    def _newest(self, read: Callable[[Path], T]) -> T | None:
        paths = self.all()
        if not paths:
            return None
        if leaves_folder(paths[-1], self.folder):
            raise TrainingError(f"cannot resume from {paths[-1]}: it leads out of its folder; copy the file there")
        try:
            return read(paths[-1])
        except GraphscaleError as error:
            other = f"; if you remove it, the run resumes from {paths[-2].name}" if len(paths) > 1 else ""
            raise TrainingError(f"cannot resume from {paths[-1]}: {error}{other}") from error

    def _lock(self, descriptor: int) -> None:
        try:
            import fcntl
        except ImportError:  # not on Windows, where other processes cannot replace an open file anyway
            return
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise TrainingError(f"another run is writing its checkpoints to {self.folder}; wait for its end") from error


def _differences(before: Mapping[str, Any], here: Mapping[str, Any]) -> Iterator[str]:
    for name in {**before, **here}:
        old, new = before.get(name), here.get(name)
        if old != new:
            hidden = any(isinstance(value, str) and value.startswith(_HASH) for value in (old, new))
            old, new = ("not given" if value is None else value for value in (old, new))
            yield f"{_shown(name)} is another" if hidden else f"{_shown(name)} was {_shown(old)}, is {_shown(new)}"


def _shown(value: Any) -> str:
    text = f"a {type(value).__name__}" if isinstance(value, list | dict) else one_line(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
