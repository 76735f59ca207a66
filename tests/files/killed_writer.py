"""Save a model again and again over an old one, each time killed one step later, and print what a reader finds then.

    python killed_writer.py FOLDER

FOLDER holds `old` and `new`, a folder each, with step.onnx and its weights. A step changes a file or a name: a file is
opened to be written, bytes are copied or reach the disk, a name is given, taken or removed.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from graphscale.files import model_files, saving

WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
NAMES = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.chmod", "os.link", "os.symlink", "os.truncate"}


class Steps:
    """Calls `step` before each step of this process: from audit events, and from functions of `os` without one."""

    functions: tuple[str, ...] = ("fsync", "fdatasync", "copy_file_range")

    def step(self) -> None:
        raise NotImplementedError

    def install(self) -> None:
        for name in self.functions:
            if hasattr(os, name):
                setattr(os, name, self._counting(getattr(os, name)))
        sys.addaudithook(self._hook)

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        opened = event == "open" and isinstance(arguments[0], str) and isinstance(arguments[2], int)
        if event in NAMES or (opened and arguments[2] & WRITING):
            self.step()

    def _counting(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **options: Any) -> Any:
            self.step()
            return function(*arguments, **options)

        return counted


class Killer(Steps):
    """Kills this process before one of its steps."""

    def __init__(self, last: int) -> None:
        self._steps, self._last = 0, last

    def step(self) -> None:
        self._steps += 1
        if self._steps == self._last:
            os.kill(os.getpid(), signal.SIGKILL)


def save(source: Path, target: Path, step: int) -> bool:
    """Save in a child that is killed before a step; return whether it got through."""
    child = os.fork()
    if not child:
        model = model_files.load(source)
        Killer(step).install()
        saving.save(model, target)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    assert status in (0, signal.SIGKILL), "the writer failed"
    return status == 0


def read(path: Path) -> str:
    """Return the name of the graph in a file, if its weights are those of that graph; else what is wrong."""
    try:
        graph = model_files.load(path).graph
        numbers = {float(x) for v in graph.initializers.values() for x in np.unique(v.const_value.numpy())}
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return str(graph.name) if numbers == {float(len(graph.name or ""))} else f"{graph.name} with {numbers}"


def main() -> None:
    folder = Path(sys.argv[1])
    found: list[tuple[str, list[str]]] = []
    done = False
    while not done:
        out = folder / "out"
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(folder / "old", out)
        done = save(folder / "new" / "step.onnx", out / "step.onnx", len(found) + 1)
        state = read(out / "step.onnx")
        # Leftovers do not hinder the next writer.
        assert save(folder / "new" / "step.onnx", out / "step.onnx", 0)
        assert read(out / "step.onnx") == "another"
        found.append((state, sorted(path.name for path in out.iterdir() if not path.name.startswith("."))))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
