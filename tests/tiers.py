"""Two tiers: the quick one, which runs by default, and the full one, or a share of it.

A test marked `full` runs in the full tier alone. The quick tier runs `size` cases of a test (or of each test of a
module) marked `sample(size)`, which together have many values of every parameter; the choice depends only on the names
of the cases, so that it is the same in each run.

Of a test marked `cover(times)` only some cases of the product of its parameters are tests: enough that each value of
each parameter is in as many of them as `times`, with as many pairs of values as these can have.

`GRAPHSCALE_TEST_SHARE=2/6` cuts the cases of the full tier alone into six shares, test by test, and runs the second,
with as many values of every parameter as possible; the tests with no more cases than shares are cut together. A test
marked `every_share` is in all of them; random cases cut their seeds instead (tests/random_cases.py).
"""

from __future__ import annotations

import hashlib
import itertools
import os
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator

import pytest

# As in pyproject.toml.
DEFAULT_SELECTION = "not full"


def _parameters(item: pytest.Item) -> set[Hashable]:
    """Return the parameters of a case, each with the identity of its value."""
    # The cases share the values. `callspec.indices` numbers values in one release of pytest, cases in another.
    return {(name, id(value)) for name, value in item.callspec.params.items()}  # type: ignore[attr-defined]


def _in_order(items: Iterable[pytest.Item]) -> list[tuple[pytest.Item, set[Hashable]]]:
    """Return cases with their parameters, in an order that depends on their names alone."""
    return [(item, _parameters(item)) for item in sorted(items, key=_digest)]


def _digest(item: pytest.Item) -> bytes:
    return hashlib.sha256(item.name.encode()).digest()


def _choose(items: Iterable[pytest.Item], size: int) -> list[pytest.Item]:
    """Choose cases one after the other, each with as many values of parameters as possible that no other has yet."""
    left = _in_order(items)
    chosen: list[pytest.Item] = []
    seen: set[Hashable] = set()
    while left and len(chosen) < size:
        best = max(left, key=lambda case: len(case[1] - seen))
        left.remove(best)
        chosen.append(best[0])
        seen |= best[1]
    return chosen


def cases_beside_the_cover(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """Return the cases of tests marked `cover` that are left out."""
    others: list[pytest.Item] = []
    for cases, (times,) in _cases_of(items, "cover", "skip"):
        left = [(item, values, set(itertools.combinations(sorted(values), 2))) for item, values in _in_order(cases)]
        seen: Counter[Hashable] = Counter()
        pairs: set[Hashable] = set()
        while left:
            needs = [sum(seen[value] < times for value in values) for _, values, _ in left]
            others += [item for (item, _, _), need in zip(left, needs, strict=True) if not need]
            most = [case for case, need in zip(left, needs, strict=True) if need == max(needs) > 0]
            left = [case for case, need in zip(left, needs, strict=True) if need]
            if most:
                chosen = max(most, key=lambda case: len(case[2] - pairs))
                left.remove(chosen)
                seen.update(chosen[1])
                pairs |= chosen[2]
    return others


def _cases_of(
    items: Iterable[pytest.Item], name: str, *without: str
) -> Iterator[tuple[list[pytest.Item], tuple[int, ...]]]:
    """Yield the cases of each test with this marker, and its arguments, but for cases with other markers."""
    tests = defaultdict(list)
    for item in items:
        marker = item.get_closest_marker(name)
        if marker and hasattr(item, "callspec") and not any(map(item.get_closest_marker, without)):
            tests[item.parent, item.originalname, marker.args].append(item)  # type: ignore[attr-defined]
    for (_, _, arguments), cases in tests.items():
        yield cases, arguments


def mark_tiers(items: Iterable[pytest.Item]) -> None:
    """Mark as `full` the cases of sampled tests that the quick tier leaves out."""
    for cases, (size,) in _cases_of(items, "sample", "skip", "full"):
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
        if item.get_closest_marker("full") and not any(map(item.get_closest_marker, ("skip", "every_share"))):
            tests[item.parent, getattr(item, "originalname", item.name)].append(item)
    small = (case for cases in tests.values() if len(cases) <= count for case in cases)
    others = [item for at, item in enumerate(sorted(small, key=_digest)) if at % count != number - 1]
    for cases in tests.values():
        if len(cases) > count:
            kept = {id(item) for item in _share(cases, number, count)}
            others += [item for item in cases if id(item) not in kept]
    return others


def select_named_tests(config: pytest.Config) -> None:
    """Run a test that the command line names in whatever tier it is."""
    if config.option.markexpr == DEFAULT_SELECTION and any("::" in argument for argument in config.args):
        config.option.markexpr = ""
