"""Stages of long work, reported to a listener: the command line shows them; without a listener nothing happens."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator

__all__ = ["Listener", "listening", "report_stage"]

# A function of a stage, its parts that are done, and their number; 0 for one without parts.
Listener = Callable[[str, int, int], None]

_current = contextvars.ContextVar[Listener | None]("_current", default=None)


@contextlib.contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Call a listener for each stage that is reported in a `with` block, in this thread."""
    token = _current.set(listener)
    try:
        yield
    finally:
        _current.reset(token)


def report_stage(name: str, done: int = 0, total: int = 0) -> None:
    """Report that a stage of the work begins, or that `done` of its `total` parts are done."""
    if (listener := _current.get()) is not None:
        listener(name, done, total)
