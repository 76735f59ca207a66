"""Two speeds: the quick tier, which runs unless something else is asked for, and the full one.

A test marked `full` runs in the full tier alone. Of the cases of a test (or of each test of a module) marked
`sample(size)` the quick tier runs `size`, chosen so that they have many values of every parameter between them; the
choice follows from the names of the cases, so that it is the same in each run.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence

import pytest

# As in pyproject.toml.
DEFAULT_SELECTION = "not full"


def _parameters(item: pytest.Item) -> set[Hashable]:
    """Return the parameters of a case, each with the identity of its value."""
    # The cases share the values. `callspec.indices` numbers values in one release of pytest, cases in another.
    return {(name, id(value)) for name, value in item.callspec.params.items()}  # type: ignore[attr-defined]


def _choose(items: Sequence[pytest.Item], size: int) -> list[pytest.Item]:
    """Choose cases one after the other, each with as many values of parameters as possible that no other has yet."""
    left = sorted(items, key=lambda item: hashlib.sha256(item.name.encode()).digest())
    chosen: list[pytest.Item] = []
    seen: set[Hashable] = set()
    while left and len(chosen) < size:
        best = max(left, key=lambda item: len(_parameters(item) - seen))
        left.remove(best)
        chosen.append(best)
        seen |= _parameters(best)
    return chosen


def mark_tiers(items: Iterable[pytest.Item]) -> None:
    """Mark as `full` the cases of sampled tests that the quick tier leaves out."""
    sampled = defaultdict(list)
    for item in items:
        marker = item.get_closest_marker("sample")
        if marker and hasattr(item, "callspec") and not any(map(item.get_closest_marker, ("skip", "full"))):
            sampled[item.parent, item.originalname, marker.args].append(item)  # type: ignore[attr-defined]
    for (_, _, (size,)), cases in sampled.items():
        chosen = {id(item) for item in _choose(cases, size)}
        for item in cases:
            if id(item) not in chosen:
                item.add_marker(pytest.mark.full)


def select_named_tests(config: pytest.Config) -> None:
    """Run a test that the command line names in whatever tier it is."""
    if config.option.markexpr == DEFAULT_SELECTION and any("::" in argument for argument in config.args):
        config.option.markexpr = ""
