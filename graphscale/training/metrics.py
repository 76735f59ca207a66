"""Metrics files: one row per step, as JSON lines or CSV, with the same bytes for the same run, interrupted or not.

Numbers outside of JSON are the texts "NaN", "Infinity" and "-Infinity" in JSON lines (as in Protocol Buffers' JSON),
and nan, inf and -inf in CSV. A missing value is null, or an empty cell. Ranges are an object by gradient, in CSV as a
text.
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
from pathlib import Path
from typing import Any

from graphscale.errors import OutputError, TrainingError, reporting
from graphscale.files.contents import parse_json, suffix_of
from graphscale.files.reading import read_file
from graphscale.files.writing import check_new_output
from graphscale.training.record import StepRecord

__all__ = ["MetricsFile", "check_metrics", "read_metrics"]

SUFFIXES = (".jsonl", ".csv")


def check_metrics(path: str | os.PathLike[str], resume_at: int | None = None) -> Path:
    """Check that metrics can be written to a file, without writing anything.

    Args:
        path: the file; its suffix is .jsonl or .csv.
        resume_at: the size of the file at the checkpoint; None for a new file.

    Raises:
        TrainingError: the suffix is unknown, or the file does not belong to the checkpoint.
        OutputError: the folder does not exist, or the path is a folder.
    """
    target = check_new_output(path)
    if target.suffix not in SUFFIXES:
        raise TrainingError(f"--metrics {path}: expected a name that ends in {' or '.join(SUFFIXES)}")
    if resume_at:
        with reporting(TrainingError, f"cannot go on with the metrics in {path}"), target.open("rb") as file:
            file.seek(resume_at - 1)
            last = file.read(1)
        if last != b"\n":
            raise TrainingError(
                f"cannot go on with the metrics in {path}: it has no row that ends at byte {resume_at}, as it had when "
                "the checkpoint was written; give the file of that run"
            )
    return target


class MetricsFile:
    """A metrics file, open for writing.

    Args:
        path: the file; its suffix decides the format. An existing file is replaced.
        resume_at: the size to cut the existing file to, before rows are appended; None for a new file.

    Raises:
        TrainingError, OutputError: as `check_metrics`; `write` and `sync` raise an OutputError if they cannot write.
    """

    def __init__(self, path: str | os.PathLike[str], resume_at: int | None = None) -> None:
        target = check_metrics(path, resume_at)
        self._path = path
        self._csv = target.suffix == ".csv"
        self._columns: list[str] | None = None
        try:
            # Unbuffered: a failing write raises at once, and close() cannot fail.
            self._file = target.open("r+b" if resume_at else "wb", buffering=0)
            if resume_at:
                if self._csv:
                    self._columns = next(csv.reader([self._file.readline().decode()]))
                self._file.truncate(resume_at)
                self._file.seek(resume_at)
        except (OSError, ValueError, StopIteration) as error:
            raise OutputError(f"cannot write {path}: {getattr(error, 'strerror', None) or error}") from error

    def write(self, record: StepRecord) -> None:
        """Append the row of a step, and pass it to the operating system.

        Raises:
            TrainingError: the columns differ from those of earlier rows.
        """
        with reporting(OutputError, f"cannot write {self._path}"):
            left = self._format(record.to_row()).encode()
            while left:
                left = left[self._file.write(left) :]

    def sync(self) -> int:
        """Sync the file to the disk, and return its size in bytes."""
        with reporting(OutputError, f"cannot write {self._path}"):
            os.fsync(self._file.fileno())
            return self._file.tell()

    def close(self) -> None:
        """Close the file; nothing is buffered."""
        self._file.close()

    def _format(self, row: dict[str, Any]) -> str:
        if not self._csv:
            return json.dumps(_json_value(row), allow_nan=False) + "\n"
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        if self._columns is None:
            self._columns = list(row)
            writer.writerow(row)
        if self._columns != list(row):
            raise TrainingError(f"{self._path} has the columns {', '.join(self._columns)}, not {', '.join(row)}")
        writer.writerow(map(_csv_cell, row.values()))
        return text.getvalue()


def _csv_cell(value: Any) -> Any:
    if isinstance(value, dict):
        return json.dumps(_json_value(value), allow_nan=False)
    return str(value).lower() if isinstance(value, bool) else value


def _json_value(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _json_value(each) for name, each in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def read_metrics(path: str | os.PathLike[str]) -> list[StepRecord]:
    """Read a metrics file, complete or not: an unfinished last line is left out.

    Raises:
        TrainingError: the file is missing, of another format, or a line is damaged; the message names the line.
    """
    with reporting(TrainingError, f"cannot read {path}"):
        suffix = suffix_of(path)
    if suffix not in SUFFIXES:
        raise TrainingError(f"{path}: expected a metrics file, a name that ends in {' or '.join(SUFFIXES)}")
    with reporting(TrainingError, f"cannot read {path}"):
        content = read_file(path)
    records: list[StepRecord] = []
    columns: list[str] = []
    for number, line in enumerate(content.split(b"\n")[:-1], start=1):
        try:
            if suffix == ".jsonl":
                row = parse_json(line)
                if not isinstance(row, dict):
                    raise ValueError("it is not a JSON object")
            else:
                cells = next(csv.reader([line.decode()], strict=True), [])
                if number == 1:
                    columns = cells
                    continue
                row = dict(zip(columns, cells, strict=True))
            records.append(StepRecord.from_row(row))
        except (ValueError, RecursionError, csv.Error) as error:
            raise TrainingError(f"{path}, line {number} is no row of metrics: {error}") from error
    return records
