"""The degrees that the table of operators claims, on nodes drawn for every definition of an operator."""

from __future__ import annotations

import functools
import random

import pytest
from hypothesis import assume

from tests.operators.cases import schema_versions
from tests.operators.known import KNOWN_WRONG, find_unexpected
from tests.operators.recipes import RECIPES, draw_case
from tests.operators.runtimes import RefusedError
from tests.operators.scaling import Wrong, try_case
from tests.random_cases import ALONE, random_cases

# Nodes drawn of each definition; at least half of them must run.
_TRIED = 10


@pytest.mark.parametrize("operator", sorted(RECIPES), ids="::".join)
def test_claims_hold_on_drawn_nodes(operator: tuple[str, str]) -> None:
    known: list[Wrong] = []
    for opsets in schema_versions(operator[1]):
        check = functools.partial(_check, operator, opsets, known)
        random_cases(_TRIED // 2, _TRIED, f"{operator[1]}-{opsets.start}")(check)()
    assert ALONE or (operator in KNOWN_WRONG) == bool(known), "the claim is mended: take it off the table"


def _check(operator: tuple[str, str], opsets: range, known: list[Wrong], choices: random.Random) -> None:
    case = draw_case(operator, choices, opsets)
    try:
        trial = try_case(case)
    except RefusedError:
        assume(False)
    assert not find_unexpected(trial.wrong)
    known.extend(trial.wrong)
