"""A scaled artifact folder, and copies of it to damage."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import graphscale as gs
from tests.checks.verification.damage import SOURCE


@pytest.fixture(scope="session")
def scaled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("folders")
    gs.scale_artifacts(SOURCE, made / "scaled", gs.DynamicLossScale(1024, 3), lower=False)
    return made / "scaled"


@pytest.fixture
def folder(scaled: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(scaled, tmp_path / "scaled"))
