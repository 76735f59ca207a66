"""Two tiers: the quick one, which runs by default, and the full one, or a share of it.

A test marked `full` runs in the full tier alone. The quick tier runs `size` cases of a test (or of each test of a
module) marked `sample(size)`, which together have many values of every parameter; the choice depends only on the names
of the cases, so that it is the same in each run.

`GRAPHSCALE_TEST_SHARE=2/6` cuts the cases of the full tier alone into six shares, test by test, and runs the second,
with as many values of every parameter as possible. A test with no more cases than shares, or marked `every_share`, is
in all of them; random cases cut their seeds instead (tests/random_cases.py).
"""

from __future__ import annotations

import hashlib
import os
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
    by_name = sorted(items, key=lambda item: hashlib.sha256(item.name.encode()).digest())
    left = [(item, _parameters(item)) for item in by_name]
    chosen: list[pytest.Item] = []
    seen: set[Hashable] = set()
    while left and len(chosen) < size:
        best = max(left, key=lambda case: len(case[1] - seen))
        left.remove(best)
        chosen.append(best[0])
        seen |= best[1]
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


def read_share() -> tuple[int, int]:
    """Read which share of how many GRAPHSCALE_TEST_SHARE asks for; all cases are one share."""
    text = os.environ.get("GRAPHSCALE_TEST_SHARE") or "1/1"
    number, _, count = text.partition("/")
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise pytest.UsageError(f"GRAPHSCALE_TEST_SHARE is {text}; give it as 2/6, the second of six")
    return int(number), int(count)


def _share(cases: list[pytest.Item], number: int, count: int) -> list[pytest.Item]:
    """Choose the cases of one share, from the cases that the shares before it left over."""
    if len(cases) <= count:
        return cases
    left = cases
    for share in range(number):
        chosen = _choose(left, -(-len(left) // (count - share)))
        others = {id(item) for item in chosen}
        left = [item for item in left if id(item) not in others]
    return chosen


def cases_of_other_shares(items: Iterable[pytest.Item], number: int, count: int) -> list[pytest.Item]:
    """Return the cases of the full tier that a share leaves out."""
    tests = defaultdict(list)
    for item in items:
        if hasattr(item, "callspec") and item.get_closest_marker("full"):
            if not any(map(item.get_closest_marker, ("skip", "every_share"))):
                tests[item.parent, item.originalname].append(item)  # type: ignore[attr-defined]
    others: list[pytest.Item] = []
    for cases in tests.values():
        kept = {id(item) for item in _share(cases, number, count)}
        others += [item for item in cases if id(item) not in kept]
    return others


def select_named_tests(config: pytest.Config) -> None:
    """Run a test that the command line names in whatever tier it is."""
    if config.option.markexpr == DEFAULT_SELECTION and any("::" in argument for argument in config.args):
        config.option.markexpr = ""
