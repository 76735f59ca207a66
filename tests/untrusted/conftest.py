"""A folder with good files of every kind, to put a bad one among them."""

from __future__ import annotations

from pathlib import Path

import pytest

from fuzz.hostile import bench


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    bench.fill(tmp_path)
    return tmp_path
