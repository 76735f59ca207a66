"""Checkpoints, read and written without the training build, and checked against it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from graphscale.errors import ModelFileError, OutputError, UnsupportedModelError
from graphscale.files.ort_checkpoint import (
    Checkpoint,
    OptimizerGroup,
    is_checkpoint,
    read_checkpoint,
    write_checkpoint,
)
from tests.conftest import assert_all_same_bits
from tests.ort.artifacts.training_session import FOLDERS, LOADABLE, TrainingSession, batches, sample, train

pytestmark = pytest.mark.sample(1)

DIGITS = FOLDERS / "digits_adamw" / "checkpoint"
PROPERTIES = {"epoch": 3, "best": 0.5, "run": "first try"}


def assert_equal(actual: Checkpoint, expected: Checkpoint) -> None:
    """The same parameters in the same order, bit for bit, and the same of all else."""
    assert list(actual.trainable) == list(expected.trainable)
    assert list(actual.frozen) == list(expected.frozen)
    assert_all_same_bits(actual.parameters, expected.parameters)
    assert actual.properties == expected.properties
    assert list(actual.groups) == list(expected.groups)
    for name, group in expected.groups.items():
        found = actual.groups[name]
        assert (found.step, found.initial_learning_rate) == (group.step, group.initial_learning_rate)
        assert list(found.moments) == list(group.moments)
        for parameter, moments in group.moments.items():
            assert_all_same_bits(found.moments[parameter], moments)
    assert (actual.version, actual.nominal) == (expected.version, expected.nominal)


@pytest.mark.parametrize("name", LOADABLE)
def test_a_generated_checkpoint_survives_reading_and_writing(name: str, tmp_path: Path) -> None:
    checkpoint = read_checkpoint(FOLDERS / name / "checkpoint")
    assert checkpoint.trainable and checkpoint.version == 2 and not checkpoint.nominal
    assert ("norm1.running_mean" in checkpoint.frozen) == (name == "conv_adamw")
    write_checkpoint(tmp_path / "copy", checkpoint)
    assert_equal(read_checkpoint(tmp_path / "copy"), checkpoint)


def test_every_dtype_shape_and_property_survives(tmp_path: Path) -> None:
    dtypes = ["float16", "float32", "float64", "bool"]
    dtypes += [f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)]
    frozen = {dtype: np.arange(6).reshape(2, 3).astype(dtype) for dtype in dtypes}
    frozen |= {"scalar": np.asarray(7, np.float32), "empty": np.zeros((0, 3), np.float32)}
    moments = {"w": {"momentum0": np.full(2, 0.5, np.float32), "momentum1": np.full(2, np.nan, np.float32)}}
    checkpoint = Checkpoint(
        {"w": np.asarray([1, -0.0], np.float32)}, frozen, dict(PROPERTIES), {"group0": OptimizerGroup(5, 0.25, moments)}
    )
    write_checkpoint(tmp_path / "checkpoint", checkpoint)
    assert is_checkpoint(tmp_path / "checkpoint")
    assert_equal(read_checkpoint(tmp_path / "checkpoint"), checkpoint)


@pytest.mark.training
@pytest.mark.parametrize("name", LOADABLE)
def test_a_rewritten_checkpoint_continues_a_training_exactly(name: str, tmp_path: Path) -> None:
    session = TrainingSession(FOLDERS / name)
    train(session, batches(name, 3))
    for key, value in PROPERTIES.items():
        session.state.add_property(key, value)
    saved = read_checkpoint(session.save(tmp_path / "saved"))
    (group,) = saved.groups.values()
    assert (group.step, saved.properties) == (3, PROPERTIES)
    assert any(np.any(moment) for moments in group.moments.values() for moment in moments.values()) == (
        "sgd" not in name
    )
    frozen = {**saved.frozen, "extra": np.asarray(9, np.float32)}
    write_checkpoint(tmp_path / "rewritten", dataclasses.replace(saved, frozen=frozen))
    continued = TrainingSession(FOLDERS / name, tmp_path / "rewritten")
    assert continued.parameters()["extra"] == 9
    assert not continued.state.get_parameter("extra").requires_grad
    assert {key: continued.state.get_property(key) for key in PROPERTIES} == PROPERTIES
    session = TrainingSession(FOLDERS / name, tmp_path / "saved")
    losses = [train(each, [sample(name)] * 3) for each in (session, continued)]
    np.testing.assert_allclose(*losses, rtol=1e-6)
    for parameter, value in session.parameters().items():
        # Clipping sums in an order that differs from session to session.
        np.testing.assert_allclose(
            continued.parameters()[parameter], value, rtol=1e-5 if "clip" in name else 0, atol=1e-8 * ("clip" in name)
        )


def test_no_truncated_file_is_read(tmp_path: Path) -> None:
    data, path = DIGITS.read_bytes(), tmp_path / "checkpoint"
    for length in (*range(0, len(data), 101), *range(len(data) - 70, len(data))):
        path.write_bytes(data[:length])
        with pytest.raises(ModelFileError, match=r"checkpoint"):
            read_checkpoint(path)


@pytest.mark.parametrize(
    "content", [b"", b"ODTC", b"no checkpoint at all", b"\0\0\0\0ODTC", b"\xff" * 4 + b"ODTC" * 50]
)
def test_garbage_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "checkpoint").write_bytes(content)
    with pytest.raises(ModelFileError, match=str(tmp_path / "checkpoint")):
        read_checkpoint(tmp_path / "checkpoint")


def test_a_random_byte_is_refused_or_read(tmp_path: Path) -> None:
    """A damaged file raises the error that says so, and no other."""
    data, path, rng = DIGITS.read_bytes(), tmp_path / "checkpoint", np.random.default_rng(0)
    refused = 0
    # The tables are at the beginning and the end; what lies between is mostly numbers.
    for _ in range(300):
        damaged = bytearray(data)
        damaged[int(rng.integers(8, 400))] = int(rng.integers(256))
        path.write_bytes(damaged)
        try:
            read_checkpoint(path)
        except (ModelFileError, UnsupportedModelError):
            refused += 1
    assert refused > 30


def test_missing_files_and_folders_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="No such file"):
        read_checkpoint(tmp_path / "checkpoint")
    with pytest.raises(OutputError, match="missing does not exist; create it"):
        write_checkpoint(tmp_path / "missing" / "checkpoint", read_checkpoint(DIGITS))
