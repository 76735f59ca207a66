"""Scaled copies of the artifact folders of models/."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import graphscale as gs
from tests.ort.artifacts.training_session import FOLDERS, FORMS, scale_as

Scaled = Callable[..., Path]


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest) -> str:
    """Each form of a scaled folder."""
    return str(request.param)


@pytest.fixture
def scaled(form: str, tmp_path: Path) -> Scaled:
    """A function that scales a folder of models/ with a dynamic loss scale from 1024 that grows every 3 windows."""

    def make(name: str, loss_scale: Any = None, **options: Any) -> Path:
        policy = gs.DynamicLossScale(1024, 3) if loss_scale is None else loss_scale
        out = tmp_path / "scaled" / name
        out.parent.mkdir(exist_ok=True)
        scale_as(form, FOLDERS / name, out, policy, **options)
        return out

    return make
