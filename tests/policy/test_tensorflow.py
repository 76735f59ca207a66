"""The policies against TensorFlow's own classes, and Keras': recorded, and living where TensorFlow is installed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import graphscale as gs
from graphscale.policy import presets
from tests.policy import record_tensorflow
from tests.policy.cases import random_steps
from tests.policy.forms import GraphForm, eager_trajectory

pytestmark = [pytest.mark.static, pytest.mark.tensorflow]


@pytest.fixture(scope="module")
def recorded() -> dict[str, np.ndarray]:
    with np.load(record_tensorflow.RECORDED) as stored:
        return dict(stored)


def policy(arguments: Any) -> gs.DynamicLossScale:
    initial, period, multiplier = arguments
    return gs.DynamicLossScale(float(initial), int(period), float(multiplier))


def run(loss_scale: gs.DynamicLossScale, steps: list[bool]) -> tuple[list[float], list[bool], list[int]]:
    """As `record_tensorflow.run`."""
    scales, applied, good_steps = [], [], []
    for index, finite in enumerate(steps):
        applied.append(loss_scale.update(record_tensorflow.gradients(index, finite))[1])
        scales.append(float(loss_scale()))
        good_steps.append(loss_scale.num_good_steps)
    return scales, applied, good_steps


def test_recorded_trajectories(recorded: dict[str, np.ndarray]) -> None:
    columns = (recorded[name] for name in ("arguments", "steps", "scales", "applied", "good_steps"))
    for arguments, steps, scales, applied, good_steps in zip(*columns, strict=True):
        expected = (scales.tolist(), applied.tolist(), good_steps.tolist())
        assert run(policy(arguments), steps.tolist()) == expected, (arguments, steps)


def test_recorded_trajectories_in_the_graph(recorded: dict[str, np.ndarray]) -> None:
    columns = (recorded[name][:60] for name in ("arguments", "steps", "scales", "applied"))
    for arguments, steps, scales, applied in zip(*columns, strict=True):
        result = GraphForm(policy(arguments)).trajectory(steps.tolist())
        assert (result.scales, result.applied) == (scales.tolist(), applied.tolist()), arguments


def test_recorded_defaults(recorded: dict[str, np.ndarray]) -> None:
    scales, _, good_steps = run(gs.DynamicLossScale(), recorded["default_steps"].tolist())
    assert scales == recorded["default_scales"].tolist()
    assert good_steps == recorded["default_good_steps"].tolist()
    assert set(scales) == {2.0**13, 2.0**14, 2.0**15}


def test_recorded_fixed_loss_scales(recorded: dict[str, np.ndarray]) -> None:
    assert len(recorded["fixed"]) == len(record_tensorflow.FIXED)
    for value, scale, applied in zip(
        recorded["fixed"], recorded["fixed_scales"], recorded["fixed_applied"], strict=True
    ):
        loss_scale = gs.FixedLossScale(float(value))
        assert loss_scale.update([np.asarray([np.nan])]) == (None, bool(applied))
        assert loss_scale() == scale


def test_the_recording_meets_the_limits(recorded: dict[str, np.ndarray]) -> None:
    scales, limits = recorded["scales"], np.finfo(np.float32)
    assert (scales == 1).sum() >= 100
    assert np.isfinite(scales).all() and (scales > limits.max / 1.1).sum() >= 20
    assert (recorded["applied"] == recorded["steps"]).all()


Many = Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, ...]]


def compare_with_the_living(many: Many, make: Callable[[], gs.DynamicLossScale], seed: int, count: int) -> None:
    sequences = list(random_steps(np.random.default_rng(seed), count))
    starts = np.concatenate([np.arange(len(steps)) == 0 for steps in sequences])
    scales, applied = many(np.concatenate(sequences), starts)
    expected = [eager_trajectory(make(), steps) for steps in sequences]
    assert [scale for run in expected for scale in run.scales] == scales.tolist()
    assert [apply for run in expected for apply in run.applied] == applied.tolist()


def test_the_living_class() -> None:
    pytest.importorskip("tensorflow", reason="needs TensorFlow; its recorded trajectories are tested without it")
    random = np.random.default_rng(18)
    for index in range(10):
        arguments = record_tensorflow.draw(random)
        many = record_tensorflow.many_dynamic(arguments)
        compare_with_the_living(many, lambda arguments=arguments: policy(arguments), index, 1000)


def test_the_living_fixed_class() -> None:
    pytest.importorskip("tensorflow", reason="needs TensorFlow; its recorded values are tested without it")
    for value in record_tensorflow.FIXED:
        loss_scale = gs.FixedLossScale(value)
        applied = loss_scale.update([np.asarray([np.nan])])[1]
        assert record_tensorflow.run_fixed(value) == (float(loss_scale()), applied)


def test_the_living_optimizer_of_keras() -> None:
    pytest.importorskip("tensorflow", reason="needs TensorFlow, and Keras 3 with it")
    for index, (initial, period) in enumerate([(1.0, 1), (2.0**15, 2), (3.7, 3), (0.01, 4)]):
        make = lambda initial=initial, period=period: presets.keras(  # noqa: E731
            initial_loss_scale=initial, increment_period=period
        )
        compare_with_the_living(record_tensorflow.many_keras(initial, period), make, index, 2500)
