"""Python's garbage collector, paused while graphs are built.

A graph is many thousand objects that all stay alive, and the collector would look through them again and again for
nothing: a quarter of the time of scaling a large graph.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

__all__ = ["paused_collector"]


@contextlib.contextmanager
def paused_collector() -> Iterator[None]:
    """Pause the garbage collector in a `with` block or, as a decorator, in a function."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            if gc.get_freeze_count() == 0:
                # What was built goes straight to the oldest generation: else the first thing that the collector does is
                # to look through all of it.
                gc.freeze()
                gc.unfreeze()
            gc.enable()
