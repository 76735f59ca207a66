"""The register of the kinds of damage.

A site is given by name, so that each mutant starts from a fresh copy of the scaled graph.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from benchmarks.mutation.damaged import Damaged

__all__ = ["KINDS", "SAME", "Kind", "kind", "same"]


@dataclasses.dataclass(frozen=True)
class Kind:
    """One kind of damage, or of a change that is none.

    Attributes:
        name: its name.
        sites: gives the names of the places where it applies.
        damage: damages a copy at one of them.
        scaling: the options that the graph is scaled with, a key of `scalings.SCALINGS`.
        harmless: says why damage at this site changes nothing that anybody could notice; None if it does.
        accepted: whether verify is to accept what is harmless.
    """

    name: str
    sites: Callable[[Damaged], Iterator[str]]
    damage: Callable[[Damaged, str], None]
    scaling: str = "plain"
    harmless: Callable[[Damaged, str], str | None] = lambda damaged, site: None
    accepted: bool = False


KINDS: list[Kind] = []  # damage
SAME: list[Kind] = []  # changes that are none
_Damage = Callable[[Damaged, str], None]


def kind(
    name: str,
    sites: Callable[[Damaged], Iterator[str]],
    scaling: str = "plain",
    harmless: Callable[[Damaged, str], str | None] = lambda damaged, site: None,
) -> Callable[[_Damage], _Damage]:
    """Register a kind of damage."""

    def register(damage: _Damage) -> _Damage:
        KINDS.append(Kind(name, sites, damage, scaling, harmless))
        return damage

    return register


def same(
    name: str, sites: Callable[[Damaged], Iterator[str]], reason: str, accepted: bool = True
) -> Callable[[_Damage], _Damage]:
    """Register a kind of change without an effect."""

    def register(damage: _Damage) -> _Damage:
        SAME.append(Kind(name, sites, damage, "plain", lambda damaged, site: reason, accepted))
        return damage

    return register
