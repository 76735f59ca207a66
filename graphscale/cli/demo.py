"""graphscale demo: train a digit classifier from a scaled training step, with one overflow on the way."""

from __future__ import annotations

__all__ = ["demo"]


def demo() -> None:
    """Train a digit classifier from a scaled training step, with one overflow on the way."""
    raise NotImplementedError
