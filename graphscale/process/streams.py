"""The standard streams of a command, which may be full, closed, or of any encoding."""

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
    """A standard stream of the process: what cannot be written is an error once, and dropped from then on.

    Args:
        number: its file descriptor.
        name: its name for messages; None to drop what cannot be written without an error.
    """

    def __init__(self, number: int, name: str | None) -> None:
        super().__init__(number, "w", closefd=False)
        self._name = name
        self._failed: OSError | None = None

    def write(self, data: Any) -> int:
        """Write bytes, and wait where the reader is slow.

        Raises:
            OutputError: they cannot be written.
            SystemExit: nobody reads them any more.
        """
        if self._failed is None:
            try:
                while (count := super().write(data)) is None:
                    select.select([], [self], [])
            except OSError as error:
                self._failed = error
                # In another thread, such as the one of a progress bar, nobody would catch an error.
                if threading.current_thread() is threading.main_thread():
                    self.check()
            else:
                return count
        return memoryview(data).nbytes

    def check(self) -> None:
        """Raise the errors of `write` if something could not be written."""
        if self._failed is None or self._name is None:
            return
        if isinstance(self._failed, BrokenPipeError):
            raise SystemExit(128 + signal.SIGPIPE)
        raise OutputError(f"cannot write to {self._name}: {self._failed.strerror}") from self._failed

    def end(self) -> None:
        """End the process by SIGPIPE if nobody reads the stream any more."""
        with contextlib.suppress(OutputError, SystemExit):
            sys.stdout.flush()
        if isinstance(self._failed, BrokenPipeError):
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)
            signal.raise_signal(signal.SIGPIPE)


def replace_streams() -> Output | None:
    """Let standard output and error be streams that write any character; return stdout, None on Windows."""
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
    """Open the standard descriptors that are closed, so that no other file gets their numbers, and what they are sent.

    A closed stdout stays one that cannot be written to.
    """
    for number, flags in enumerate((os.O_RDONLY, os.O_RDONLY, os.O_WRONLY)):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, flags)
