"""Python's garbage collector, paused while graphs are built.

A graph is many thousand objects that all stay alive, and the collector would look through them again and again for
nothing: a quarter of the time of scaling a large graph.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

__all__ = ["paused_collector"]

_ENOUGH = 1_000_000  # objects
_handed_over: list[int] = []  # how many objects each time, since the last collection


@contextlib.contextmanager
def paused_collector(*, builds: bool = True) -> Iterator[None]:
    """Pause the garbage collector in a `with` block or, as a decorator, in a function.

    Args:
        builds: what is made in the block stays alive; else it is gone at its end.
    """
    was_enabled = gc.isenabled()
    if was_enabled and builds:
        _collect_earlier()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            if builds:
                _hand_over()
            gc.enable()


def _collect_earlier() -> None:
    """Collect what was handed over before and is garbage by now, when enough has come together."""
    if sum(_handed_over) > _ENOUGH:
        _handed_over.clear()
        gc.collect()


def _hand_over() -> None:
    """Let what was built go straight to the oldest generation: else the collector looks through all of it at once.

    There nothing would ask for its collection any more, once it is garbage: the next one who builds does.
    """
    if not gc.get_freeze_count():
        _handed_over.append(gc.get_count()[0])
        gc.freeze()
        gc.unfreeze()
