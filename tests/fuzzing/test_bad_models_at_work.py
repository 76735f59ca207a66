"""Scaled models, damaged, then opened in a training session and run by verify, in processes that may die.

Crashes inside ONNX Runtime are not graphscale's, and only counted; the same promises hold for all other results.
"""

from __future__ import annotations

import collections
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest

from tests.build import feeds_for
from tests.fuzzing import seeds
from tests.fuzzing.holding import Broken, choices_for, keep
from tests.fuzzing.test_bad_files import TIMES, assert_nothing, damaged
from tests.fuzzing.worker import Worker

pytestmark = pytest.mark.static

FILES = 120


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Worker]:
    made = Worker(tmp_path / "crash.log")
    yield made
    made.close()


def write_arrays(scaled: onnx.ModelProto, folder: Path) -> None:
    """The state and the feeds of the undamaged model."""
    carried = json.loads({item.key: item.value for item in scaled.metadata_props}["graphscale.state"])
    arrays = feeds_for(scaled)
    np.savez(folder / "state.npz", **{name: array for name, array in arrays.items() if name in carried})
    np.savez(folder / "feeds.npz", **{name: array for name, array in arrays.items() if name not in carried})


@pytest.mark.full
@pytest.mark.parametrize("part", range(2))
@pytest.mark.parametrize("name", ["session", "verify"])
def test_at_work(name: str, part: int, worker: Worker, tmp_path: Path, record_property: pytest.RecordProperty) -> None:
    codes, broken = collections.Counter[int | None](), list[Broken]()
    for number in range(FILES * TIMES):
        choices, where = choices_for(name, part, number), f"{name}-{part}-{number}"
        folder = tmp_path / where
        folder.mkdir()
        original, scaled = choices.choice(seeds.portable_pairs())
        write_arrays(scaled, folder)
        (folder / "good.onnx").write_bytes(original.SerializeToString())
        data = (
            scaled.SerializeToString() if number == 0 else damaged(scaled, choices.choice(seeds.rewritten()), choices)
        )
        (folder / "bad.onnx").write_bytes(data)
        files = ["bad.onnx"] if name == "session" else ["good.onnx", "bad.onnx", "--runs=1"]
        code, what = worker.run([name, *files], folder)
        codes[code] += 1
        if number == 0:
            assert code == 0, what
        if what is not None:
            keep(folder, where, [name, *files], what)
            broken.append(Broken(what, where))
        shutil.rmtree(folder)
    record_property("crashes of ONNX Runtime", worker.crashes)
    assert_nothing(broken)
    assert codes[2] > 0.2 * codes.total() and codes[0] + codes[1] > 0.05 * codes.total(), codes
    assert len(worker.crashes) <= 0.05 * codes.total(), worker.crashes
