"""The policies against the classes of TensorFlow, Keras and PyTorch: recorded, and living where those are installed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import graphscale as gs
from tests.policy.cases import random_steps
from tests.policy.forms import GraphForm
from tests.policy.record import FIXED, ORIGINALS, RECORDED, run_fixed, run_policy

pytestmark = pytest.mark.static

MARKS = {"torch": pytest.mark.pytorch, "tensorflow": pytest.mark.tensorflow}
each_original = pytest.mark.parametrize("name", [pytest.param(name, marks=mark) for name, mark in MARKS.items()])
KEYS = ("arguments", "steps", "scales", "applied", "good_steps")


def recorded(name: str) -> dict[str, np.ndarray]:
    with np.load(RECORDED / f"{name}.npz") as stored:
        return dict(stored)


def sequences(name: str) -> Iterator[tuple[list[Any], list[bool], list[float], list[bool], list[int]]]:
    """The arguments and steps of each recorded sequence, and what came of it."""
    stored = recorded(name)
    whole = ORIGINALS[name].draw(np.random.default_rng(0))  # which of the arguments are integers
    for row in zip(*(stored[key].tolist() for key in KEYS), strict=True):
        yield [type(like)(value) for like, value in zip(whole, row[0], strict=True)], *row[1:]


@pytest.mark.full
@each_original
def test_recorded_trajectories(name: str) -> None:
    for index, (arguments, steps, *expected) in enumerate(sequences(name)):
        assert run_policy(ORIGINALS[name].policy(*arguments), steps) == tuple(expected), (arguments, steps)
        if index < 60:
            result = GraphForm(ORIGINALS[name].policy(*arguments)).trajectory(steps)
            assert [result.scales, result.applied] == expected[:2], arguments
    # The floor, zero for PyTorch, and the largest scales are among them.
    scales = recorded(name)["scales"]
    assert (scales == (name != "torch")).any() and (scales > np.finfo(np.float32).max / 1.1).any()


@each_original
def test_recorded_defaults(name: str) -> None:
    stored = recorded(name)
    scales, _, good_steps = run_policy(ORIGINALS[name].policy(), stored["default_steps"].tolist())
    assert scales == stored["default_scales"].tolist()
    assert good_steps == stored["default_good_steps"].tolist()
    first = 14 if name == "torch" else 13
    assert set(scales) == {2.0**first, 2.0 ** (first + 1), 2.0 ** (first + 2)}


@pytest.mark.tensorflow
def test_recorded_fixed_loss_scales() -> None:
    stored = recorded("tensorflow")
    assert len(stored["fixed"]) == len(FIXED)
    for value, scale, applied in zip(stored["fixed"], stored["fixed_scales"], stored["fixed_applied"], strict=True):
        loss_scale = gs.FixedLossScale(float(value))
        assert loss_scale.update([np.asarray([np.nan])]) == (None, bool(applied))
        assert loss_scale() == scale


@pytest.mark.pytorch
@pytest.mark.tensorflow
@pytest.mark.parametrize("name", ORIGINALS)
def test_the_living_classes(name: str) -> None:
    original, random = ORIGINALS[name], np.random.default_rng(17)
    pytest.importorskip(original.needs, reason=f"needs {original.needs}; recorded trajectories are tested without it")
    for _ in range(40):
        arguments = original.draw(random)
        for steps in random_steps(random, 10):
            assert run_policy(original.policy(*arguments), steps) == original.run(arguments, steps), (arguments, steps)


@pytest.mark.tensorflow
def test_the_living_fixed_loss_scale() -> None:
    pytest.importorskip("tensorflow", reason="needs TensorFlow; what is recorded of it is tested without it")
    for value in FIXED:
        loss_scale = gs.FixedLossScale(value)
        applied = loss_scale.update([np.asarray([np.nan])])[1]
        assert run_fixed(value) == (float(loss_scale()), applied)
