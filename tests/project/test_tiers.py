"""The tiers of the tests: the sample of a test's cases, shares of the full tier, tests named on the command line."""

from __future__ import annotations

import itertools
import random
from types import SimpleNamespace
from typing import Any

import pytest

from tests.random_cases import run_random_cases
from tests.tiers import (
    DEFAULT_SELECTION,
    cases_beside_the_cover,
    cases_of_other_shares,
    mark_tiers,
    read_share,
    select_named_tests,
)

pytestmark = pytest.mark.static


class Case:
    """As much of a `pytest.Item` as the choice looks at."""

    parent, originalname = None, "test"

    def __init__(self, size: int, **params: int) -> None:
        self.name = f"test[{params}]"
        self.callspec = SimpleNamespace(params=params)
        self.markers = [pytest.mark.sample(size).mark]

    def get_closest_marker(self, name: str) -> Any:
        return next((marker for marker in self.markers if marker.name == name), None)

    def add_marker(self, marker: pytest.MarkDecorator) -> None:
        self.markers.append(marker.mark)


def quick(size: int, shuffled: bool = False) -> list[dict[str, int]]:
    cases = [Case(size, model=i, target=j, level=k) for i, j, k in itertools.product(range(6), range(2), range(4))]
    if shuffled:
        random.Random(1).shuffle(cases)
    mark_tiers(cases)  # type: ignore[arg-type]
    return [case.callspec.params for case in cases if not case.get_closest_marker("full")]


def test_a_sample_has_every_value_of_every_parameter_as_soon_as_it_can() -> None:
    for size in (6, 10):
        chosen = quick(size)
        assert len(chosen) == size
        for name, count in (("model", 6), ("target", 2), ("level", 4)):
            assert {case[name] for case in chosen} == set(range(count))
    assert len({case["model"] for case in quick(4)}) == len({case["level"] for case in quick(4)}) == 4


def test_a_sample_does_not_depend_on_the_order_and_may_be_larger_than_the_test() -> None:
    as_sets = [{tuple(case.items()) for case in quick(7, shuffled)} for shuffled in (False, True)]
    assert as_sets[0] == as_sets[1]
    assert len(quick(100)) == 6 * 2 * 4


@pytest.mark.sample(3)
@pytest.mark.parametrize("letter", ["a", "b", "c"])
@pytest.mark.parametrize("number", [1, 2, 3])
def test_the_sample_of_a_test_has_every_value(letter: str, number: int, request: pytest.FixtureRequest) -> None:
    """The sample of this test, as the release of pytest has it."""
    collected = [
        item for item in request.session.items if getattr(item, "originalname", "") == request.node.originalname
    ]
    chosen = [item.callspec.params for item in collected if not item.get_closest_marker("full")]
    assert len(chosen) <= 3
    for name in ("letter", "number"):
        assert len({params[name] for params in chosen}) == len(chosen)


def test_a_cover_has_every_value_as_often_as_it_is_asked_to_and_many_pairs() -> None:
    cases = [Case(2, model=i, target=j, level=k) for i, j, k in itertools.product(range(6), range(2), range(4))]
    for case in cases:
        case.add_marker(pytest.mark.cover(2))
    left_out = {id(case) for case in cases_beside_the_cover(cases)}  # type: ignore[arg-type]
    kept = [case.callspec.params for case in cases if id(case) not in left_out]
    assert len(kept) <= 16
    for name, count in (("model", 6), ("target", 2), ("level", 4)):
        assert all(sum(params[name] == value for params in kept) >= 2 for value in range(count))
    assert len({(params["model"], params["target"]) for params in kept}) == 12


def full_cases(number: int, count: int, *others: str) -> list[dict[str, int]]:
    """The cases that one share has of a test of 46 cases in the full tier, and of two in the quick one."""
    cases = [Case(2, model=i, target=j, level=k) for i, j, k in itertools.product(range(6), range(2), range(4))]
    mark_tiers(cases)  # type: ignore[arg-type]
    for name in others:
        for case in cases:
            case.add_marker(getattr(pytest.mark, name))
    left_out = {id(case) for case in cases_of_other_shares(cases, number, count)}  # type: ignore[arg-type]
    return [case.callspec.params for case in cases if id(case) not in left_out and case.get_closest_marker("full")]


def test_each_case_is_in_one_share_and_the_first_ones_have_every_value() -> None:
    shares = [full_cases(number, 5) for number in range(1, 6)]
    assert [len(share) for share in shares] == [10, 9, 9, 9, 9]
    assert len({tuple(case.items()) for share in shares for case in share}) == 46
    for name, values in (("model", 6), ("target", 2), ("level", 4)):
        assert [len({case[name] for case in share}) for share in shares[:2]] == [values, values]


def test_the_cases_of_small_tests_are_cut_together() -> None:
    cases = [Case(9, model=i, target=j) for i, j in itertools.product(range(6), range(2))]
    for case in cases:
        case.originalname = f"test{case.callspec.params['model']}"
        case.add_marker(pytest.mark.full)
    left_out = [cases_of_other_shares(cases, number, 3) for number in (1, 2, 3)]  # type: ignore[arg-type]
    assert [len(others) for others in left_out] == [8, 8, 8]
    assert not set.intersection(*({id(case) for case in others} for others in left_out))


def test_every_share_has_all_cases_of_a_test_that_asks_for_it() -> None:
    assert len(full_cases(2, 5, "every_share")) == 46


def test_shares_of_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    def drawn() -> list[float]:
        found: list[float] = []
        run_random_cases(lambda choices: found.append(choices.random()), 10, 12, "seeds", shared=True)
        return found

    monkeypatch.delenv("GRAPHSCALE_TEST_SHARE", raising=False)
    everything = drawn()
    shares = []
    for number in range(1, 6):
        monkeypatch.setenv("GRAPHSCALE_TEST_SHARE", f"{number}/5")
        shares.append(drawn())
    assert [len(share) for share in shares] == [3, 3, 2, 2, 2]
    assert sorted(itertools.chain(*shares)) == sorted(everything)


@pytest.mark.parametrize("text", ["0/2", "3/2", "1", "a/b", "-1/2"])
def test_a_share_that_is_none_is_an_error(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHSCALE_TEST_SHARE", text)
    with pytest.raises(pytest.UsageError, match="give it as 2/6"):
        read_share()


@pytest.mark.parametrize(
    ("arguments", "expression", "expected"),
    [
        (["tests/x.py::test_y"], DEFAULT_SELECTION, ""),
        (["tests/x.py"], DEFAULT_SELECTION, DEFAULT_SELECTION),
        (["tests/x.py::test_y"], "training", "training"),
    ],
)
def test_a_test_that_is_named_runs_in_whatever_tier_it_is(arguments: list[str], expression: str, expected: str) -> None:
    config = SimpleNamespace(args=arguments, option=SimpleNamespace(markexpr=expression))
    select_named_tests(config)  # type: ignore[arg-type]
    assert config.option.markexpr == expected
