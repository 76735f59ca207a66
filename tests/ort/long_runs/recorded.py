"""The recorded trainings, in a file for runtimes without training kernels."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from tests.ort.long_runs.trainings import Training

_FILE = Path(__file__).parent / "recorded.npz"


def write_trainings(trainings: Mapping[str, Training]) -> None:
    """Write trainings by name."""
    arrays = {}
    for name, training in trainings.items():
        fields = {field.name: getattr(training, field.name) for field in dataclasses.fields(training)}
        arrays |= {f"{name}/arrays/{key}": value for key, value in fields.pop("arrays").items()}
        arrays |= {f"{name}/{key}": np.asarray(value) for key, value in fields.items()}
    np.savez_compressed(_FILE, **arrays)


def read_training(name: str) -> Training:
    """Read the training of this name."""
    with np.load(_FILE) as stored:
        own = {key.removeprefix(f"{name}/"): stored[key] for key in stored.files if key.startswith(f"{name}/")}
    arrays = {key.removeprefix("arrays/"): own.pop(key) for key in list(own) if key.startswith("arrays/")}
    return Training(arrays=arrays, **{key: value.tolist() for key, value in own.items()})
