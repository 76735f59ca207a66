"""Wrong files of graphscale 0.2.0, which verified them: `scaled/`, each with its original beside the folder."""

from __future__ import annotations

import onnx
import pytest

import graphscale as gs
from tests.cases.steps import FOLDER, read

pytestmark = pytest.mark.static

NAMES = sorted(path.stem for path in (FOLDER / "scaled").glob("*.onnx"))


def scaled(name: str) -> onnx.ModelProto:
    return onnx.load(FOLDER / "scaled" / f"{name}.onnx")


def is_verified(name: str) -> bool:
    try:
        return gs.verify(read(name), scaled(name), runs=0).ok
    except gs.GraphscaleError:
        return False


@pytest.mark.parametrize("name", NAMES)
def test_verify_rejects(name: str) -> None:
    assert not is_verified(name)


@pytest.mark.parametrize("name", ["clip_one_bound", "relu_on_a_gradient"])
def test_lint_and_verify_agree(name: str) -> None:
    assert "GS306" in {finding.code for finding in gs.lint(scaled(name)).findings}
    checks = {check.name: check for check in gs.verify(read(name), scaled(name), runs=0).checks}
    assert checks["every gradient checked"].status == "fails"
    assert "overflow" in checks["every gradient checked"].detail
