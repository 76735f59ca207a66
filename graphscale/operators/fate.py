"""The survival of infinities and NaN: the numbers that a result may hold where an operand holds one of them.

An overflow is harmless as long as every number that depends on it is non-finite, so that the finite check fails, or is
the number that it would be without the overflow. A result may also leave the number out, as Slice does. The claims
hold for the kernels of ONNX Runtime and for the reference evaluator of ONNX.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

__all__ = ["KINDS", "LOST", "Fate", "Survival"]


class Fate(enum.Flag):
    """A possible effect of a number that is not finite on a result."""

    NONE = 0
    PLUS = enum.auto()  # an element is infinity
    MINUS = enum.auto()  # an element is minus infinity
    NAN = enum.auto()  # an element is NaN
    GONE = enum.auto()  # no element is one of these: the number is left out, or lost
    BENT = enum.auto()  # a finite element depends on the number
    TOLD = enum.auto()  # a flag or an index depends on the number


KINDS = Fate.PLUS | Fate.MINUS | Fate.NAN
_LOST = Fate.GONE | Fate.BENT


class Survival(NamedTuple):
    """The possible effects of a single infinity, minus infinity or NaN in an operand, whatever the other operands."""

    plus: Fate
    minus: Fate
    nan: Fate

    def through(self, kinds: Fate) -> Fate:
        """Return the possible effects of some kinds of numbers."""
        fate = Fate.NONE
        if Fate.PLUS in kinds:
            fate |= self.plus
        if Fate.MINUS in kinds:
            fate |= self.minus
        return fate | self.nan if Fate.NAN in kinds else fate

    @property
    def bends(self) -> bool:
        """True if a finite element may depend on some kind of number."""
        return any(Fate.BENT in fate for fate in self)

    @property
    def shows(self) -> bool:
        """True if an element of the result is not finite, whatever the kind of number."""
        return all(fate & KINDS and Fate.GONE not in fate for fate in self)

    def with_fate(self, fate: Fate) -> Survival:
        """Return the survival with a further possible effect of each kind."""
        return Survival(self.plus | fate, self.minus | fate, self.nan | fate)


# Anything may become of a lost number.
LOST = Survival(_LOST, _LOST, _LOST)
UNREAD = Survival(Fate.GONE, Fate.GONE, Fate.GONE)
KEPT = Survival(Fate.PLUS, Fate.MINUS, Fate.NAN)
NEGATED = Survival(Fate.MINUS, Fate.PLUS, Fate.NAN)
SIZE = Survival(Fate.PLUS, Fate.PLUS, Fate.NAN)
UNDEFINED = Survival(Fate.NAN, Fate.NAN, Fate.NAN)
# Terms of a sum: infinity minus infinity is NaN. Factors: so is infinity times zero.
SUMMED = KEPT.with_fate(Fate.NAN)
SUBTRACTED = NEGATED.with_fate(Fate.NAN)
MULTIPLIED = Survival(KINDS, KINDS, Fate.NAN)
TESTED = Survival(Fate.TOLD, Fate.TOLD, Fate.TOLD)
# Bounds on both sides, or on one; kernels of Max, Min and pooling may return another number in place of NaN.
BOUNDED = Survival(_LOST, _LOST, Fate.NAN)
BOUNDED_BELOW = Survival(Fate.PLUS, _LOST, Fate.NAN)
GREATEST = Survival(Fate.PLUS | Fate.NAN, _LOST, _LOST)
LEAST = Survival(_LOST, Fate.MINUS | Fate.NAN, _LOST)
# An element that may be left out.
PICKED = KEPT.with_fate(Fate.GONE)
WEIGHTED = MULTIPLIED.with_fate(Fate.GONE)
