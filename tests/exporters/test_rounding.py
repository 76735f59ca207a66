"""Numbers that differ by their rounding."""

from __future__ import annotations

import numpy as np
import pytest

from graphscale.exporters.rounding import disturb

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


def test_nothing_moves_without_a_generator() -> None:
    for name, array in disturb(NUMBERS, None, 1.0).items():
        np.testing.assert_array_equal(array, NUMBERS[name])
