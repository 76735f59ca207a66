"""The standard streams of a command: full, closed, or of any encoding."""

from __future__ import annotations

import contextlib
import io
import os
import select
import signal
import sys
import threading
from typing import Any, TextIO

from graphscale.errors import OutputError, printable

__all__ = ["Output", "open_descriptors", "replace_streams", "tell"]


def tell(message: str) -> None:
    """Print a message on stderr."""
    print("graphscale:", "\n".join(map(printable, message.split("\n"))), file=sys.stderr, flush=True)


class Output(io.FileIO):
    """A standard stream of the process: the first failing write is an error, and later texts are dropped.

    Args:
        number: its file descriptor.
        name: its name for messages; None to drop texts after a failing write without an error.
    """

    def __init__(self, number: int, name: str | None) -> None:
        super().__init__(number, "w", closefd=False)
        self._name = name
        self._failed: OSError | None = None

    def write(self, data: Any) -> int:
        """Write bytes, and wait for a slow reader.

        Raises:
            OutputError: the bytes cannot be written. SystemExit: the reader is gone.
        """
        if self._failed is None:
            try:
                while (count := super().write(data)) is None:
                    select.select([], [self], [])
            except OSError as error:
                self._failed = error
                # In another thread, such as that of a progress bar, no code would catch an error.
                if threading.current_thread() is threading.main_thread():
                    self.check()
            else:
                return count
        return memoryview(data).nbytes

    def check(self) -> None:
        """Raise the error of `write` if a write has failed."""
        if self._failed is None or self._name is None:
            return
        if isinstance(self._failed, BrokenPipeError):
            raise SystemExit(128 + signal.SIGPIPE)
        raise OutputError(f"cannot write to {self._name}: {self._failed.strerror}") from self._failed

    def end(self) -> None:
        """End the process by SIGPIPE if the stream's reader is gone."""
        with contextlib.suppress(OutputError, SystemExit):
            sys.stdout.flush()
        if isinstance(self._failed, BrokenPipeError):
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)
            signal.raise_signal(signal.SIGPIPE)


def replace_streams() -> Output | None:
    """Replace standard output and error by streams that write all characters; return stdout, None on Windows."""
    open_descriptors()
    if os.name == "nt":
        return None
    output = Output(1, "standard output")
    sys.stdout = _wrap(output, sys.stdout)
    sys.stderr = _wrap(Output(2, None), sys.stderr)
    return output


def _wrap(output: Output, before: TextIO | None) -> io.TextIOWrapper:
    encoding = "utf-8" if before is None else before.encoding
    return io.TextIOWrapper(
        io.BufferedWriter(output),
        encoding=encoding,
        errors="backslashreplace",
        line_buffering=output.isatty() or output.fileno() == 2,
    )


def open_descriptors() -> None:
    """Open closed standard descriptors, so that no other file gets their numbers, and their texts.

    Writes to a closed stdout still fail.
    """
    for number, flags in enumerate((os.O_RDONLY, os.O_RDONLY, os.O_WRONLY)):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, flags)
