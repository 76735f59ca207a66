"""A process that opens bad models in ONNX Runtime, and may die.

ONNX Runtime checks its models, but not for all damage: crashes of the process are counted, and the next file gets a new
process.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import numpy as np

import graphscale as gs
from tests.fuzzing.holding import TooLongError, complaint, limited, summary


class Worker:
    """The other end; `crashes` are the commands at which ONNX Runtime took the process with it."""

    def __init__(self, log: Path) -> None:
        self.crashes: list[str] = []
        self._log = log
        self._begin()

    def _begin(self) -> None:
        self._log.write_text("")
        context = multiprocessing.get_context("spawn")
        self._pool = ProcessPoolExecutor(1, context, initializer=_log_crashes, initargs=(self._log,))

    def close(self) -> None:
        self._pool.shutdown()

    def run(self, arguments: Sequence[str], folder: Path) -> tuple[int | None, str | None]:
        """Run a command, or `session PATH`, in a folder: see `holding.complaint`, which runs in the process.

        Returns:
            the exit code, and what is wrong; (None, None) where ONNX Runtime crashed.
        """
        try:
            return self._pool.submit(_run, arguments, folder).result()
        except BrokenProcessPool:
            trace = self._log.read_text()
            self._begin()
            return None, self._blame(trace, " ".join(arguments))

    def _blame(self, trace: str, command: str) -> str | None:
        """Name the place of a process's death: None if in ONNX Runtime."""
        frames = [line.strip() for line in trace.splitlines() if line.strip().startswith("File ")]
        if frames and ("onnxruntime" in frames[0] or "onnxruntime" in trace.partition("Extension modules")[0][-400:]):
            self.crashes.append(f"{command}: {frames[0]}")
            return None
        return f"the process ended: {trace[-400:]}"


def _log_crashes(log: Path) -> None:
    faulthandler.enable(log.open("w"))


def _run(arguments: Sequence[str], folder: Path) -> tuple[int | None, str | None]:
    if arguments[0] == "session":
        return _session(folder / arguments[1])
    return complaint(arguments, folder, (0, 1, 2))


def _session(path: Path) -> tuple[int | None, str | None]:
    """Open a session on a model and take a step: 0 for a step, 2 for a refusal."""
    try:
        with limited(), gs.Session(path, state=_arrays(path, "state")) as session:
            session.step(_arrays(path, "feeds"))
    except gs.GraphscaleError as error:
        lines = str(error).splitlines()
        return 2, None if len(lines) == 1 else f"{len(lines)} lines: {error}"
    except (Exception, TooLongError) as error:
        return None, summary(error)
    return 0, None


def _arrays(path: Path, kind: str) -> dict[str, np.ndarray]:
    """Read the needs of the undamaged model: `state.npz` or `feeds.npz` beside it."""
    with np.load(path.with_name(f"{kind}.npz")) as stored:
        return dict(stored)
