"""200 steps in standard operators, against the kernels and training sessions of onnxruntime-training."""

from __future__ import annotations

import re

import numpy as np
import pytest

from tests.ort.long_runs.recorded import read_training
from tests.ort.long_runs.trainings import FOLDERS, GRAPHS, Training, train_folder, train_graph

pytestmark = pytest.mark.sample(1)

# Values that change no loss: their gradients are 0 but for rounding, and AdamW makes steps of a full rate of these.
_FREE = {"conv_adamw": r"conv\d\.bias|norm\d\.running_mean", "transformer_adamw": r".*\.key\.bias"}


def assert_trained_alike(name: str, own: Training, recorded: Training) -> None:
    assert own.applied.count(False) >= (0 if name == "transformer_adamw" else 4)
    np.testing.assert_allclose(own.losses, recorded.losses, rtol=1e-5)
    for key in recorded.arrays.keys() - {key for key in recorded.arrays if re.fullmatch(_FREE.get(name, ""), key)}:
        largest = np.abs(recorded.arrays[key]).max()
        difference = np.abs(own.arrays[key] - recorded.arrays[key]).max()
        assert difference <= 1e-5 * largest + 1e-7, (key, difference / largest)


@pytest.mark.parametrize("name", GRAPHS)
def test_graphs(name: str) -> None:
    own, recorded = train_graph(name, "onnx"), read_training(f"graphs/{name}")
    assert (own.scales, own.applied) == (recorded.scales, recorded.applied)
    assert_trained_alike(name, own, recorded)


@pytest.mark.full
@pytest.mark.parametrize("name", FOLDERS)
def test_folders(name: str) -> None:
    own, recorded = train_folder(name, "ort-cpu"), read_training(f"folders/{name}")
    # A training session judges a step when the next one begins.
    assert own.scales[:-1] == recorded.scales[1:]
    assert_trained_alike(name, own, recorded)
