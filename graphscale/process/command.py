"""A command from its first line to its exit code, and Ctrl-C in between."""

from __future__ import annotations

import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

from graphscale.errors import GraphscaleError, one_line
from graphscale.process.streams import Output, replace_streams, tell

__all__ = ["run"]


def run(command: Callable[[], int]) -> NoReturn:
    """Run a command, and exit with its return code.

    A GraphscaleError becomes one line on stderr and exit code 2, Ctrl-C exit code 130. When the reader of stdout is
    gone, the process ends by SIGPIPE, like others. Foreign streams and signals, as in tests, are unchanged.
    """
    output, interruption = None, Interruption()
    if sys.stdout is sys.__stdout__:
        output = replace_streams()
        interruption.watch()
        warnings.showwarning = lambda message, *_: tell(f"warning: {one_line(message)}")
    try:
        code = _find_code(command, output, interruption)
    except KeyboardInterrupt:
        code = 130
    if output is not None:
        interruption.end()
        output.end()
    sys.exit(code)


def _find_code(command: Callable[[], int], output: Output | None, interruption: Interruption) -> int:
    try:
        code = command()
        if output is not None:
            sys.stdout.flush()
            output.check()
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 0
    except Exception as error:
        if interruption.received:  # an import may have turned it into another error
            return 130
        if isinstance(error, GraphscaleError):
            tell(one_line(error))
            return 2
        if output is None:
            raise
        tell(traceback.format_exc().rstrip())
        return 1
    return code


class Interruption:
    """Ctrl-C in the process: the first one raises KeyboardInterrupt, the second one ends the process at once."""

    def __init__(self) -> None:
        self.received = False

    def watch(self) -> None:
        """Begin to watch; a process that ignores Ctrl-C, such as a background job of a script, still ignores it."""
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) in (
            signal.SIG_DFL,
            signal.default_int_handler,
        ):
            signal.signal(signal.SIGINT, self._note)
            sys.unraisablehook = self._end_lost

    def end(self) -> None:
        """Let Ctrl-C end the process from here on, since its work is done."""
        if signal.getsignal(signal.SIGINT) == self._note:
            signal.signal(signal.SIGINT, signal.SIG_DFL)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = True
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        raise KeyboardInterrupt

    def _end_lost(self, lost: sys.UnraisableHookArgs) -> None:
        """End the process after a KeyboardInterrupt in a finalizer, which cannot be caught."""
        if issubclass(lost.exc_type, KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        if not self.received:
            sys.__unraisablehook__(lost)
