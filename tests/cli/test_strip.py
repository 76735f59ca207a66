"""graphscale strip: files, folders and refusals."""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir
import pytest

from tests.cli.command import refuse, succeed
from tests.conftest import MODELS

pytestmark = pytest.mark.static

STEP = MODELS / "pytorch/mlp_momentum.onnx"


def serialized(path: Path) -> bytes:
    return ir.to_proto(ir.load(path)).SerializeToString(deterministic=True)


def test_a_file(tmp_path: Path) -> None:
    succeed(tmp_path, "scale", STEP, "-o", "scaled.onnx", "--autocast", "float16", "--telemetry")
    printed = succeed(tmp_path, "strip", "scaled.onnx", "-o", "stripped.onnx")
    assert "scaled.onnx without graphscale -> stripped.onnx" in printed
    assert serialized(tmp_path / "stripped.onnx") == serialized(STEP)


def test_a_folder(tmp_path: Path) -> None:
    folder = MODELS / "ort/artifacts/digits_sgd"
    succeed(tmp_path, "scale", folder, "-o", "scaled")
    succeed(tmp_path, "strip", "scaled", "-o", "stripped")
    assert serialized(tmp_path / "stripped/training_model.onnx") == serialized(folder / "training_model.onnx")
    refuse(tmp_path, "strip", "scaled", "-o", "stripped", words=("--force",))
    succeed(tmp_path, "strip", "scaled", "-o", "stripped", "--force")


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
    refuse(tmp_path, "strip", *arguments, words=(message,))
