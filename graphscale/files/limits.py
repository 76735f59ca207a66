"""What files may ask for: where the content of their tensors may lie, and how large they may become in memory."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator
from pathlib import Path

__all__ = ["Limits", "current_limits", "limiting"]


@dataclasses.dataclass(frozen=True)
class Limits:
    """The limits of what is read.

    Attributes:
        external_data_root: a folder where tensors of models may lie, beside the folders of the models themselves.
        max_nodes: the nodes of a model, after its functions are inlined.
        max_depth: the levels of bodies and functions in each other, with each of which ONNX Runtime's time doubles.
        max_bytes: the bytes of a compressed file after it is unpacked; a file may always take its own size.
    """

    external_data_root: Path | None = None
    max_nodes: int = 1_000_000
    max_depth: int = 16
    max_bytes: int = 2**30


_DEFAULT = Limits()
_current = contextvars.ContextVar[Limits]("_current")


def current_limits() -> Limits:
    """Return the limits that hold here."""
    return _current.get(_DEFAULT)


@contextlib.contextmanager
def limiting(limits: Limits) -> Iterator[None]:
    """Let other limits hold in a `with` block, for this thread."""
    token = _current.set(limits)
    try:
        yield
    finally:
        _current.reset(token)
