"""Vectors of powers: the degrees of several scales at once."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["Powers"]


class Powers(float):
    """The powers of several scales: a number for its readers, their sum, that is added and compared scale by scale.

    Args:
        powers: the power of each scale other than 0, by the number of the scale.
    """

    def __new__(cls, powers: Mapping[int, float]) -> Powers:
        self = super().__new__(cls, sum(powers.values()))
        self._powers = dict(powers)
        return self

    _powers: dict[int, float]

    def __add__(self, other: float) -> float:
        return self._merge(other, 1)

    __radd__ = __add__

    def __sub__(self, other: float) -> float:
        return self._merge(other, -1)

    def __rsub__(self, other: float) -> float:
        return self * -1 + other

    def __mul__(self, factor: float) -> float:
        return _powers({scale: power * factor for scale, power in self._powers.items()})

    def __abs__(self) -> float:
        return sum(map(abs, self._powers.values()))

    def __bool__(self) -> bool:
        return True

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Powers) and self._powers == other._powers

    def __ne__(self, other: object) -> bool:  # float has its own
        return not self == other

    def __hash__(self) -> int:
        return hash(frozenset(self._powers.items()))

    def __repr__(self) -> str:
        return f"Powers({self._powers})"

    def along(self, scale: int) -> float | None:
        """Return the power of a scale; None if there are powers of others."""
        return self._powers.get(scale) if len(self._powers) == 1 else None

    def _merge(self, other: float, sign: int) -> float:
        assert isinstance(other, Powers) or other == 0
        merged = dict(self._powers)
        for scale, power in other._powers.items() if isinstance(other, Powers) else ():
            merged[scale] = merged.get(scale, 0) + sign * power
        return _powers(merged)


def _powers(powers: Mapping[int, float]) -> float:
    """Return a vector, or 0 for the empty one."""
    present = {scale: power for scale, power in powers.items() if power}
    return Powers(present) if present else 0
