"""Tests of nodes drawn for every definition of every operator with a recipe."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import assume

from tests.operators.cases import Case, is_training_operator, schema_versions
from tests.operators.recipes import RECIPES, draw_case
from tests.operators.runtimes import RefusedError
from tests.random_cases import run_random_cases

__all__ = ["each_operator", "run_draws"]

_Test = Callable[..., None]


def each_operator(test: _Test) -> _Test:
    """Run a test for each operator: at least `least` of `tried` nodes of each definition must run."""
    tiers = [pytest.param(1, 2, id="some"), pytest.param(5, 10, id="all", marks=pytest.mark.full)]
    operators = [
        pytest.param(
            operator,
            id="::".join(filter(None, operator)),
            marks=[pytest.mark.training] if is_training_operator(operator) else [],
        )
        for operator in sorted(RECIPES)
    ]
    return pytest.mark.parametrize(("least", "tried"), tiers)(pytest.mark.parametrize("operator", operators)(test))


def run_draws(check: Callable[[Case], None], operator: tuple[str, str], least: int, tried: int) -> None:
    """Check nodes drawn for each definition of an operator; those that no runtime runs are set aside."""
    for opsets in schema_versions(operator):

        def check_one(choices: random.Random) -> None:
            try:
                check(draw_case(operator, choices, opsets))  # noqa: B023 - called before the next definition's turn
            except RefusedError:
                assume(False)

        run_random_cases(check_one, least, tried, f"{operator[1]}-{opsets.start}")
