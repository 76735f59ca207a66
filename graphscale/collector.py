"""Python's garbage collector, paused while graphs are built.

A graph is many thousand objects that all stay alive, and the collector would look through them again and again for
nothing: a quarter of the time of scaling a large graph.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

__all__ = ["paused_collector"]

_ENOUGH = 2_000_000  # objects
_handed_over: list[int] = []  # how many objects each time, since the last collection


@contextlib.contextmanager
def paused_collector() -> Iterator[None]:
    """Pause the garbage collector in a `with` block or, as a decorator, in a function."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            _hand_over()
            gc.enable()


def _hand_over() -> None:
    """Let what was built go straight to the oldest generation: else the collector looks through all of it at once.

    There nothing would ask for its collection any more, once it is garbage: it is collected when enough has come
    together.
    """
    if gc.get_freeze_count():
        return
    _handed_over.append(gc.get_count()[0])
    if sum(_handed_over) > _ENOUGH:
        _handed_over.clear()
        gc.collect()
    else:
        gc.freeze()
        gc.unfreeze()
