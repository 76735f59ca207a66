"""Progress of long work on stderr: a bar in a terminal, elsewhere a line every ten seconds."""

from __future__ import annotations

import contextlib
import contextvars
import datetime
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console

from graphscale.errors import printable
from graphscale.process.stages import listening
from graphscale.process.streams import tell

__all__ = ["Display", "hide", "showing", "silence"]

_PATIENCE = 2.0  # seconds until a terminal shows a bar
_REFRESH = 0.1  # seconds between two pictures of it
_INTERVAL = 10.0  # seconds between two lines elsewhere


class Display:
    """A display of the last reported stage.

    It is shown from the first report on, and hidden before results are printed. The next report shows it again.

    Args:
        console: standard error.
        wait: waits for an event for some seconds at most, and returns whether it came.
        clock: gives seconds.
    """

    def __init__(
        self,
        console: Console,
        wait: Callable[[threading.Event, float], bool] = threading.Event.wait,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console, self._wait, self._clock, self._begin = console, wait, clock, clock()
        self._stage, self._done, self._total = "", 0, 0
        self._end: threading.Event | None = None
        self._thread = threading.Thread()
        self.is_silent = False

    def report(self, stage: str, done: int, total: int) -> None:
        """Report a stage, the number of its finished parts, and their total; 0 for a stage without parts."""
        self._stage, self._done, self._total = printable(stage), done, total
        if self._end is None and not self.is_silent:
            self._end = threading.Event()
            show = self._show_bar if self._console.is_terminal else self._show_lines
            self._thread = threading.Thread(target=show, args=(self._end,), name="progress", daemon=True)
            self._thread.start()

    def hide(self) -> None:
        """Hide it until the next report."""
        if self._end is not None:
            self._end.set()
            self._thread.join()
            self._end = None

    def _describe(self, left: str = "") -> str:
        parts = f", {self._done} of {self._total}" if self._total else ""
        return f"{self._clock() - self._begin:.0f} s{parts}{left}: {self._stage}"

    def _show_lines(self, end: threading.Event) -> None:
        while not self._wait(end, _INTERVAL):
            tell(self._describe())

    def _show_bar(self, end: threading.Event) -> None:
        if self._wait(end, max(0.0, self._begin + _PATIENCE - self._clock())):
            return
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn

        columns = (SpinnerColumn(), BarColumn(bar_width=18), TextColumn("{task.description}", markup=False))
        # Standard output may be a file: what is printed there must not be led to the terminal.
        options: dict[str, Any] = {"console": self._console, "transient": True, "redirect_stdout": False}
        with Progress(*columns, auto_refresh=False, **options) as progress:
            bar = progress.add_task("", total=None)
            (task,) = progress.tasks
            while True:
                if task.total != (self._total or None):
                    progress.reset(bar, total=self._total or None)
                left = task.time_remaining or 0
                more = f", {datetime.timedelta(seconds=int(left))} left" if left >= _INTERVAL else ""
                progress.update(bar, description=self._describe(more), completed=self._done)
                progress.refresh()
                if self._wait(end, _REFRESH):
                    return


_current = contextvars.ContextVar[Display | None]("_current", default=None)


@contextlib.contextmanager
def showing(display: Display) -> Iterator[None]:
    """Show the stages that are reported in a `with` block."""
    token = _current.set(display)
    try:
        with listening(display.report):
            yield
    finally:
        display.hide()
        _current.reset(token)


def hide() -> None:
    """Hide the display, if there is one, until the next report."""
    if (display := _current.get()) is not None:
        display.hide()


def silence() -> None:
    """Show no more progress, for a process with another one as its speaker."""
    if (display := _current.get()) is not None:
        display.hide()
        display.is_silent = True
