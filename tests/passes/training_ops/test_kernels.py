"""The standard form of each training operator against the kernel of onnxruntime-training, on random cases."""

from __future__ import annotations

import random

import pytest

from graphscale.passes.lower_training_ops import FORMULAS
from tests.passes.training_ops.cases import check_case, run_reference
from tests.passes.training_ops.drawing import RECIPES, draw_case, load_families
from tests.random_cases import FULL, run_random_cases

load_families()
each_operator = pytest.mark.parametrize("operator", sorted(RECIPES), ids=lambda operator: operator[1])
tiers = pytest.mark.parametrize("tried", [2, pytest.param(40, id="all", marks=FULL)])


@pytest.mark.static
def test_every_formula_has_a_recipe() -> None:
    assert set(RECIPES) == set(FORMULAS)


@pytest.mark.training
@tiers
@each_operator
def test_against_the_kernel(operator: tuple[str, str], tried: int) -> None:
    def check(choices: random.Random) -> None:
        case = draw_case(operator, choices)
        check_case(case, run_reference(case))

    run_random_cases(check, tried, tried, operator[1], shared=tried > 2)
