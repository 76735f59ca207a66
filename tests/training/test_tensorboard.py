"""Event files, read back through tensorboardX's own protocol buffers."""

from __future__ import annotations

import dataclasses
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from graphscale.errors import OutputError, TrainingError
from graphscale.training.record import StepRecord
from graphscale.training.run import Run
from graphscale.training.schedules import LearningRate
from graphscale.training.tensorboard import TensorBoard, check_logdir
from tests.training.runs import make_digits, options, train

needs_tensorboard = pytest.mark.usefixtures("installed")


@pytest.fixture
def installed() -> None:
    pytest.importorskip("tensorboardX", reason="writes event files with tensorboardX")


def events(path: Path) -> list[Any]:
    """The events of a file: each with its length in 8 bytes, a checksum of 4 before it and after it."""
    from tensorboardX.proto.event_pb2 import Event

    data, found = path.read_bytes(), []
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        found.append(Event.FromString(data[12 : 12 + length]))
        data = data[16 + length :]
    return found


def scalars(path: Path) -> dict[int, dict[str, float]]:
    return {
        event.step: {value.tag: value.simple_value for value in event.summary.value}
        for event in events(path)
        if event.HasField("summary")
    }


@needs_tensorboard
def test_a_resumed_run_purges_what_came_after_its_checkpoint(tmp_path: Path) -> None:
    make_digits(tmp_path)
    chosen = options(
        tmp_path,
        learning_rate=LearningRate(0.05),
        batch_size=16,
        logdir=tmp_path / "new" / "logs",
        checkpoint_dir=tmp_path / "kept",
        resume=True,
    )
    records, _ = train(chosen, stop_after=7)
    first = {*(tmp_path / "new" / "logs").iterdir()}
    more, _ = train(chosen)
    (path,) = first
    (second,) = {*(tmp_path / "new" / "logs").iterdir()} - first
    logged = scalars(path)
    assert list(logged) == list(range(1, 8))
    assert list(scalars(second)) == list(range(8, 20))
    for record in [*records, *more]:
        values = {**logged, **scalars(second)}[record.step]
        expected = {name: value for name, value in record.to_row().items() if name not in ("step", "epoch")}
        assert list(values) == list(expected)
        assert np.array_equal(np.float32([*values.values()]), np.float32([*expected.values()]), equal_nan=True)
    start = [event for event in events(second) if event.HasField("session_log")]
    assert [(event.step, event.session_log.status) for event in start] == [(8, 1)]  # START: later steps are purged
    assert not any(event.HasField("session_log") for event in events(path))


@needs_tensorboard
def test_where_event_files_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(OutputError, match="file is a file, not a folder"):
            check_logdir(path)
    check_logdir(tmp_path / "new" / "logs")
    assert [path.name for path in tmp_path.iterdir()] == ["file"], "nothing was written"


@needs_tensorboard
def test_a_full_disk_is_an_error_and_not_a_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorboardX import record_writer

    record = StepRecord(1, 1, 0.5, 8.0, 8.0, True)
    with Path("/dev/full").open("wb", buffering=0) as full:
        monkeypatch.setattr(record_writer, "open_file", lambda path: full)
        with pytest.raises(OutputError, match=r"cannot write to --logdir .*: No space left on device"):
            _log_much(tmp_path, record)


def _log_much(folder: Path, record: StepRecord) -> None:
    log = TensorBoard(folder)
    for step in range(1, 1000):
        log.write(dataclasses.replace(record, step=step))


def test_without_tensorboardx(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_digits(tmp_path)
    monkeypatch.setitem(__import__("sys").modules, "tensorboardX", None)
    chosen = options(tmp_path, learning_rate=LearningRate(0.05), logdir=tmp_path / "logs")
    with pytest.raises(TrainingError, match=r"--logdir needs tensorboardX.*pip install 'graphscale\[tensorboard\]'"):
        Run(chosen)
    assert not (tmp_path / "logs").exists()
