"""Tests of nodes drawn for every definition of every operator with a recipe."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest
from hypothesis import assume

from tests.operators.cases import Case, is_training_operator, schema_versions
from tests.operators.recipes import RECIPES, draw_case
from tests.operators.runtimes import RefusedError
from tests.random_cases import FULL, run_random_cases

_Test = Callable[..., None]
# So many nodes of a definition are drawn in the quick tier, where there are many definitions.
QUICK_NODES = 2


def count_nodes(operator: tuple[str, str], tried: int = 10) -> int:
    """Return how many nodes of each definition are drawn: `tried`, or more if there are fewer than four definitions."""
    return max(tried, 4 * tried // len(schema_versions(operator)))


def each_draw(operator: tuple[str, str]) -> Iterator[tuple[random.Random, range]]:
    """Yield the choices for every node that is drawn of an operator, and the opsets of its definition."""
    for opsets in schema_versions(operator):
        for number in range(count_nodes(operator)):
            yield random.Random(f"{operator[1]}-{opsets.start}-{number}"), opsets


def each_operator(test: _Test) -> _Test:
    """Run a test of `(operator, least, tried)` for each operator, in the quick tier for half; see `run_draws`."""
    tiers = [pytest.param(1, QUICK_NODES, id="some"), pytest.param(5, 10, id="all", marks=FULL)]
    operators = [
        pytest.param(
            operator,
            id="::".join(filter(None, operator)),
            marks=[pytest.mark.training] if is_training_operator(operator) else [],
        )
        for operator in sorted(RECIPES)
    ]
    cases = pytest.mark.parametrize(("least", "tried"), tiers)(pytest.mark.parametrize("operator", operators)(test))
    return pytest.mark.sample(len(operators) // 2)(cases)


def run_draws(check: Callable[[Case], None], operator: tuple[str, str], least: int, tried: int) -> None:
    """Check `count_nodes` nodes drawn for each definition of an operator; as many of `least` must run."""
    shared = tried > QUICK_NODES
    least, tried = count_nodes(operator, least), count_nodes(operator, tried)
    for opsets in schema_versions(operator):

        def check_one(choices: random.Random) -> None:
            try:
                check(draw_case(operator, choices, opsets))  # noqa: B023 - called before the next definition's turn
            except RefusedError:
                assume(False)

        run_random_cases(check_one, least, tried, f"{operator[1]}-{opsets.start}", shared)
