"""Limits for input files: folders of external data, nodes, nesting, unpacked bytes, time and memory of runs."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator
from pathlib import Path

__all__ = [
    "RUN_MEMORY",
    "RUN_SECONDS",
    "TRIAL_MEMORY",
    "TRIAL_SECONDS",
    "Limits",
    "current_limits",
    "limiting",
]

# The defaults of `max_seconds` and `max_memory`: of a command that runs models, and of the trial in `scale`. The memory
# of a command grows with the files of the models.
RUN_SECONDS, RUN_MEMORY = 300, 2**32
TRIAL_SECONDS, TRIAL_MEMORY = 5, 3 * 2**29


@dataclasses.dataclass(frozen=True)
class Limits:
    """The limits for input files.

    Attributes:
        external_data_root: a second folder for external data, beside the model's own.
        max_nodes: nodes of a model after inlining.
        max_depth: nested levels of bodies and functions; each level doubles the loading time of ONNX Runtime.
        max_bytes: unpacked bytes of a compressed file, a sixteenth where there are more than 64 for each packed one;
            the size of the file itself is always allowed.
        max_seconds: seconds of CPU time of the work that runs a model; None for the default of the work.
        max_memory: bytes of memory that this work may take beyond those taken before it; None for the same.
    """

    external_data_root: Path | None = None
    max_nodes: int = 1_000_000
    max_depth: int = 16
    max_bytes: int = 2**30
    max_seconds: int | None = None
    max_memory: int | None = None


_DEFAULT = Limits()
_current = contextvars.ContextVar[Limits]("_current")


def current_limits() -> Limits:
    """Return the limits of this thread."""
    return _current.get(_DEFAULT)


@contextlib.contextmanager
def limiting(limits: Limits) -> Iterator[None]:
    """Set other limits for this thread in a `with` block."""
    token = _current.set(limits)
    try:
        yield
    finally:
        _current.reset(token)
