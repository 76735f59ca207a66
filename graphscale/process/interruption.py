"""Ctrl-C in a command."""

from __future__ import annotations

import signal
import sys
import threading
from types import FrameType

__all__ = ["Interruption"]


class Interruption:
    """Ctrl-C in the process: the first one raises KeyboardInterrupt, the second one ends the process at once."""

    def __init__(self) -> None:
        self.received = False

    def watch(self) -> None:
        """Begin; a process that ignores Ctrl-C, such as a job in the background of a script, goes on to do so."""
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) in (
            signal.SIG_DFL,
            signal.default_int_handler,
        ):
            signal.signal(signal.SIGINT, self._note)
            sys.unraisablehook = self._end_lost

    def end(self) -> None:
        """Let Ctrl-C end the process from here on, which has nothing left to do."""
        if signal.getsignal(signal.SIGINT) == self._note:
            signal.signal(signal.SIGINT, signal.SIG_DFL)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = True
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        raise KeyboardInterrupt

    def _end_lost(self, lost: sys.UnraisableHookArgs) -> None:
        """End the process where a KeyboardInterrupt was raised in a finalizer, which nothing can catch."""
        if issubclass(lost.exc_type, KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        if not self.received:
            sys.__unraisablehook__(lost)
