"""A process that opens bad models in ONNX Runtime, and may die of it; and the other end of it.

ONNX Runtime checks its models, but not all of what a damaged one may hold: where it takes the process with it, that is
counted, and the next file gets a new process.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from tests.conftest import ROOT

__all__ = ["Worker"]

_HANGS = 900  # seconds, however busy the machine is


class Worker:
    """The other end.

    Attributes:
        crashes: the commands at which ONNX Runtime took the process with it.
    """

    def __init__(self) -> None:
        self.crashes: list[str] = []
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end()

    def run(self, arguments: Sequence[Any], folder: Path) -> tuple[int | None, str | None]:
        """Run a command, or `session PATH`, in a folder: see `holding.complaint`, which runs in the process.

        Returns:
            the exit code, and what is wrong; (None, None) where ONNX Runtime crashed.
        """
        if self._process is None:
            self._begin()
        assert self._process is not None and self._process.stdin is not None
        words = [str(argument) for argument in arguments]
        self._process.stdin.write(json.dumps({"arguments": words, "folder": str(folder)}) + "\n")
        self._process.stdin.flush()
        answer = self._answer()
        if answer is not None:
            return answer["code"], answer["what"]
        self._process.kill()
        code = self._process.wait()
        self._log.seek(0)
        trace = self._log.read()
        self._end()
        return None, self._blame(code, trace, " ".join(words))

    def _blame(self, code: int, trace: str, command: str) -> str | None:
        """Where the process died: None if in ONNX Runtime."""
        frames = [line.strip() for line in trace.splitlines() if line.strip().startswith("File ")]
        if frames and ("onnxruntime" in frames[0] or "onnxruntime" in trace.partition("Extension modules")[0][-400:]):
            self.crashes.append(f"{command}: {frames[0]}")
            return None
        return f"the process ended with {code}: {trace[-400:]}"

    def _begin(self) -> None:
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed with the process
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.fuzzing.worker"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._listen, args=(self._process, self._lines), daemon=True).start()
        assert self._answer() == {"ready": True}

    @staticmethod
    def _listen(process: subprocess.Popen[str], lines: queue.Queue[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.put(line)
        lines.put("")

    def _answer(self) -> Any:
        """The next answer; None if the process ended, or hangs."""
        with contextlib.suppress(queue.Empty):
            line = self._lines.get(timeout=_HANGS)
            return json.loads(line) if line else None
        return None

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._log.close()
            self._process = None


def main() -> None:
    """Answer commands until there are no more."""
    from tests.fuzzing.holding import complaint

    faulthandler.enable()
    answers = sys.stdout
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        arguments, folder = asked["arguments"], Path(asked["folder"])
        if arguments[0] == "session":
            code, what = _session(folder / arguments[1])
        else:
            code, what = complaint(arguments, folder, (0, 1, 2))
        print(json.dumps({"code": code, "what": what}), file=answers, flush=True)


def _session(path: Path) -> tuple[int | None, str | None]:
    """Open a session on a model and take a step: 0 for a step, 2 for a refusal."""
    import graphscale as gs
    from tests.fuzzing.holding import TooLongError, limited, summary

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
    """What the undamaged model needs: `state.npz` or `feeds.npz` beside it."""
    with np.load(path.with_name(f"{kind}.npz")) as stored:
        return dict(stored)


if __name__ == "__main__":
    main()
