"""Claims known to be wrong: each must be seen to fail, so that a mended rule leaves this table."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from tests.operators.claims import ZERO
from tests.operators.scaling import Wrong

__all__ = ["KNOWN_WRONG", "find_unexpected"]


def _any(wrong: Wrong) -> bool:
    return bool(wrong.claimed)


def _of_zero(wrong: Wrong) -> bool:
    """Return whether an operand is known to be all zeros."""
    return ZERO in wrong.operands.values()


KNOWN_WRONG: dict[tuple[str, str], Callable[[Wrong], bool]] = {}


def find_unexpected(wrong: Iterable[Wrong]) -> list[str]:
    """Return what is said of the claims that are not known to be wrong."""
    return [str(one) for one in wrong if not KNOWN_WRONG.get(one.operator, lambda _: False)(one)]
