"""Commands of graphscale in forked processes with limits, and the promise that each of them keeps.

The promise: a command ends within the limits of CPU time and memory, blocks on nothing, prints characters that a
terminal shows, and no traceback; a refusal is one line on stderr and exit code 2, and leaves every file unchanged.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import faulthandler
import gc
import hashlib
import importlib
import os
import re
import resource
import signal
import stat
import sys
import tempfile
import time
import traceback
import unicodedata
import warnings
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, NoReturn

from graphscale.cli import COMMANDS, main, make_command

CPU = 10  # seconds
MEMORY = 2**31  # bytes, beyond what this process has
_IDLE = 10  # seconds without any CPU time: the process waits for something
# Wide enough that no line is wrapped: a line break is one of the text.
_TERMINAL = {"COLUMNS": "20000", "NO_COLOR": "1", "OMP_NUM_THREADS": "1", "TERM": "dumb"}
_LARGE = 2**26  # bytes; of larger files the ends are compared
_CHECKS = ("verify", "lint", "diff", "inspect")  # these end with 1, too
_TRACES = re.compile(rb"Traceback \(most recent|Exception ignored|Fatal Python error|\w+Warning: ")
_PROGRESS = re.compile(rb"^graphscale: \d+ s(, \d+ of \d+)?: .*\n", re.MULTILINE)  # of slow machines
CODES = collections.Counter[int]()  # of all processes
_UNSHOWN = {"Cc", "Cf", "Cn", "Cs", "Co", "Zl", "Zp"}


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The end of a process.

    Attributes:
        code: its exit code; minus the number of the signal that ended it.
        out: the bytes on stdout.
        err: the bytes on stderr.
        blocked: it was ended because it waited for something.
        grown: the bytes of memory that it took beyond those of this process.
    """

    code: int
    out: bytes
    err: bytes
    blocked: bool = False
    grown: int = 0


def warm_up() -> None:
    """Import all that commands import, once for all forked processes."""
    for command in COMMANDS:
        make_command(command)
    for name in (
        *("pipeline", "stripping", "mixed_precision", "session", "checks.verification", "checks.linting"),
        *("checks.drawing", "checks.diffing.compare", "checks.derivatives.gradient_check", "training.run"),
        *("ort.fusing", "ort.artifacts.scale_folder", "ort.artifacts.strip_folder", "ort.artifacts.autocast_folder"),
        *("replicas", "graph.diagnosis", "checks.linting.sarif", "checks.verification.counterexample"),
    ):
        importlib.import_module(f"graphscale.{name}")
    for name in ("onnxruntime", "safetensors.numpy", "matplotlib.pyplot", "onnx.reference"):
        importlib.import_module(name)


def run(
    words: Sequence[str],
    folder: Path,
    prepare: Callable[[], None] | None = None,
    stdout: int | None = None,
    cpu: int = CPU,
) -> Outcome:
    """Run a command in a folder.

    Args:
        words: the command line, after the program's name.
        folder: the current folder of the process.
        prepare: is called in the process first.
        stdout: a descriptor in the place of its stdout.
        cpu: the seconds of CPU time that it may take.
    """
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        # Buffered text would be printed by both processes.
        sys.stdout.flush()
        sys.stderr.flush()
        # A fork has the memory of this process, without the files that this one maps.
        status = Path("/proc/self/status").read_text()
        held = int(status.partition("RssAnon:")[2].split()[0]) * 1024
        pid = os.fork()
        if not pid:
            _command(words, folder, prepare, (out.fileno() if stdout is None else stdout, err.fileno()), cpu)
        code, blocked, most = _wait(pid)
        texts = [(file.seek(0), file.read(_LARGE))[1] for file in (out, err)]
    CODES[code] += 1
    grown = most * 1024 - held
    return Outcome(code, *texts, blocked, grown)


def _command(
    words: Sequence[str], folder: Path, prepare: Callable[[], None] | None, streams: tuple[int, int], cpu: int
) -> NoReturn:
    code = 70
    # The threads of sessions of ONNX Runtime are not in a fork: to collect a session there would crash, joining them.
    gc.freeze()
    try:
        os.chdir(folder)
        for number, descriptor in enumerate(streams, 1):
            os.dup2(descriptor, number)
        sys.stdout = sys.__stdout__ = open(1, "w", closefd=False, encoding="utf-8")  # noqa: SIM115
        sys.stderr = sys.__stderr__ = open(2, "w", closefd=False, encoding="utf-8")  # noqa: SIM115
        sys.argv = ["graphscale", *words]
        os.environ.update(_TERMINAL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        faulthandler.disable()
        warnings.resetwarnings()
        for category in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
            warnings.simplefilter("ignore", category)
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
        resource.setrlimit(resource.RLIMIT_CPU, (cpu, cpu + 2))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if prepare is not None:
            prepare()
        main()
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _wait(pid: int) -> tuple[int, bool, int]:
    """Wait for a process, and end it if it waits for something; return its code, that, and its largest size."""
    blocked, last, since, pause = False, -1, time.monotonic(), 0.002
    while True:
        done, status, usage = os.wait4(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status), blocked, usage.ru_maxrss
        state, ticks = _usage(pid)
        if ticks != last or state == "R":
            last, since = ticks, time.monotonic()
        elif time.monotonic() - since > _IDLE:
            blocked = True
            os.kill(pid, signal.SIGKILL)
        time.sleep(pause)
        pause = min(2 * pause, 0.05)


def _usage(pid: int) -> tuple[str, int]:
    """Return the state of a process, and the CPU time of it and its children."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    states, ticks = [], 0
    for each in (str(pid), *children):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a child that has ended
            fields = Path(f"/proc/{each}/stat").read_text(errors="replace").rpartition(")")[2].split()
            states.append(fields[0])
            ticks += int(fields[11]) + int(fields[12])
    return "R" if "R" in states else states[0], ticks


def contents(folder: Path) -> dict[str, Any]:
    """Return what is below a folder: kinds, links, bytes."""
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        mode, name = path.lstat().st_mode, str(path.relative_to(folder))
        if stat.S_ISLNK(mode):
            found[name] = os.readlink(path)
        elif stat.S_ISREG(mode):
            found[name] = _digest(path)
        else:
            found[name] = stat.S_IFMT(mode)
    return found


def _digest(path: Path) -> tuple[int, str]:
    size = path.stat().st_size
    with path.open("rb") as file:
        return size, hashlib.sha256(file.read(_LARGE)).hexdigest()


def hold(
    words: Sequence[str],
    folder: Path,
    codes: Collection[int] | None = None,
    prepare: Callable[[], None] | None = None,
    more: Callable[[Outcome], str | None] = lambda _: None,
    cpu: int = CPU,
) -> str | None:
    """Run a command in a folder; return how it broke its promise, or None.

    Args:
        words: the command line.
        folder: the current folder; what is in it is compared after a refusal.
        codes: the exit codes that are right; None for 0, 2, and 1 where the command checks something.
        prepare: is called in the process first.
        more: finds what else is wrong with the outcome.
        cpu: the seconds of CPU time that it may take.
    """
    before = contents(folder)
    outcome = run(words, folder, prepare, cpu=cpu)
    fault = find_fault(words, outcome, codes) or more(outcome)
    if fault is None and outcome.code == 2 and (after := contents(folder)) != before:
        changed = sorted(name for name in {*before, *after} if before.get(name) != after.get(name))
        fault = f"refused, and yet written: {changed}"
    return None if fault is None else f"graphscale {' '.join(map(ascii, words))}: {fault}"


def find_fault(words: Sequence[str], outcome: Outcome, codes: Collection[int] | None = None) -> str | None:
    """Return how the streams and the exit code of a command break its promise, or None."""
    if codes is None:
        codes = (0, 1, 2) if words[:1] and words[0] in _CHECKS else (0, 2)
    err = ascii(outcome.err[-1500:].decode(errors="replace"))
    if outcome.blocked:
        return "it waits for something"
    if outcome.code == -signal.SIGXCPU:
        return "too much CPU time"
    if outcome.grown > MEMORY * 15 // 16:
        return f"{outcome.grown >> 20} MiB of memory"
    if _TRACES.search(outcome.err):
        return f"a trace: {err}"
    for name, text in (("stdout", outcome.out), ("stderr", outcome.err)):
        if (raw := find_unshown(text)) is not None:
            return f"raw characters on {name}: {raw}"
    if outcome.code not in codes:
        return f"exit code {outcome.code}: {err}"
    if outcome.code == 2:
        lines = _PROGRESS.sub(b"", outcome.err).split(b"\n")
        if len(lines) != 2 or lines[1] or not lines[0].startswith(b"graphscale: ") or len(lines[0]) < 20:
            return f"no single line on stderr: {err}"
        if len(lines[0]) > 10_000:
            return f"a line of {len(lines[0])} bytes"
        if outcome.out:
            return f"refused, and yet on stdout: {outcome.out[:100].decode(errors='replace')!a}"
    return None


def find_unshown(printed: bytes) -> str | None:
    """Return the first place of a text that a terminal does not show as characters, or None."""
    try:
        text = printed.decode()
    except UnicodeDecodeError as error:
        return f"{error}"
    for at, character in enumerate(text):
        if character != "\n" and unicodedata.category(character) in _UNSHOWN:
            return ascii(text[max(0, at - 40) : at + 10])
    return None
