"""The degrees that the table of operators claims, on drawn nodes and on ONNX's own operator suite."""

from __future__ import annotations

import contextlib

import pytest

from tests.operators.cases import Case
from tests.operators.drawn import each_operator, run_draws
from tests.operators.runtimes import RefusedError
from tests.operators.scaling import try_case
from tests.operators.suite import suite_cases
from tests.operators.values import is_float_data

# The runnable single nodes with a floating-point operand; 1,166 of onnx 1.23 with onnxruntime 1.19.
_LEAST = 940


def _check(case: Case) -> None:
    assert not [str(wrong) for wrong in try_case(case).wrong]


@pytest.mark.sample(6)
@each_operator
def test_degrees_hold_on_drawn_nodes(operator: tuple[str, str], least: int, tried: int) -> None:
    run_draws(_check, operator, least, tried)


@pytest.mark.full
def test_degrees_hold_on_the_suite() -> None:
    ran, wrong = 0, list[str]()
    for case in suite_cases():
        if any(map(is_float_data, case.feeds.values())):
            with contextlib.suppress(RefusedError):
                wrong += map(str, try_case(case).wrong)
                ran += 1
    assert ran >= _LEAST
    assert not wrong
