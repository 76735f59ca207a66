"""Metrics: written records are read again, a cut file continues with the same bytes, damage is named; event files."""

from __future__ import annotations

import dataclasses
import json
import math
import struct
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphscale.errors import OutputError, TrainingError
from graphscale.session import GradientRange
from graphscale.training.metrics import MetricsFile, check_metrics, read_metrics
from graphscale.training.record import StepRecord
from graphscale.training.run import Run
from graphscale.training.schedules import LearningRate
from graphscale.training.tensorboard import TensorBoard, check_logdir
from tests.training.runs import make_digits, train
from tests.training.runs import options as run_options

RECORD = StepRecord(step=1, epoch=1, loss=2.5, loss_scale=8.0, next_loss_scale=16.0, applied=True, good_steps=3)
SUFFIXES = ("jsonl", "csv")

NUMBERS, COUNTS = st.floats(width=64) | st.floats(width=32), st.integers(1, 10**9)
SCALES = st.floats(0, exclude_min=True, allow_infinity=False)
OUTPUTS = st.lists(
    st.sampled_from(["accuracy", "norm", "step", "loss", "ranges", "activation", 'a "b", c', "onnx::loss::2"]),
    unique=True,
)
TELEMETRY = {
    "cause": st.sampled_from([None, "nan", "inf"]),
    "offender": st.sampled_from([None, "grad.fc1.weight", 'an, "odd" name']),
    "zero_fraction": st.floats(0, 1),
}
RANGE = st.builds(GradientRange, st.floats(0), st.floats(0, 1), st.floats(0, 1))
RANGES = {"ranges": st.dictionaries(st.sampled_from(["grad.fc1.weight", 'an, "odd" name', "steps"]), RANGE)}


@pytest.fixture(params=SUFFIXES)
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return tmp_path / f"run.{request.param}"


def write(path: Path, records: list[StepRecord], resume_at: int | None = None) -> int:
    file = MetricsFile(path, resume_at)
    for record in records:
        file.write(record)
    size = file.sync()
    file.close()
    return size


@st.composite
def runs(draw: st.DrawFn) -> list[StepRecord]:
    """The records of a run, which all have the same columns."""
    names = draw(OUTPUTS)
    record = st.builds(
        StepRecord,
        step=COUNTS,
        epoch=COUNTS,
        loss=NUMBERS,
        loss_scale=SCALES,
        next_loss_scale=SCALES,
        good_steps=st.integers(0, 2**31),
        learning_rate=st.just(draw(st.none() | NUMBERS)),
        outputs=st.tuples(*[NUMBERS] * len(names)).map(lambda numbers: dict(zip(names, numbers, strict=True))),
        **(TELEMETRY if draw(st.booleans()) else {}),
        **(RANGES if draw(st.booleans()) else {}),
        **({"activation": st.sampled_from(["", "relu", 'an, "odd" name'])} if draw(st.booleans()) else {}),
    )
    return draw(st.lists(record, min_size=1, max_size=4))


@pytest.mark.full
@given(records=runs(), suffix=st.sampled_from(SUFFIXES))
def test_what_is_written_is_read_back(records: list[StepRecord], suffix: str, tmp_path_factory: Any) -> None:
    path = tmp_path_factory.mktemp("metrics") / f"run.{suffix}"
    assert write(path, records) == path.stat().st_size
    assert repr(read_metrics(path)) == repr(records)  # repr: NaN equals itself there


def test_every_line_is_strict_json(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    losses = [math.nan, math.inf, -math.inf, float(np.float32(0.1))]
    write(path, [StepRecord(1, 1, loss, 8.0, 4.0, False, outputs={"norm": math.nan}) for loss in losses])

    def refuse(text: str) -> Any:
        raise AssertionError(f"{text} is not JSON")

    rows = [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]
    assert [row["loss"] for row in rows] == ["NaN", "Infinity", "-Infinity", 0.10000000149011612]
    assert rows[0] == {
        "step": 1,
        "epoch": 1,
        "loss": "NaN",
        "loss_scale": 8.0,
        "next_loss_scale": 4.0,
        "applied": False,
        "good_steps": 0,
        "learning_rate": None,
        "norm": "NaN",
    }


def test_csv_is_as_other_tools_read_it(tmp_path: Path) -> None:
    path = tmp_path / "run.csv"
    write(path, [RECORD])
    assert path.read_text() == (
        "step,epoch,loss,loss_scale,next_loss_scale,applied,good_steps,learning_rate\n1,1,2.5,8.0,16.0,true,3,\n"
    )
    found = np.genfromtxt(path, delimiter=",", names=True, dtype=None, encoding="utf-8")
    assert found["loss"] == 2.5


def test_a_cut_file_goes_on_with_the_same_bytes(path: Path) -> None:
    records = [StepRecord(step, 1, 1 / step, 8.0, 8.0, True, step) for step in range(1, 30)]
    whole, cut = path.with_stem("whole"), path.with_stem("cut")
    write(whole, records)
    size = write(cut, records[:11])
    with cut.open("ab") as file:
        file.write(b"half a li" * 1000)  # what a killed process wrote after its last checkpoint
    write(cut, records[11:], resume_at=size)
    assert cut.read_bytes() == whole.read_bytes()


@pytest.mark.parametrize("resume_at", [None, 0])
def test_a_run_replaces_the_file_of_another(resume_at: int | None, path: Path) -> None:
    path.write_text("something else\nhalf a li")
    write(path, [RECORD], resume_at)
    assert read_metrics(path) == [RECORD]


def test_an_unfinished_line_is_left_out(path: Path) -> None:
    write(path, [RECORD, RECORD])
    path.write_bytes(path.read_bytes()[:-1])
    assert read_metrics(path) == [RECORD]
    path.write_bytes(b"")
    assert read_metrics(path) == []


def test_a_file_that_is_not_that_of_the_checkpoint(path: Path) -> None:
    size = write(path, [RECORD])
    for wrong in (size + 1, size - 1):
        with pytest.raises(TrainingError, match=f"cannot go on with the metrics in .*byte {wrong}"):
            check_metrics(path, wrong)
    with pytest.raises(TrainingError, match=r"cannot go on with the metrics in .*No such file"):
        check_metrics(path.with_stem("other"), size)
    assert path.stat().st_size == size, "nothing was written"


def test_other_columns_in_the_file_of_the_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "run.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(TrainingError, match="has the columns a, b, not step, epoch"):
        write(path, [RECORD], resume_at=8)


def test_where_metrics_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"--metrics .*run.txt: expected a name that ends in \.jsonl or \.csv"):
        check_metrics(tmp_path / "run.txt")
    with pytest.raises(OutputError, match="does not exist; create it"):
        check_metrics(tmp_path / "nowhere" / "run.csv")
    (tmp_path / "run.csv").mkdir()
    with pytest.raises(OutputError, match="is a folder"):
        check_metrics(tmp_path / "run.csv")


GOOD = '{"step": 1, "epoch": 1, "loss": 1, "loss_scale": 1, "next_loss_scale": 1, "applied": true, "good_steps": 0}\n'
HEADER = "step,epoch,loss,loss_scale,next_loss_scale,applied,good_steps\n"
DAMAGED = {
    "text": ("jsonl", "a line\n", "line 1 is no row of metrics"),
    "second": ("jsonl", GOOD + "{}\n", "line 2 is no row of metrics: step is missing"),
    "a-list": ("jsonl", "[1]\n", "line 1 .*not a JSON object"),
    "deep": ("jsonl", "[" * 100_000 + "\n", "line 1 is no row"),
    "not-utf8": ("jsonl", "\udcff\n", "line 1 is no row"),
    "flag": ("jsonl", GOOD.replace("true", "1"), "applied is 1"),
    "word": ("jsonl", GOOD.replace('"loss": 1', '"loss": "low"'), "loss is 'low'"),
    "half-a-step": ("jsonl", GOOD.replace('"step": 1', '"step": 1.5'), "step is 1.5"),
    "null": ("jsonl", GOOD.replace('"loss": 1', '"loss": null'), "loss is missing"),
    "true": ("jsonl", GOOD.replace('"loss": 1', '"loss": true'), "loss is True"),
    "no-header": ("csv", "1,1,2.5,8,8,true,0\n1,1,2.5,8,8,true,0\n", "line 2 .*step is missing"),
    "cells": ("csv", HEADER + "1,1\n", "line 2 is no row"),
    "csv-flag": ("csv", HEADER + "1,1,2.5,8,8,yes,0\n", "line 2 .*applied is 'yes'"),
    "quote": ("csv", HEADER + '1,1,"2.5,8,8,true,0\n', "line 2 is no row"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damage_is_named(case: str, tmp_path: Path) -> None:
    suffix, text, message = DAMAGED[case]
    path = tmp_path / f"run.{suffix}"
    path.write_text(text, encoding="utf-8", errors="surrogateescape")
    with pytest.raises(TrainingError, match=message) as error:
        read_metrics(path)
    assert str(path) in str(error.value)


# --- event files, read back through tensorboardX's own protocol buffers -----------------------------------------------

needs_tensorboard = pytest.mark.skipif(not find_spec("tensorboardX"), reason="writes event files with tensorboardX")


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


@pytest.mark.full
@needs_tensorboard
def test_a_resumed_run_purges_what_came_after_its_checkpoint(tmp_path: Path) -> None:
    make_digits(tmp_path)
    chosen = run_options(
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
    chosen = run_options(tmp_path, learning_rate=LearningRate(0.05), logdir=tmp_path / "logs")
    with pytest.raises(TrainingError, match=r"--logdir needs tensorboardX.*pip install 'tensorboardx>="):
        Run(chosen)
    assert not (tmp_path / "logs").exists()
