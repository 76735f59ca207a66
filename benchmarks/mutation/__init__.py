"""Kinds of damage to a scaled graph, and of harmless changes."""

from benchmarks.mutation import claims, harmless, inserted, interface, lowered, measured, operations, options, ranges
from benchmarks.mutation.kinds import KINDS, SAME, Kind

__all__ = [
    "KINDS",
    "SAME",
    "Kind",
    "claims",
    "harmless",
    "inserted",
    "interface",
    "lowered",
    "measured",
    "operations",
    "options",
    "ranges",
]
