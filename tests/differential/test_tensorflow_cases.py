"""TensorFlow's tests of the optimizer around its loss scales, without those in other modules.

The classes are in tests/policy/test_loss_scale.py, sequences on graphs in tests/policy/test_bind.py and
tests/pipeline/test_trajectories.py, skipped steps in tests/pipeline, checkpoints in tests/session/test_state.py. This
module has fixed scales of a loss, and a dynamic scale that changes during training.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import graphscale as gs
from tests.conftest import Arrays
from tests.passes.cases import sgd

WEIGHT = np.full((4, 3), 0.5, np.float32)


def batch(number: float = 1.0) -> Arrays:
    x = np.ones((8, 4), np.float32)
    x[-1, -1] = number
    return {"x": x, "t": np.zeros((8, 3), np.float32)}


def session(loss_scale: Any, **options: Any) -> gs.Session:
    return gs.Session(gs.scale(sgd(), loss_scale, **options), state={"w": WEIGHT})


@pytest.mark.parametrize("scale", [1, 8, 1000, 2.0**15])
def test_a_fixed_scale_is_applied_to_the_loss_and_taken_out_of_the_gradients(scale: float) -> None:
    """The scaled loss shows the scale; the step is the one without, also where it is not finite."""
    trained, (x, t) = session(scale, expose_scaled_loss=True), batch().values()
    outputs = trained.step(batch())
    np.testing.assert_allclose(outputs["scaled_loss"], scale * outputs["loss"], rtol=1e-6)
    gradient = np.float32(0.083333336) * (x.T @ (x @ WEIGHT - t))
    np.testing.assert_allclose(trained.state_dict()["w"], WEIGHT - np.float32(0.1) * gradient, rtol=1e-6)
    assert trained.step(batch(np.nan)).applied
    assert np.isnan(trained.state_dict()["w"]).any()
    assert (trained.loss_scale, trained.good_steps, trained.counters) == (scale, 0, {})


def test_a_dynamic_scale_is_the_one_of_this_step_until_the_step_is_over() -> None:
    trained = session(gs.DynamicLossScale(2, 1), expose_scaled_loss=True)
    for scale in (2, 4, 8):
        assert trained.loss_scale == scale
        outputs = trained.step(batch())
        np.testing.assert_allclose(outputs["scaled_loss"], scale * outputs["loss"], rtol=1e-6)
