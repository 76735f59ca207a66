"""Runs of commands on bad files, with a check of their promise: success, or one clear line and no output file."""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import os
import random
import re
import resource
import shutil
import signal
import sys
import traceback
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from tests.cli.command import contents, graphscale

LIMIT = 10  # seconds of CPU time that a command may take
_HANGS = 900  # seconds, however busy the machine is
_MEMORY = 3 * 2**30  # bytes that it may take, beyond what the process has
_WARNING = re.compile(r"^\S+:\d+: \w*Warning: .*$", re.MULTILINE)
# A folder for the files on which something went wrong, with the commands.
KEEP = os.environ.get("GRAPHSCALE_FUZZ_KEEP")


@dataclasses.dataclass(frozen=True)
class Broken:
    """A promise that was broken.

    Attributes:
        what: the error and where it was raised, or what else is wrong; the same for files that show the same defect.
        where: the file and the command of a run.
    """

    what: str
    where: str


def choices_for(*name: Any) -> random.Random:
    """A source of choices that is the same in every run, and another one for every name."""
    return random.Random(zlib.crc32(repr(name).encode()))


class TooLongError(BaseException):
    """A command takes longer than it may; no handler of `Exception` stops it."""


@contextlib.contextmanager
def limited(seconds: int = LIMIT, memory: int = _MEMORY) -> Iterator[None]:
    """Interrupt what takes too much CPU time or memory, and end a process that hangs."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise TooLongError(f"more than {seconds} s of CPU time")

    before = signal.signal(signal.SIGPROF, stop)
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + memory, hard))
    signal.setitimer(signal.ITIMER_PROF, seconds)
    faulthandler.dump_traceback_later(_HANGS, exit=True, file=sys.__stderr__)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        faulthandler.cancel_dump_traceback_later()
        signal.signal(signal.SIGPROF, before)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def complaint(arguments: Sequence[Any], folder: Path, codes: Sequence[int] = (0, 2)) -> tuple[int | None, str | None]:
    """Run a command in a folder; return its exit code, and what is wrong with how it went, if anything is.

    Args:
        arguments: the command and its arguments.
        folder: its working folder; every file in it must be there and unchanged afterwards if the command fails.
        codes: the exit codes that it may end with.
    """
    before = contents(folder)
    try:
        with limited():
            done = graphscale(*arguments, folder=folder)
    except (Exception, TooLongError) as error:
        return None, summary(error)
    if warning := _WARNING.search(done.stderr):
        return done.returncode, warning[0]
    if done.returncode not in codes:
        return done.returncode, f"exit code {done.returncode}: {done.stderr[:200]}"
    if done.returncode == 2:
        lines = done.stderr.splitlines()
        if len(lines) != 1 or not lines[0].startswith("graphscale: ") or lines[0] == "graphscale: ":
            return 2, f"{len(lines)} lines on stderr: {done.stderr[:200]!r}"
        if done.stdout:
            return 2, f"refused, and yet on stdout: {done.stdout[:100]!r}"
        if contents(folder) != before:
            changed = sorted({name for name, _ in set(contents(folder).items()) ^ set(before.items())})
            return 2, f"refused, and yet written: {changed}"
    return done.returncode, None


def summary(error: BaseException) -> str:
    """An error, and the innermost line of graphscale and the innermost line of all that it went through."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if f"{os.sep}graphscale{os.sep}" in frame.filename]
    places = [f"{Path(f.filename).name}:{f.lineno} {f.name}" for f in (*own[-1:], *frames[-1:])]
    return f"{type(error).__name__} at {', '.join(dict.fromkeys(places))}: {' '.join(str(error).split())[:160]}"


def hold(
    arguments: Sequence[Any], folder: Path, where: str, codes: Sequence[int] = (0, 2)
) -> tuple[int | None, list[Broken]]:
    """As `complaint`, and keep the folder where something is wrong and files are to be kept."""
    code, what = complaint(arguments, folder, codes)
    if what is None:
        return code, []
    keep(folder, where, [*map(str, arguments)], what)
    return code, [Broken(what, where)]


def keep(folder: Path, where: str, arguments: Sequence[str], what: str) -> None:
    """Put a folder aside, with the command and what was wrong, if the user asks for that."""
    if KEEP is not None:
        target = Path(KEEP, where)
        shutil.copytree(folder, target, dirs_exist_ok=True)
        (target / "command.txt").write_text(f"graphscale {' '.join(arguments)}\n{what}\n")
