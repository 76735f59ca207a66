"""Numbers that differ by their rounding, and those that it excuses."""

from __future__ import annotations

import numpy as np
import pytest

from graphscale.exporters.rounding import Numbers, disturb

pytestmark = pytest.mark.static

NUMBERS = {
    "whole": np.array([-3, 0, 7, np.inf], np.float32),
    "parts": np.linspace(0.1, 0.9, 50, dtype=np.float32),
    "labels": np.arange(5),
}


@pytest.mark.parametrize(("least", "unit"), [(0.0, 2.0**-23), (2.0**-10, 2.0**-10)])
def test_parts_move_by_their_rounding_and_whole_numbers_stay(least: float, unit: float) -> None:
    found = disturb(NUMBERS, np.random.default_rng(0), least)
    for name in ("whole", "labels"):
        np.testing.assert_array_equal(found[name], NUMBERS[name])
    assert found["parts"].dtype == np.float32
    change = np.abs(found["parts"] / NUMBERS["parts"] - 1)
    assert unit / 2 < change.max() <= 2 * unit


@pytest.mark.parametrize(("second", "error"), [(1.0, 0.0), (2.0, 1.0)])
def test_an_infinite_number_excuses_no_other(second: float, error: float) -> None:
    wanted, got = (np.array([-np.inf, number, np.nan], np.float32) for number in (1.0, second))
    numbers = Numbers(got, wanted, wanted.astype(np.float64), tolerance=1e-4, coarse=1e-4)
    assert numbers.are_wrong == bool(error) and numbers.error == error and numbers.excused == bool(error)


def test_a_tensor_of_rounding_shows_its_size_alone() -> None:
    wanted, rng = np.linspace(-1, 1, 11), np.random.default_rng(0)
    for factor, is_wrong in ((1, False), (2, False), (20, True)):
        numbers = Numbers(factor * rng.permutation(wanted), wanted, wanted, tolerance=1e-4, coarse=1e-4)
        assert numbers.are_wrong and numbers.are_decided
        for _ in range(12):
            numbers.add(rng.permutation(wanted))
        assert numbers.are_wrong == is_wrong and not numbers.are_decided
