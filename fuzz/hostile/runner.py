"""Runs cases of a category, counts them, and collects the faults."""

from __future__ import annotations

import collections
import dataclasses
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from fuzz.hostile import bench, processes

# Puts hostile files into an empty folder, runs a command on them, and returns how it broke its promise, or None.
Kind = Callable[[Path, random.Random], str | None]


@dataclasses.dataclass(frozen=True)
class Category:
    """A category of hostile files.

    Attributes:
        name: its name on the command line.
        promise: the promise that is checked, in a few words.
        kinds: the generators of its cases, by name; they take turns.
    """

    name: str
    promise: str
    kinds: Mapping[str, Kind]

    def kind_of(self, number: int) -> str:
        """Return the kind of a case, by its number."""
        return [*self.kinds][number % len(self.kinds)]


@dataclasses.dataclass
class Tally:
    """The counts of a run, and the faults by the number of their case."""

    tries: int = 0
    seconds: float = 0.0
    by_kind: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    faults: dict[int, str] = dataclasses.field(default_factory=dict)


def try_case(category: Category, seed: int, number: int) -> str | None:
    """Try one case, which is the same each time."""
    choices = random.Random(f"{category.name} {seed} {number}")
    with tempfile.TemporaryDirectory(prefix="graphscale-hostile-") as folder:
        try:
            return category.kinds[category.kind_of(number)](Path(folder), choices)
        except Exception as error:
            error.add_note(f"case {number} of {category.name}, seed {seed}")
            raise


def try_many(
    category: Category, seed: int, tries: int | None = None, seconds: float | None = None, first: int = 0
) -> Iterator[Tally]:
    """Try cases, so many or for so long; yield the tally after each."""
    processes.warm_up()
    bench.make_bench()
    tally, begin = Tally(), time.monotonic()
    while (tries is None or tally.tries < tries) and (seconds is None or tally.seconds < seconds):
        number = first + tally.tries
        fault = try_case(category, seed, number)
        tally.tries += 1
        tally.by_kind[category.kind_of(number)] += 1
        tally.seconds = time.monotonic() - begin
        if fault is not None:
            tally.faults[number] = fault
        yield tally
