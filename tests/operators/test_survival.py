"""The survival of infinities and NaN that the table of operators claims, on drawn nodes and on ONNX's own suite."""

from __future__ import annotations

import contextlib

import pytest

from tests.operators.cases import Case
from tests.operators.drawn import each_operator, run_draws
from tests.operators.runtimes import RefusedError
from tests.operators.suite import suite_cases
from tests.operators.survival import try_survival


@pytest.mark.sample(6)
@each_operator
def test_survival_holds_on_drawn_nodes(operator: tuple[str, str], least: int, tried: int) -> None:
    def check(case: Case) -> None:
        assert not try_survival(case).wrong

    run_draws(check, operator, least, tried)


@pytest.mark.full
def test_survival_holds_on_the_suite() -> None:
    wrong: list[str] = []
    for case in suite_cases():
        with contextlib.suppress(RefusedError):
            wrong += try_survival(case).wrong
    assert not wrong
