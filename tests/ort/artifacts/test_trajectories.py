"""Whole trainings on scaled folders, with overflows: weights as on the original folder, the scale by the eager rule.

The loss scale cancels out of finite steps. So the expected weights are those of the original folder, trained on the
finite windows alone; windows with an overflow are skipped.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import graphscale as gs
from graphscale.errors import InvalidLossScaleError
from graphscale.ort.artifacts import resume_artifacts, scale_artifacts
from tests.conftest import Arrays, assert_all_same_bits
from tests.ort.artifacts.training_session import FOLDERS, TrainingSession, sample, scale_as, train

pytestmark = [pytest.mark.training, pytest.mark.sample(1)]

STEPS, ROWS, INITIAL, PERIOD = 60, 16, 2.0**10, 3
# Optimizer steps with an overflow: in the window's first call, its last, one in between, and in all.
FIRST, LAST, MIDDLE, ALL = {0, 7, 20}, {12, 13, 41}, {25}, {33, 59}
SKIPPED = FIRST | LAST | MIDDLE | ALL
NAMES = ("digits_adamw", "digits_adamw_clip", "digits_sgd")


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of the module: a batch, its step, and whether the optimizer steps after it."""

    batch: Arrays
    step: int
    ends: bool


def calls(window: int) -> Iterator[Call]:
    """The calls of the whole training; where gradients overflow, one pixel is infinite."""
    rng = np.random.default_rng(window)
    for step in range(STEPS):
        for i in range(window):
            images = rng.standard_normal((ROWS, 64)).astype(np.float32)
            overflows = ((FIRST, 0), (LAST, window - 1), (MIDDLE, window // 2), (ALL, i))
            if any(step in steps and i == call for steps, call in overflows):
                images[3, 5] = np.inf
            labels = rng.integers(0, 10, ROWS)
            yield Call({"input": images, "labels": labels}, step, i == window - 1)


@pytest.fixture(params=NAMES)
def folder(request: pytest.FixtureRequest, form: str, tmp_path: Path) -> Path:
    """Each scaled folder of the digits network, in each form."""
    return scaled(request.param, form, tmp_path)


def scaled(name: str, form: str, folder: Path) -> Path:
    scale_as(form, FOLDERS / name, folder / name, gs.DynamicLossScale(INITIAL, PERIOD))
    return folder / name


class Expected:
    """The rule of the loss scale, which runs where a window begins, on what the window before left behind."""

    def __init__(self) -> None:
        self.rule = gs.DynamicLossScale(INITIAL, PERIOD)
        self.begins, self.finite = True, -1.0

    def train(self, batch: Arrays) -> tuple[float, float, float]:
        """The scale, the good steps, and whether the window is finite, after a call."""
        if self.begins:
            if self.finite >= 0:
                self.rule.update(np.float32(1 if self.finite else np.nan))
            self.begins, self.finite = False, 1.0
        self.finite *= bool(np.isfinite(batch["input"]).all())
        return float(self.rule()), float(self.rule.num_good_steps), self.finite


def assert_close(actual: Arrays, expected: Arrays, folder: Path) -> None:
    """The same bits, but for clipping: the runtime sums the norm in an order that differs from session to session."""
    if "clip" not in folder.name:
        assert_all_same_bits(actual, expected)
        return
    for name, value in expected.items():
        np.testing.assert_allclose(actual[name], value, rtol=0, atol=1e-5 * np.abs(value).max(), err_msg=name)


@pytest.mark.sample(2)
@pytest.mark.parametrize("window", [1, 2, 4])
def test_training_is_that_of_the_original(folder: Path, window: int, tmp_path: Path) -> None:
    session, original, expected = TrainingSession(folder), TrainingSession(FOLDERS / folder.name), Expected()
    for each in (session, original) if "sgd" in folder.name else ():
        each.optimizer.set_learning_rate(0.1)
    start, skipped = session.weights(), 0
    for call in calls(window):
        (found,) = session.train(call.batch)
        assert session.loss_scale() == expected.train(call.batch)
        if call.step not in SKIPPED:
            (loss,) = original.train(call.batch)
            np.testing.assert_allclose(found, loss, rtol=1e-5)
        if not call.ends:
            continue
        before, gradients = session.save(tmp_path / "before").read_bytes(), session.gradients()
        session.step()
        after = session.save(tmp_path / "after").read_bytes()
        assert (before == after) == (not expected.finite) == (call.step in SKIPPED), f"step {call.step}"
        if expected.finite:
            original.step()
        else:
            assert_all_same_bits(session.gradients(), gradients)
            skipped += 1
        expected.begins = True
        assert_close(session.weights(), original.weights(), folder)
    assert skipped == len(SKIPPED)
    assert np.abs(session.weights()["fc1.weight"] - start["fc1.weight"]).max() > 1e-3


@pytest.mark.parametrize("overflow", [False, True])
@pytest.mark.parametrize("calls_before", [1, 2, 3])
def test_an_interrupted_window_ends_where_it_is_saved(
    calls_before: int, overflow: bool, form: str, tmp_path: Path
) -> None:
    """The gradients of the window are in no checkpoint: what was seen of them decides, and a new window begins."""
    folder = scaled("digits_adamw", form, tmp_path)
    session, original, expected = TrainingSession(folder), TrainingSession(FOLDERS / folder.name), Expected()
    batches = [call.batch for call in calls(4) if call.step not in SKIPPED]
    bad = next(call.batch for call in calls(4) if call.step in FIRST)

    def run_window(count: int) -> None:
        for _ in range(count):
            batch = batches.pop()
            session.train(batch)
            original.train(batch)
            expected.train(batch)
        session.step()
        original.step()
        expected.begins = True

    for interruption in range(4):
        run_window(4)
        run_window(4)
        for i in range(calls_before):
            batch = bad if overflow and i == 0 and interruption % 2 else batches.pop()
            session.train(batch)
            assert session.loss_scale() == expected.train(batch)
        session, expected.begins = TrainingSession(folder, session.save(tmp_path / "saved")), True
    run_window(1)
    assert session.loss_scale() == (float(expected.rule()), float(expected.rule.num_good_steps), expected.finite)
    assert_close(session.weights(), original.weights(), folder)


# --- policies of peers: one decision for each window, as the eager form makes it for each step ------------------------

NAME = "digits_sgd"
POLICIES = {
    "torch": gs.presets.torch(increment_period=3),
    "deepspeed": gs.presets.deepspeed(initial_loss_scale=16, increment_period=3),
    "megatron": gs.presets.megatron(initial_loss_scale=64, increment_period=2),
    "paddle": gs.presets.paddle(increment_period=2, hysteresis=2),
    "flax": gs.presets.flax(increment_period=2),
    "reset": gs.DynamicLossScale(8, 3, max_consecutive_skips=2, on_stuck="reset"),
}


def batch(finite: bool) -> Arrays:
    feeds = sample(NAME)
    if not finite:
        feeds["input"] = feeds["input"].copy()
        feeds["input"].flat[0] = np.inf
    return feeds


def value(session: TrainingSession, name: str) -> float:
    return float(session.state.get_parameter(name).data.numpy())


@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("name", POLICIES)
def test_one_decision_for_each_window(name: str, window: int, form: str, tmp_path: Path) -> None:
    eager = gs.DynamicLossScale.from_config(POLICIES[name].get_config())
    scale_as(form, FOLDERS / NAME, tmp_path / "scaled", POLICIES[name])
    session = TrainingSession(tmp_path / "scaled", evaluates=True)
    rng = np.random.default_rng(0)
    states = {"current_loss_scale": eager()}
    moved = set()
    for finite in rng.random(60) > 0.35:
        for call in range(window):
            session.train(batch(bool(finite) or call > 0))
            # The rule runs where a window begins, on what the window before left behind.
            assert value(session, "current_loss_scale") == states["current_loss_scale"]
        if eager.rule.on_stuck != "hold":
            assert value(session, "stuck") == states.get("stuck", 0)
        session.step()
        eager.update(np.float32(1 if finite else np.nan))
        moved.add(float(eager()))
        states = {"current_loss_scale": eager(), "stuck": float(eager.stuck)}
    assert len(moved) > 2


@pytest.mark.full
def test_further_counts_are_in_the_checkpoint_and_resume(tmp_path: Path) -> None:
    scaled = tmp_path / "scaled"
    scale_artifacts(FOLDERS / NAME, scaled, POLICIES["deepspeed"])
    session = TrainingSession(scaled)
    train(session, [batch(finite) for finite in (True, False, True)])
    assert (value(session, "hysteresis_left"), value(session, "good_steps")) == (1, -1)
    saved = session.save(tmp_path / "saved")
    resumed = resume_artifacts(scaled, saved)
    assert (resumed.loss_scale, resumed.good_steps, resumed.added) == (16, -1, ())
    again = TrainingSession(scaled)
    for each in (session, again):
        train(each, [batch(False)] * 2)
    for name in ("current_loss_scale", "good_steps", "hysteresis_left", "window_finite", "stuck"):
        assert value(session, name) == value(again, name)
    assert value(again, "current_loss_scale") == 8


def test_a_step_that_shall_be_accepted_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidLossScaleError, match="no effect in a training session"):
        scale_artifacts(FOLDERS / NAME, tmp_path / "scaled", gs.DynamicLossScale(on_stuck="accept"))
    assert not (tmp_path / "scaled").exists()
