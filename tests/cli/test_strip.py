"""graphscale strip: files and folders, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir
import pytest

from tests.cli.command import contents, graphscale
from tests.conftest import MODELS

STEP = MODELS / "pytorch/mlp_momentum.onnx"


def serialized(path: Path) -> bytes:
    return ir.to_proto(ir.load(path)).SerializeToString(deterministic=True)


def test_a_file(tmp_path: Path) -> None:
    scaled = graphscale("scale", STEP, "-o", "scaled.onnx", "--autocast", "float16", "--telemetry", folder=tmp_path)
    assert scaled.returncode == 0, scaled.stderr
    found = graphscale("strip", "scaled.onnx", "-o", "stripped.onnx", folder=tmp_path)
    assert (found.returncode, found.stderr) == (0, "")
    assert "scaled.onnx without graphscale -> stripped.onnx" in found.stdout
    assert serialized(tmp_path / "stripped.onnx") == serialized(STEP)


def test_a_folder(tmp_path: Path) -> None:
    folder = MODELS / "ort/artifacts/digits_sgd"
    assert graphscale("scale", folder, "-o", "scaled", folder=tmp_path).returncode == 0
    assert graphscale("strip", "scaled", "-o", "stripped", folder=tmp_path).returncode == 0
    assert serialized(tmp_path / "stripped/training_model.onnx") == serialized(folder / "training_model.onnx")
    again = graphscale("strip", "scaled", "-o", "stripped", folder=tmp_path)
    assert (again.returncode, again.stderr.count("\n")) == (2, 1)
    assert "--force" in again.stderr
    assert graphscale("strip", "scaled", "-o", "stripped", "--force", folder=tmp_path).returncode == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((STEP, "-o", "out.onnx"), "nothing to strip"),
        (("missing.onnx", "-o", "out.onnx"), "missing.onnx"),
        (("broken.onnx", "-o", "out.onnx"), "broken.onnx"),
        ((STEP, "-o", "no/folder/out.onnx"), "does not exist"),
        ((STEP,), "-o"),
    ],
)
def test_bad_input(arguments: tuple[object, ...], message: str, tmp_path: Path) -> None:
    (tmp_path / "broken.onnx").write_bytes(STEP.read_bytes()[:1000])
    before = contents(tmp_path)
    found = graphscale("strip", *arguments, folder=tmp_path)
    assert found.returncode == 2
    assert message in found.stderr
    assert found.stderr.count("\n") == 1
    assert contents(tmp_path) == before
