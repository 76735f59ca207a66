"""Running the real command line."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from graphscale.cli import main

__all__ = ["contents", "graphscale", "graphscale_in_process"]


def graphscale(*arguments: Any, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run `python -m graphscale` with these arguments in a folder, on a wide terminal without colours."""
    return subprocess.run(
        [sys.executable, "-m", "graphscale", *map(str, arguments)],
        cwd=folder,
        env={**os.environ, "COLUMNS": "200", "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def graphscale_in_process(*arguments: Any, folder: Path) -> subprocess.CompletedProcess[str]:
    """The same without a new process, which costs half a second: for tables of many small cases."""
    words = [str(argument) for argument in arguments]
    out, err, argv = io.StringIO(), io.StringIO(), sys.argv
    with contextlib.chdir(folder), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        sys.argv = ["graphscale", *words]
        try:
            main()
            code = 0
        except SystemExit as stop:
            code = int(stop.code or 0)
        finally:
            sys.argv = argv
    return subprocess.CompletedProcess(words, code, out.getvalue(), err.getvalue())


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder with its bytes, hidden ones included."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()
    }
