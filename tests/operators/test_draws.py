"""The degrees that the table of operators claims, on nodes drawn for every definition of an operator."""

from __future__ import annotations

import functools
import random

import pytest
from _pytest.mark import ParameterSet
from hypothesis import assume

from tests.operators.cases import is_training_operator, schema_versions
from tests.operators.known import KNOWN_WRONG, find_unexpected
from tests.operators.recipes import RECIPES, draw_case
from tests.operators.runtimes import RefusedError
from tests.operators.scaling import Wrong, try_case
from tests.random_cases import ALONE, run_random_cases

# How many of the nodes drawn of each definition must run, and how many there are.
_TIERS = [pytest.param(1, 2, id="some"), pytest.param(5, 10, id="all", marks=pytest.mark.full)]


def _parameter(operator: tuple[str, str]) -> ParameterSet:
    marks = [pytest.mark.training] if is_training_operator(operator) else []
    return pytest.param(operator, id="::".join(filter(None, operator)), marks=marks)


@pytest.mark.parametrize(("least", "tried"), _TIERS)
@pytest.mark.parametrize("operator", [_parameter(operator) for operator in sorted(RECIPES)])
def test_claims_hold_on_drawn_nodes(operator: tuple[str, str], least: int, tried: int) -> None:
    wrong: list[Wrong] = []
    for opsets in schema_versions(operator):
        check = functools.partial(_check, operator, opsets, wrong)
        run_random_cases(check, least, tried, f"{operator[1]}-{opsets.start}")
    if least > 1 and ALONE is None:
        assert (operator in KNOWN_WRONG) == bool(wrong), "the claim is mended: take it off the table"


def _check(operator: tuple[str, str], opsets: range, wrong: list[Wrong], choices: random.Random) -> None:
    try:
        trial = try_case(draw_case(operator, choices, opsets))
    except RefusedError:
        assume(False)
    assert not find_unexpected(trial.wrong)
    wrong.extend(trial.wrong)
