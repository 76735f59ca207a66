"""ReplicatedSession in real processes: the run of one process on the whole batch, for any number of replicas."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import graphscale as gs
from tests.conftest import Arrays, assert_all_same_bits
from tests.replicas.mpi import mpiexec, needs_mpi, program
from tests.replicas.steps import DIGITS, digits_batches, digits_state, scaled

pytestmark = [needs_mpi, pytest.mark.mpi]

BATCH = 24
OVERFLOW = 7  # in the last image of this batch, which the last replica alone has
_GRADIENT_BYTES = 4 * (64 * 128 + 128 + 128 * 64 + 64 + 64 * 10 + 10)


def run(folder: Path, count: int, **options: Any) -> tuple[list[list[Any]], Arrays, dict[str, int]]:
    """Train on so many replicas: a row a step, the last state, and the traffic of rank 0."""
    chosen = {"steps": 40, "batch": BATCH, "overflow_at": [OVERFLOW], **options}
    done = mpiexec(count, program("digits", str(folder), json.dumps(chosen)))
    assert done.returncode == 0, done.stderr
    told = json.loads((folder / f"rows-{count}.json").read_text())
    with np.load(folder / f"final-{count}.npz") as stored:
        return told["rows"], dict(stored), told["traffic"]


def alone(steps: int, target: str = "onnx") -> tuple[list[list[Any]], Arrays]:
    """The same run in one process, on whole batches."""
    step = scaled(DIGITS, gs.DynamicLossScale(2.0**15, increment_period=20), target=target)
    rows = []
    with gs.Session(step, state=digits_state(step)) as session:
        for batch in digits_batches(steps, BATCH, [OVERFLOW]):
            result = session.step(batch)
            rows.append([session.loss_scale, session.good_steps, result.applied, float(result["loss"])])
        return rows, session.state_dict()


def assert_same_run(rows: list[list[Any]], state: Arrays, expected: tuple[list[list[Any]], Arrays]) -> None:
    assert [row[:3] for row in rows] == [row[:3] for row in expected[0]]
    losses = [(row[3], other[3]) for row, other in zip(rows, expected[0], strict=True)]
    np.testing.assert_allclose(*zip(*losses, strict=True), rtol=1e-5)
    assert set(state) == set(expected[1])
    for name, array in expected[1].items():
        np.testing.assert_allclose(state[name], array, rtol=0, atol=1e-5, err_msg=name)


def test_four_replicas_train_as_one_process_does_for_200_steps(tmp_path: Path) -> None:
    rows, state, _ = run(tmp_path, 4, steps=200)
    expected = alone(200)
    assert_same_run(rows, state, expected)
    assert [number for number, row in enumerate(rows) if not row[2]] == [OVERFLOW]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_any_number_of_replicas_gives_the_same_run(tmp_path: Path, count: int) -> None:
    rows, state, _ = run(tmp_path, count)
    assert_same_run(rows, state, alone(40))


def test_one_replica_is_a_session_bit_for_bit(tmp_path: Path) -> None:
    rows, state, _ = run(tmp_path, 1)
    expected = alone(40)
    assert str(rows) == str(expected[0])  # NaN is not equal to itself
    assert_all_same_bits(state, expected[1])


@pytest.mark.training
def test_state_that_is_written_in_place(tmp_path: Path) -> None:
    rows, state, _ = run(tmp_path, 2, target="ort-training")
    assert_same_run(rows, state, alone(40, "ort-training"))


def test_stages_change_no_bit(tmp_path: Path) -> None:
    rows, state, traffic = run(tmp_path, 2)
    overlapped = run(tmp_path, 2, session={"stages": 3})
    assert overlapped[0] == rows and overlapped[2]["bytes"] == traffic["bytes"]
    assert overlapped[2]["messages"] == 3 * 40
    assert_all_same_bits(overlapped[1], state)


@pytest.mark.parametrize("size", [10_000, "1MiB"])
def test_messages_are_bounded_and_move_each_gradient_once(tmp_path: Path, size: int | str) -> None:
    traffic = run(tmp_path, 2, session={"bucket_bytes": size})[2]
    assert traffic["bytes"] == 40 * _GRADIENT_BYTES
    assert traffic["messages"] == 40 * (1 if size == "1MiB" else -(-_GRADIENT_BYTES // 10_000))


def test_state_is_resumed_with_another_number_of_replicas(tmp_path: Path) -> None:
    whole = run(tmp_path, 4)
    run(tmp_path, 4, steps=20, save_at=19)
    for count in (1, 2, 3):
        rows, state, _ = run(tmp_path, count, first=20, load="state.safetensors")
        assert_same_run(rows, state, (whole[0][20:], whole[1]))
    # And in a session of one process, which knows nothing of replicas.
    step = scaled(DIGITS, gs.DynamicLossScale(2.0**15, increment_period=20))
    with gs.Session(step, state=digits_state(step)) as session:
        assert session.load_state(tmp_path / "state.safetensors") == {"note": "kept"}
        for batch in digits_batches(40, BATCH, [OVERFLOW])[20:]:
            session.step(batch)
        for name, array in session.state_dict().items():
            np.testing.assert_allclose(array, whole[1][name], rtol=0, atol=1e-5)


def test_the_trained_step_is_exported(tmp_path: Path) -> None:
    _, state, _ = run(tmp_path, 2)
    with gs.Session(tmp_path / "trained.onnx") as session:
        assert_all_same_bits(state, session.state_dict())


@pytest.mark.parametrize("count", [2, 3, 4])
def test_sharded_updates_give_the_same_run(tmp_path: Path, count: int) -> None:
    rows, state, traffic = run(tmp_path, count, session={"sharded": True})
    assert_same_run(rows, state, alone(40))
    # Gradients are scattered once a step, weights, each in whole units of 64 bytes, gathered where it is applied.
    weights = sum(-(-4 * size // 64) * 64 for size in (64 * 128, 128, 128 * 64, 64, 64 * 10, 10))
    assert traffic["bytes"] == 40 * _GRADIENT_BYTES + 39 * weights


@pytest.mark.training
def test_sharded_state_that_is_written_in_place_in_stages(tmp_path: Path) -> None:
    options = {"sharded": True, "stages": 2, "bucket_bytes": 10_000}
    rows, state, _ = run(tmp_path, 3, target="ort-training", session=options)
    assert_same_run(rows, state, alone(40, "ort-training"))


def test_sharded_state_is_resumed_with_another_number_of_replicas_and_whole(tmp_path: Path) -> None:
    whole = run(tmp_path, 4)
    run(tmp_path, 4, steps=20, save_at=19, session={"sharded": True})
    for count, sharded in ((3, True), (2, False), (1, True)):
        rows, state, _ = run(tmp_path, count, first=20, load="state.safetensors", session={"sharded": sharded})
        assert_same_run(rows, state, (whole[0][20:], whole[1]))


@pytest.mark.parametrize("name", ["pytorch/attention_adamw_clip", "jax/mlp_adamw_clip", "jax/mlp_sgd"])
def test_clipping_by_the_norm_of_all_gradients_sees_all_shares(tmp_path: Path, name: str) -> None:
    done = mpiexec(3, program("models", str(tmp_path), name))
    assert done.returncode == 0, done.stderr
    told = json.loads((tmp_path / "told.json").read_text())
    assert told["owners"] > 1 and told["largest_share"] < 0.8
    with np.load(tmp_path / "whole.npz") as whole, np.load(tmp_path / "sharded.npz") as sharded:
        assert set(whole.files) == set(sharded.files)
        for key in whole.files:
            np.testing.assert_allclose(sharded[key], whole[key], rtol=1e-6, atol=1e-7, err_msg=key)
