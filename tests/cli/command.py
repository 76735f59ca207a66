"""Runs of the real command line."""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import onnx

from graphscale.cli import main

# A model that graphscale wrote earlier, and may replace.
EARLIER = onnx.ModelProto(metadata_props=[onnx.StringStringEntryProto(key="graphscale.version")]).SerializeToString()
TERMINAL = {"COLUMNS": "200", "NO_COLOR": "1"}


def drop_progress(stderr: str) -> str:
    """Return what a command printed on stderr without its progress, which is printed on slow machines alone."""
    return re.sub(r"^graphscale: \d+ s(, \d+ of \d+)?: .*\n", "", stderr, flags=re.MULTILINE)


def graphscale_process(*arguments: Any, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run `python -m graphscale` with these arguments in a folder, on a wide terminal without colours."""
    done = subprocess.run(
        [sys.executable, "-m", "graphscale", *map(str, arguments)],
        cwd=folder,
        env={**os.environ, **TERMINAL},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    done.stderr = drop_progress(done.stderr)
    return done


def graphscale(*arguments: Any, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run the same without a new process, which costs a second of CPU time (`test_process.py` compares the two)."""
    words = [str(argument) for argument in arguments]
    out, err = io.StringIO(), io.StringIO()
    with (
        contextlib.chdir(folder or Path.cwd()),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        mock.patch.dict(os.environ, TERMINAL),
        mock.patch.object(sys, "argv", ["graphscale", *words]),
        mock.patch.object(warnings, "showwarning", _show_warning),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("default")
        for category in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
            warnings.simplefilter("ignore", category)
        try:
            main()
            code = 0
        except SystemExit as stop:
            code = int(stop.code or 0)
    return subprocess.CompletedProcess(words, code, out.getvalue(), drop_progress(err.getvalue()))


def _show_warning(message: Warning | str, category: type[Warning], filename: str, lineno: int, *_: Any) -> None:
    sys.stderr.write(warnings.formatwarning(message, category, filename, lineno))


def succeed(folder: Path | None, *arguments: Any) -> str:
    """Run a command that must end well and without a warning; return what it prints."""
    done = graphscale(*arguments, folder=folder)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def refuse(folder: Path, *arguments: Any, words: Sequence[str] = ()) -> None:
    """Run a command that must fail: exit code 2, one line with all words on stderr, nothing printed or written."""
    before = contents(folder)
    done = graphscale(*arguments, folder=folder)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("graphscale: ")
    for word in words:
        assert word in line, line
    assert contents(folder) == before


def cell(output: str, row: str) -> str:
    """The second column of this row of a printed table."""
    found = re.search(rf"^\s*{re.escape(row)}\s*│ (.*?)\s*$", output, re.MULTILINE)
    assert found, f"the table has no row {row!r}:\n{output}"
    return found[1]


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder with its bytes, hidden ones included."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()
    }
