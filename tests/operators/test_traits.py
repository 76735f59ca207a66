"""The traits that the table of operators claims, on drawn nodes and on ONNX's own operator suite."""

from __future__ import annotations

import contextlib
from collections import Counter

import pytest

from tests.operators.cases import Case
from tests.operators.claims import CHECKED_TRAITS, traits_of
from tests.operators.drawn import each_operator, run_draws
from tests.operators.properties import try_traits
from tests.operators.runtimes import RefusedError
from tests.operators.suite import suite_cases
from tests.tiers import read_share

# Traits that say what may happen: some node shows it.
_MAY = {"RANDOM", "WRITES_INPUT"}


@pytest.mark.sample(6)
@each_operator
def test_traits_hold_on_drawn_nodes(operator: tuple[str, str], least: int, tried: int) -> None:
    seen: Counter[str] = Counter()

    def check(case: Case) -> None:
        findings = try_traits(case)
        assert not findings.wrong
        seen.update({trait: count for trait, count in findings.tried.items() if trait not in _MAY})
        seen.update(findings.shown)

    run_draws(check, operator, least, tried)
    if least > 1 and read_share() == (1, 1):  # all seeds
        assert not (traits_of(operator) & CHECKED_TRAITS) - seen.keys(), "no node puts these traits to the test"


@pytest.mark.full
def test_traits_hold_on_the_suite() -> None:
    wrong: list[str] = []
    for case in suite_cases():
        with contextlib.suppress(RefusedError):
            wrong += try_traits(case).wrong
    assert not wrong
