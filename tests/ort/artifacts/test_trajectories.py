"""Scaled folders of the digits network against the float64 reference, and across save and load."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import graphscale as gs
from graphscale.ort.artifacts import scale_artifacts
from tests.conftest import Arrays, assert_all_same_bits
from tests.ort.artifacts.reference import AdamW, Clip, Digits, Rule, Sgd
from tests.ort.artifacts.training_session import FOLDERS, TrainingSession

pytestmark = pytest.mark.training

STEPS, ROWS, INITIAL, PERIOD = 60, 16, 2.0**10, 3
# Optimizer steps with an overflow: in the window's first call, its last, one in between, and in all.
FIRST, LAST, MIDDLE, ALL = {0, 7, 20}, {12, 13, 41}, {25}, {33, 59}

OPTIMIZERS = {
    "digits_adamw": lambda: (AdamW(), None),
    "digits_adamw_clip": lambda: (AdamW(weight_decay=0.01), Clip(1.0)),
    "digits_sgd": lambda: (Sgd(learning_rate=0.1), None),
}


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of the module: a batch, and whether the optimizer steps after it."""

    batch: Arrays
    step: int
    ends: bool


def calls(window: int) -> Iterator[Call]:
    """The calls of the whole training; where gradients overflow, one pixel is infinite."""
    rng = np.random.default_rng(window)
    for step in range(STEPS):
        for i in range(window):
            images = rng.standard_normal((ROWS, 64)).astype(np.float32)
            overflows = (
                (step in FIRST and i == 0)
                or (step in LAST and i == window - 1)
                or (step in MIDDLE and i == window // 2)
                or step in ALL
            )
            if overflows:
                images[3, 5] = np.inf
            labels = rng.integers(0, 10, ROWS)
            yield Call({"input": images, "labels": labels}, step, i == window - 1)


@pytest.fixture(scope="module", params=OPTIMIZERS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Each scaled folder of the digits network."""
    return scaled(request.param, tmp_path_factory.mktemp(request.param))


def scaled(name: str, folder: Path) -> Path:
    """A scaled folder."""
    out = folder / name
    scale_artifacts(FOLDERS / name, out, gs.DynamicLossScale(INITIAL, PERIOD))
    return out


def reference(folder: Path, weights: Arrays) -> Digits:
    """The reference for a folder."""
    optimizer, clip = OPTIMIZERS[folder.name]()
    return Digits({k: v.astype(np.float64) for k, v in weights.items()}, optimizer, Rule(INITIAL, PERIOD), clip)


def assert_close(actual: Arrays, expected: Arrays, step: int) -> None:
    """Equal within 1e-5 of each tensor's largest element."""
    for name, value in expected.items():
        error = np.abs(actual[name] - value).max() / np.abs(value).max()
        assert error < 1e-5, f"{name} after step {step}: {error:.1e}"


@pytest.mark.sample(3)
@pytest.mark.parametrize("window", [1, 2, 4])
def test_training_is_that_of_the_reference(folder: Path, window: int, tmp_path: Path) -> None:
    session = TrainingSession(folder)
    start = session.weights()
    expected = reference(folder, start)
    session.optimizer.set_learning_rate(expected.optimizer.learning_rate)
    skipped = applied = 0
    for call in calls(window):
        loss = expected.train(call.batch["input"], call.batch["labels"])
        (found,) = session.train(call.batch)
        np.testing.assert_allclose(found, loss, rtol=1e-5)
        assert session.loss_scale() == (expected.rule.scale, expected.rule.good_steps, expected.finite)
        if not call.ends:
            continue
        before, gradients = session.save(tmp_path / "before").read_bytes(), session.gradients()
        session.step()
        expected.step()
        after = session.save(tmp_path / "after").read_bytes()
        assert (before == after) == (not expected.finite), f"step {call.step}"
        if not expected.finite:
            assert_all_same_bits(session.gradients(), gradients)
        skipped, applied = skipped + (not expected.finite), applied + bool(expected.finite)
        assert_close(session.weights(), expected.weights, call.step)
    assert skipped == len(FIRST | LAST | MIDDLE | ALL) and applied == STEPS - skipped == expected.optimizer.step
    assert np.abs(session.weights()["fc1.weight"] - start["fc1.weight"]).max() > 1e-3


@pytest.mark.sample(2)
@pytest.mark.parametrize("window", [1, 2, 4])
def test_saving_and_loading_between_windows_changes_nothing(folder: Path, window: int, tmp_path: Path) -> None:
    whole, pieces = TrainingSession(folder), TrainingSession(folder)
    for call in calls(window):
        np.testing.assert_allclose(pieces.train(call.batch), whole.train(call.batch), rtol=1e-5)
        assert pieces.loss_scale() == whole.loss_scale()
        if call.ends:
            whole.step()
            pieces.step()
            pieces = TrainingSession(folder, pieces.save(tmp_path / "saved"))
            if folder.name == "digits_adamw_clip":
                # The runtime sums the norm in an order that differs from session to session.
                assert_close(pieces.weights(), whole.weights(), call.step)
            else:
                assert_all_same_bits(pieces.parameters(), whole.parameters())


@pytest.mark.parametrize("overflow", [False, True])
@pytest.mark.parametrize("calls_before", [1, 2, 3])
def test_an_interrupted_window_ends_where_it_is_saved(calls_before: int, overflow: bool, tmp_path: Path) -> None:
    """The gradients of the window are in no checkpoint: what was seen of them decides, and a new window begins."""
    folder = scaled("digits_adamw", tmp_path)
    session = TrainingSession(folder)
    expected = reference(folder, session.weights())
    batches = [call.batch for call in calls(4) if call.step not in FIRST | LAST | MIDDLE | ALL]
    bad = next(call.batch for call in calls(4) if call.step in FIRST)
    for interruption in range(4):
        for _ in range(2):
            for _ in range(4):
                batch = batches.pop()
                session.train(batch)
                expected.train(batch["input"], batch["labels"])
            session.step()
            expected.step()
        for i in range(calls_before):
            batch = bad if overflow and i == 0 and interruption % 2 else batches.pop()
            session.train(batch)
            expected.train(batch["input"], batch["labels"])
        assert session.loss_scale() == (expected.rule.scale, expected.rule.good_steps, expected.finite)
        session = TrainingSession(folder, session.save(tmp_path / "saved"))
        expected.interrupt()
    batch = batches.pop()
    session.train(batch)
    expected.train(batch["input"], batch["labels"])
    assert session.loss_scale() == (expected.rule.scale, expected.rule.good_steps, expected.finite)
    session.step()
    expected.step()
    assert_close(session.weights(), expected.weights, 9)


def test_without_optimizer_state_the_loss_scale_goes_on(tmp_path: Path) -> None:
    folder = scaled("digits_adamw", tmp_path)
    session = TrainingSession(folder)
    for call in list(calls(1))[:9]:
        session.train(call.batch)
        session.step()
    resumed = TrainingSession(folder, session.save(tmp_path / "saved", optimizer=False))
    assert resumed.loss_scale() == session.loss_scale() != (INITIAL, 0.0, -1.0)
    batch = list(calls(1))[9].batch
    resumed.train(batch)
    session.train(batch)
    assert resumed.loss_scale() == session.loss_scale()
