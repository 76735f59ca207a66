"""Damaged scaled graphs, chosen by digests of names, and what verify and lint find in them."""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import graphscale as gs
from benchmarks.edits.generator import edit
from benchmarks.edits.subjects import Subject, subjects
from benchmarks.mutants import MEASURED, Mutant, judge, mutants
from benchmarks.mutation import KINDS, SAME, Kind
from benchmarks.mutation.scalings import MODELS, TARGETS, Scaled
from tests.frozen.stored import Row, read_table

__all__ = ["edit_keys", "edit_row", "mutant_keys", "mutant_row"]

_KINDS = {kind.name: kind for kind in (*KINDS, *SAME)}
_EDITS = 300
_LARGEST = 10_000  # bytes of a graph to be edited
_scaled = functools.cache(Scaled)


def mutant_keys() -> list[str]:
    """Return a key for each mutant: its kind, with a number; two for each kind of damage, one for a harmless change."""
    return [f"{kind.name} {number}" for kind in KINDS for number in (1, 2)] + [f"{kind.name} 1" for kind in SAME]


def mutant_row(key: str) -> Row:
    """Return the verdicts on a mutant; nothing but a word where a kind has fewer sites.

    The graph of the committed row is tried first.
    """
    name, _, number = key.rpartition(" ")
    kind, known = _KINDS[name], read_table("mutants").get(key, {}).get("mutant")
    tried = mutants(*([part] for part in known.partition(":")[0].split(", ", 1)), [kind], find=_scaled) if known else ()
    found = next(iter(tried), None) or next(itertools.islice(_mutants_of(kind), int(number) - 1, None), None)
    if found is None:
        return {"mutant": None}
    mutant, original = found
    verdict = judge(mutant, original, runs=0)
    related = _or_error(lambda: gs.verify(original, mutant.damaged, runs=0, exact=False, **mutant.hints).ok)
    return {
        "mutant": f"{mutant.model}, {mutant.target}: {mutant.site}",
        "harmless": mutant.harmless is not None,
        "accepted": verdict.accepted,
        "related": related,
        "by": list(verdict.by),
        "check": "" if verdict.why.startswith("lint") or "refused" in verdict.by else verdict.why.partition(":")[0],
    }


def _mutants_of(kind: Kind) -> Iterator[tuple[Mutant, Any]]:
    """Yield a mutant of a kind for each of the small graphs, or for one of the others where these have no site."""
    turn, some = _number(kind.name) % len(TARGETS), False
    for name in sorted(MODELS, key=lambda name: (name not in MEASURED, _number(kind.name, name))):
        if some and name not in MEASURED:
            return
        for found in mutants([name], [*TARGETS[turn:], *TARGETS[:turn]], [kind], find=_scaled):
            some = True
            yield found
        turn = (turn + 1) % len(TARGETS)


def _number(*names: str) -> int:
    return int.from_bytes(hashlib.sha256("\0".join(names).encode()).digest()[:8], "big")


def edit_keys() -> list[str]:
    """Return a key for each random edit: its graph, setting and number."""
    return [f"{index:03} {subject}" for index, subject in enumerate(_chosen())]


def edit_row(key: str) -> Row:
    """Return the verdicts on a random edit."""
    index = int(key[:3])
    subject = _chosen()[index]
    if not subject.is_possible:
        return {"kinds": None}
    edited = edit(subject.scaled, np.random.default_rng([1, index]))
    verdict = _or_error(lambda: "accepted" if subject.verified(edited.model) else "rejected")
    codes = _or_error(lambda: sorted({finding.code for finding in gs.lint(edited.model).findings}))
    return {"kinds": edited.kinds, "places": edited.places, "verify": verdict, "lint": codes}


def _or_error(ask: Callable[[], Any]) -> Any:
    """Return an answer, or the class of an error; "raised" marks one that is no GraphscaleError."""
    try:
        return ask()
    except gs.GraphscaleError as error:
        return type(error).__name__
    except Exception as error:
        return f"raised {type(error).__name__}"


@functools.cache
def _chosen() -> list[Subject]:
    """Return a graph with its setting for each edit: small graphs, each setting as often as all others."""
    small = sorted(filter(_is_small, subjects()), key=lambda subject: _number(str(subject)))
    return [small[index % len(small)] for index in range(_EDITS)]


def _is_small(subject: Subject) -> bool:
    """Return whether a graph is small, and no step in a body, which scale refuses."""
    return len(subject._content) <= _LARGEST and "/steps-in-" not in subject.name
