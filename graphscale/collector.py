"""A pause of Python's garbage collector while graphs are built.

A graph is many thousand objects that all stay alive. The collector would scan them again and again in vain, for a
quarter of the time of scaling a large graph.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

__all__ = ["paused_collector"]

_ENOUGH = 1_000_000  # objects
_handed_over: list[int] = []  # number of new objects that starts a collection


@contextlib.contextmanager
def paused_collector(*, builds: bool = True) -> Iterator[None]:
    """Pause the garbage collector in a `with` block or, as a decorator, in a function.

    Args:
        builds: the objects made in the block stay alive; else they are garbage at its end.
    """
    was_enabled = gc.isenabled()
    # Objects frozen before may be garbage by now, and nothing else collects them.
    if was_enabled and builds and sum(_handed_over) > _ENOUGH:
        _handed_over.clear()
        gc.collect()
    gc.disable()
    try:
        yield
    finally:
        # New objects go straight to the oldest generation: else the collector scans all of them at once.
        if was_enabled and builds and not gc.get_freeze_count():
            _handed_over.append(gc.get_count()[0])
            gc.freeze()
            gc.unfreeze()
        if was_enabled:
            gc.enable()
