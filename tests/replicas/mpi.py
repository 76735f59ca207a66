"""Programs started with a real mpiexec, with more processes than cores if necessary."""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.conftest import ROOT

HAS_MPI = importlib.util.find_spec("mpi4py") is not None
needs_mpi = pytest.mark.skipif(not HAS_MPI, reason="needs mpi4py and mpiexec: pip install '.[mpi]'")

COMMAND = (sys.executable, "-m", "graphscale")
_LIMIT = 240  # seconds


def program(name: str, *arguments: str) -> tuple[str, ...]:
    return (sys.executable, "-m", f"tests.replicas.programs.{name}", *arguments)


@functools.cache
def launcher() -> tuple[str, ...]:
    """The mpiexec beside this Python, with what lets it start more processes than there are cores."""
    beside = Path(sys.executable).with_name("mpiexec")
    found = str(beside) if beside.exists() else shutil.which("mpiexec")
    assert found is not None, "mpi4py is installed, and mpiexec is not"
    told = subprocess.run([found, "--version"], capture_output=True, text=True, check=False, timeout=_LIMIT).stdout
    is_open_mpi = "open mpi" in told.lower() or "openrte" in told.lower() or "prte" in told.lower()
    return (found, "--oversubscribe", "--allow-run-as-root") if is_open_mpi else (found,)


def start(count: int, *parts: Sequence[str], cwd: Path | None = None) -> subprocess.Popen[str]:
    """Start processes that run a command; `parts` are the commands of the first ones if they differ."""
    command = [*launcher()]
    commands = parts if len(parts) > 1 else [parts[0]]
    for i, part in enumerate(commands):
        processes = count if len(commands) == 1 else 1
        command += [*([":"] if i else []), "-n", str(processes), *part]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    return subprocess.Popen(
        command,
        cwd=ROOT if cwd is None else cwd,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def mpiexec(count: int, *parts: Sequence[str], cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command in so many processes, to its end."""
    process = start(count, *parts, cwd=cwd)
    try:
        out, err = process.communicate(timeout=_LIMIT)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        raise AssertionError(f"it hangs: {out}\n{err}") from None
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def wait_until(condition: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it does not come"
        time.sleep(0.05)
