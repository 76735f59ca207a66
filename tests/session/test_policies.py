"""What becomes of a step when the loss scale is stuck: each way of `on_stuck`, on a real graph, step by step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import graphscale as gs
from tests.conftest import Arrays, assert_all_same_bits, load_example
from tests.session.plain import first_state, options

NAME = "pytorch/mlp_momentum"
TARGETS = ["onnx", pytest.param("ort-training", marks=pytest.mark.training)]
# The scale is at its floor after two bad steps, and stuck at the third; or stuck after so many in a row.
STEPS = "TTFFFFTFFFFTT"
MINIMUM = {"initial_loss_scale": 4.0, "increment_period": 2}
IN_A_ROW = {"initial_loss_scale": 2.0**20, "increment_period": 100, "max_consecutive_skips": 3}


def batches() -> list[Arrays]:
    feeds = load_example(NAME).feeds
    made = []
    for number, letter in enumerate(STEPS):
        x = feeds["x"] + np.float32(0.01 * number)
        if letter == "F":
            x[3, 5] = np.nan
        made.append({"x": x, "target": feeds["target"]})
    return made


def open_session(policy: gs.DynamicLossScale, target: str) -> gs.Session:
    result = gs.scale(load_example(NAME).model(), policy, target=target)
    return gs.Session(result, state=first_state(result, load_example(NAME).feeds), session_options=options())


def weights(session: gs.Session) -> Arrays:
    return {name: value for name, value in session.state_dict().items() if name.startswith("fc")}


@pytest.mark.parametrize("on_stuck", ["hold", "flag", "reset", "accept"])
@pytest.mark.parametrize("stuck_by", [MINIMUM, IN_A_ROW], ids=["minimum", "in a row"])
@pytest.mark.parametrize("target", TARGETS)
def test_every_step_is_what_the_eager_policy_says(on_stuck: Any, stuck_by: dict[str, Any], target: str) -> None:
    session = open_session(gs.DynamicLossScale(**stuck_by, on_stuck=on_stuck), target)
    eager = gs.DynamicLossScale(**stuck_by, on_stuck=on_stuck)
    stuck, accepted = 0, 0
    for letter, feeds in zip(STEPS, batches(), strict=True):
        before = weights(session)
        result = session.step(feeds)
        _, applied = eager.update([np.array([1.0 if letter == "T" else np.nan])])
        assert result.all_finite == (letter == "T")
        assert result.applied == applied
        assert result.stuck == (on_stuck != "hold" and eager.stuck)
        assert (session.loss_scale, session.good_steps) == (float(eager()), eager.num_good_steps)
        if not applied:
            assert_all_same_bits(weights(session), before)
        elif letter == "F":
            accepted += 1
            assert any(np.isnan(value).any() for value in weights(session).values())
            session.load_state_dict({**session.state_dict(), **before})
        else:
            assert any((value != before[name]).any() for name, value in weights(session).items())
        stuck += result.stuck
    if on_stuck == "hold":
        assert stuck == 0
    else:
        assert stuck >= 2
    assert (accepted > 0) == (on_stuck == "accept")


def test_stuck_is_an_output_where_the_policy_tells() -> None:
    """It can be fetched, or asked of the result without that."""
    told = open_session(gs.DynamicLossScale(**MINIMUM, on_stuck="flag"), "onnx")
    silent = open_session(gs.DynamicLossScale(**MINIMUM), "onnx")
    assert set(told.output_names) - set(silent.output_names) == {"stuck"}
    for feeds in batches()[:6]:
        fetched, asked = told.step(feeds, fetch=["stuck"]), silent.step(feeds)
        assert fetched.stuck == bool(fetched["stuck"])
        assert not asked.stuck
    assert fetched.stuck


def test_a_reset_starts_again() -> None:
    session = open_session(gs.DynamicLossScale(**MINIMUM, on_stuck="reset"), "onnx")
    scales = []
    for feeds in batches():
        session.step(feeds)
        scales.append(session.loss_scale)
    assert scales == [4, 8, 4, 2, 1, 4, 4, 2, 1, 4, 2, 2, 4]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("preset", ["torch", "apex", "deepspeed", "megatron", "paddle", "mindspore", "flax", "keras"])
def test_presets(preset: str, target: str) -> None:
    policy, eager = (getattr(gs.presets, preset)() for _ in range(2))
    session = open_session(policy, target)
    for letter, feeds in zip(STEPS, batches(), strict=True):
        result = session.step(feeds)
        _, applied = eager.update([np.array([1.0 if letter == "T" else np.inf])])
        assert result.applied == applied == (letter == "T")
        assert (session.loss_scale, session.good_steps) == (float(eager()), eager.num_good_steps)


@pytest.mark.parametrize("target", TARGETS)
def test_telemetry_of_a_skip(target: str) -> None:
    """Which gradient, and why; counters go on from a saved state."""
    example = load_example(NAME)
    result = gs.scale(example.model(), target=target, telemetry=True)
    session = gs.Session(result, state=first_state(result, example.feeds), session_options=options())
    expected = {"steps": 0, "skipped_steps": 0, "consecutive_skips": 0, "last_skip_step": 0}
    for number, (letter, feeds) in enumerate(zip(STEPS, batches(), strict=True), 1):
        step, good = session.step(feeds), letter == "T"
        expected["steps"] = number
        expected["skipped_steps"] += not good
        expected["consecutive_skips"] = 0 if good else expected["consecutive_skips"] + 1
        expected["last_skip_step"] = expected["last_skip_step"] if good else number
        assert session.counters == expected
        assert step.cause == (None if good else "nan")
        assert (step.offender is None) == good
        assert step.offender in {None, *(gradient.value for gradient in result.report.gradients)}
        assert step.zero_fraction is not None
        assert 0 <= step.zero_fraction < 1
