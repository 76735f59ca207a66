"""Limits of CPU time and memory: for a call in a child process, and for a part of a command."""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from graphscale.errors import one_line
from graphscale.process.streams import tell

__all__ = ["ChildError", "call_in_child", "is_out_of_memory", "watching"]

_PATIENCE = 10  # seconds of waiting for each second of CPU time: the machine may be busy


# The messages of ONNX Runtime where memory is short.
_OUT_OF_MEMORY = ("bad_alloc", "bad allocation", "Failed to allocate memory")


def is_out_of_memory(error: object) -> bool:
    """Return whether an error of a runtime says that memory is short."""
    return any(text in str(error) for text in _OUT_OF_MEMORY)


class ChildError(Exception):
    """A call in a child process gave no result; the text is the reason."""


def call_in_child(function: str, *arguments: Any, seconds: int, memory: int) -> Any:
    """Call a function in a fork of this process, which shares its memory, so that no argument is copied.

    Args:
        function: `module:name`, imported in the child alone.
        arguments: the arguments.
        seconds: the CPU time of the child.
        memory: the bytes that the child may take beyond those of this process.

    Returns:
        the result, a value of JSON.

    Raises:
        ChildError: the child ended without a result, or this system has no such limits.
    """
    if not hasattr(os, "fork"):
        raise ChildError("this system has no processes with limits of time and memory")
    source, sink = os.pipe()
    with warnings.catch_warnings():
        # Python warns of other threads, whose locks stay taken in the child: a child that waits for one is ended.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if not pid:
        _answer(sink, function, arguments, seconds, memory)
    os.close(sink)
    try:
        content = _read(source, time.monotonic() + _PATIENCE * seconds)
    finally:
        os.close(source)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if content.endswith(b"\n"):
        found = json.loads(content)
        if "result" in found:
            return found["result"]
        raise ChildError(found["error"])
    if content is _LATE:
        raise ChildError(f"it does not end within {_PATIENCE * seconds} s (--max-seconds)")
    if code == -signal.SIGXCPU:
        raise ChildError(f"it takes more than {seconds} s of CPU time (--max-seconds)")
    raise ChildError(f"its process was ended by signal {-code}" if code < 0 else f"its process ended with code {code}")


_LATE = b"late"
_LATER = 2  # seconds after which the system ends a process that does not end itself


def _read(source: int, end: float) -> bytes:
    """Read the answer of a child up to its end, or up to a time."""
    content = bytearray()
    while select.select([source], [], [], max(0.0, end - time.monotonic()))[0]:
        if not (part := os.read(source, 2**16)):
            return bytes(content)
        content += part
    return _LATE


def _answer(sink: int, function: str, arguments: tuple[Any, ...], seconds: int, memory: int) -> NoReturn:
    """Call the function, write its result as a line of JSON, and end this process."""
    code = 1
    gc.freeze()  # a session of the caller has its threads in that process alone: to collect it here would crash
    try:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        nowhere = os.open(os.devnull, os.O_RDWR)
        for number in range(3):  # libraries print on descriptors
            os.dup2(nowhere, number)
        sys.stdout = sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
        _limit(seconds, memory)
        module, _, name = function.partition(":")
        try:
            found = {"result": getattr(importlib.import_module(module), name)(*arguments)}
        except MemoryError:
            found = {"error": f"it takes more than {memory} bytes of memory (--max-memory)"}
        except Exception as error:  # a defect, which must not hide behind a missing answer
            found = {"error": f"{type(error).__name__}: {one_line(error)}"}
        content = json.dumps(found).encode() + b"\n"
        while content:
            content = content[os.write(sink, content) :]
        code = 0
    finally:
        os._exit(code)


def _limit(seconds: int, memory: int) -> None:
    import resource  # Windows has none

    present, size = resource.getrlimit(resource.RLIMIT_AS), _present_size() + memory
    resource.setrlimit(resource.RLIMIT_AS, (_lower(present[0], size), _lower(present[1], size)))
    most = _lower(resource.getrlimit(resource.RLIMIT_CPU)[1], seconds + 1)
    resource.setrlimit(resource.RLIMIT_CPU, (min(seconds, most), most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _lower(limit: int, other: int) -> int:
    """Return the lower one of two limits of a resource, which -1 leaves without one."""
    return other if limit < 0 else min(limit, other)


def _present_size() -> int:
    """Return the bytes of address space of this process, as far as the system tells them."""
    with contextlib.suppress(OSError):  # only Linux does
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * os.sysconf("SC_PAGE_SIZE")
    return 2**40


@contextlib.contextmanager
def watching(seconds: int, memory: int | None) -> Iterator[None]:
    """End this process, that of a command, by one line and exit code 2 if a `with` block takes more CPU time.

    A runtime does not return for a signal while it computes.

    Args:
        seconds: the CPU time of the block.
        memory: the bytes that the block may take beyond those of the process; None for any number.
    """
    done, end = threading.Event(), time.process_time() + seconds

    def watch() -> None:
        while not done.wait(0.1):
            if time.process_time() > end:
                tell(f"the model takes more than {seconds} s of CPU time to run (--max-seconds)")
                os._exit(2)

    threading.Thread(target=watch, daemon=True).start()
    try:
        with contextlib.nullcontext() if os.name == "nt" else _limited(seconds + _LATER, memory):
            yield
    finally:
        done.set()


@contextlib.contextmanager
def _limited(seconds: int, memory: int | None) -> Iterator[None]:
    """Set limits of this process: the system ends one whose runtime lets no other thread of Python run."""
    import resource

    limits = {resource.RLIMIT_CPU: int(time.process_time()) + seconds}
    limits |= {} if memory is None else {resource.RLIMIT_AS: _present_size() + memory}
    before = {kind: resource.getrlimit(kind) for kind in limits}
    for kind, (soft, hard) in before.items():
        resource.setrlimit(kind, (_lower(soft, limits[kind]), hard))
    try:
        yield
    finally:
        for kind, pair in before.items():
            resource.setrlimit(kind, pair)
