"""What TensorFlow tests of its loss scales and of the optimizer around them: the same behaviours, on scaled graphs.

The sequences, config, repr, `get`, and gradients that are None or nested are in tests/policy/test_loss_scale.py, the
sequences on graphs in tests/policy/test_bind.py and tests/pipeline/test_trajectories.py too. Here is the rest: single
tensors, where the bad number is, fixed scales that are applied to a loss, slots, checkpoints, and a dynamic scale that
changes under way.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import graphscale as gs
from tests.build import linear_step
from tests.conftest import Arrays, assert_all_same_bits, assert_same_bits

MOMENTUM = """
    kept = Mul(m, decay)
    m_next = Add(kept, dw)
    down = Mul(m_next, rate)
    w_next = Sub(w, down)
"""


def momentum_step() -> onnx.ModelProto:
    """A linear map, mean squared error, SGD with momentum: the slot m has the shape of the weight w."""
    return linear_step(
        MOMENTUM,
        inputs="float[4,3] w, float[4,3] m",
        outputs="float[4,3] w_next, float[4,3] m_next",
        constants="float decay = {0.5}, float rate = {0.25}",
    )


def state() -> Arrays:
    return {"w": np.full((4, 3), 0.5, np.float32), "m": np.zeros((4, 3), np.float32)}


def batch(number: float = 1.0) -> Arrays:
    x = np.ones((8, 4), np.float32)
    x[-1, -1] = number
    return {"x": x, "t": np.zeros((8, 3), np.float32)}


def session(loss_scale: Any, **options: Any) -> gs.Session:
    return gs.Session(gs.scale(momentum_step(), loss_scale, **options), state=state())


def by_hand(steps: int) -> Arrays:
    """The weight and the slot after some steps on the good batch, without any loss scale."""
    (w, m), (x, t) = state().values(), batch().values()
    for _ in range(steps):
        gradient = np.float32(0.083333336) * (x.T @ (x @ w - t))
        m = np.float32(0.5) * m + gradient
        w = w - np.float32(0.25) * m
    return {"w": w, "m": m}


# --- the classes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (1,), (3,), (2, 2)], ids=str)
def test_a_single_tensor_is_a_structure_of_gradients(shape: tuple[int, ...]) -> None:
    loss_scale = gs.DynamicLossScale(2, 1)
    assert loss_scale.update(np.ones(shape, np.float32)) == (None, True)
    assert loss_scale() == 4
    assert loss_scale.update(np.full(shape, np.nan, np.float32)) == (None, False)
    assert loss_scale() == 2


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("position", [0, 1, 2])
def test_one_bad_number_in_any_gradient_is_enough(position: int, number: float) -> None:
    gradients = [np.zeros(3, np.float32) for _ in range(3)]
    gradients[position][position] = number
    loss_scale = gs.DynamicLossScale(2**15)
    assert loss_scale.update(gradients) == (None, False)
    assert (loss_scale(), loss_scale.num_good_steps) == (2**14, 0)


def test_bad_numbers_of_both_signs_do_not_cancel() -> None:
    both = [np.asarray([np.inf, -np.inf], np.float32), np.asarray([np.nan], np.float32)]
    assert gs.DynamicLossScale().update(both) == (None, False)


def test_two_instances_do_not_share_their_state() -> None:
    first, second = gs.DynamicLossScale(8, 1), gs.DynamicLossScale(8, 1)
    first.update([np.ones(1)])
    assert (first(), second()) == (16, 8)


# --- the optimizer around a loss --------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [1, 8, 1000, 2.0**15])
def test_a_fixed_scale_is_applied_to_the_loss_and_taken_out_of_the_gradients(scale: float) -> None:
    """The scaled loss shows the scale; the step is the one without."""
    trained = session(scale, expose_scaled_loss=True)
    outputs = trained.step(batch())
    np.testing.assert_allclose(outputs["scaled_loss"], scale * outputs["loss"], rtol=1e-6)
    for name, expected in by_hand(1).items():
        np.testing.assert_allclose(trained.state_dict()[name], expected, rtol=1e-6)


def test_a_fixed_scale_applies_what_is_not_finite() -> None:
    trained = session(8)
    assert trained.step(batch(np.nan)).applied
    assert np.isnan(trained.state_dict()["w"]).any()
    assert trained.loss_scale == 8


def test_a_dynamic_scale_is_the_one_of_this_step_until_the_step_is_over() -> None:
    trained = session(gs.DynamicLossScale(2, 1), expose_scaled_loss=True)
    for scale in (2, 4, 8):
        assert trained.loss_scale == scale
        outputs = trained.step(batch())
        np.testing.assert_allclose(outputs["scaled_loss"], scale * outputs["loss"], rtol=1e-6)


@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_a_skipped_step_leaves_weights_and_slots(number: float) -> None:
    trained = session(gs.DynamicLossScale(4, 2))
    assert trained.step(batch()).applied
    before = trained.state_dict()
    assert before["m"].any()
    assert not trained.step(batch(number)).applied
    after = trained.state_dict()
    assert_all_same_bits({name: after[name] for name in ("w", "m")}, {name: before[name] for name in ("w", "m")})
    assert (trained.loss_scale, trained.good_steps) == (2, 0)
    # The slot goes on from where it was: as if the bad batch had not been.
    assert trained.step(batch()).applied
    for name, expected in by_hand(2).items():
        np.testing.assert_allclose(trained.state_dict()[name], expected, rtol=1e-5)


def test_a_gradient_that_overflows_by_its_scale_alone_is_skipped_until_the_scale_fits() -> None:
    """At each skip the scale is halved, and no batch was at fault."""
    trained = session(gs.DynamicLossScale(2.0**127, 2000))
    huge = {"x": batch()["x"], "t": np.full((8, 3), -100, np.float32)}
    applied = [trained.step(huge).applied for _ in range(20)]
    first = applied.index(True)
    assert 1 <= first <= 12 and all(applied[first:])
    assert trained.loss_scale == 2.0 ** (127 - first)
    assert trained.good_steps == 20 - first


def test_a_checkpoint_holds_weights_slots_scale_and_count(tmp_path: Path) -> None:
    """Restored into a session with another beginning, the steps that follow are the same."""
    policy = gs.DynamicLossScale(4, 3)
    first = session(policy)
    for number in (1.0, np.nan, 1.0, 1.0):
        first.step(batch(number))
    first.save_state(tmp_path / "state.safetensors")
    assert (first.loss_scale, first.good_steps) == (2, 2)
    second = session(policy)
    second.step(batch(3.0))
    second.load_state(tmp_path / "state.safetensors")
    assert (second.loss_scale, second.good_steps) == (2, 2)
    for number in (1.0, np.inf, 2.0):
        ours, theirs = first.step(batch(number)), second.step(batch(number))
        assert ours.applied == theirs.applied
        assert_same_bits(ours["loss"], theirs["loss"], "loss")
    assert_all_same_bits(first.state_dict(), second.state_dict())
