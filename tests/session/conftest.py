"""Fixtures of the tests of sessions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnxruntime.capi.onnxruntime_inference_collection import IOBinding

from tests.session.digits import batch, make


def address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Record the addresses of the memory that ONNX Runtime gets, by input."""
    seen: dict[str, int] = {}
    arrays, values = IOBinding.bind_cpu_input, IOBinding.bind_ortvalue_input

    def array(self: Any, name: str, value: Any) -> None:
        seen[name] = address(value)
        arrays(self, name, value)

    def value(self: Any, name: str, value: Any) -> None:
        seen[name] = value.data_ptr()
        values(self, name, value)

    monkeypatch.setattr(IOBinding, "bind_cpu_input", array)
    monkeypatch.setattr(IOBinding, "bind_ortvalue_input", value)
    return seen


@pytest.fixture(scope="session")
def saved_bytes(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A good state file, of a session two steps on."""
    path = tmp_path_factory.mktemp("saved") / "state.safetensors"
    session = make()
    for seed in range(2):
        session.step(batch(seed=seed))
    session.save_state(path, {"epoch": "3"})
    return path.read_bytes()


@pytest.fixture
def saved(saved_bytes: bytes, tmp_path: Path) -> Path:
    """A copy of that file."""
    path = tmp_path / "state.safetensors"
    path.write_bytes(saved_bytes)
    return path
