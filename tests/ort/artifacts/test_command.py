"""`graphscale scale FOLDER`: what it prints, and what it writes."""

from __future__ import annotations

import json
from pathlib import Path

import onnx
import pytest

import graphscale as gs
from graphscale.files.ort_checkpoint import read_checkpoint
from graphscale.ort.artifacts import scale_artifacts
from tests.cli.command import contents, graphscale
from tests.conftest import ROOT
from tests.ort.artifacts.training_session import FOLDERS, STATES

SOURCE = FOLDERS / "digits_adamw_clip"


def test_the_table_and_the_folder(tmp_path: Path) -> None:
    result = graphscale("scale", SOURCE, "-o", "out", folder=tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    lines = [line for line in result.stdout.splitlines() if "│" in line]
    table = {key.strip(): value.strip() for key, _, value in (line.partition("│") for line in lines) if key.strip()}
    assert result.stdout.startswith(f"{SOURCE} scaled -> out\n")
    assert table["coverage"] == "100 % (5 of 5 backward contractions)"
    assert table["target"] == "ort-training"
    assert table["gradients (4)"] == "fc2.bias_grad FLOAT[10]"
    assert table["carried state (3)"] == "current_loss_scale -> (in place)"
    assert table["optimizer model: guard-optimizer"] == "1 If, 1 Reshape"
    assert table["loss scale"].startswith("DynamicLossScale(initial_loss_scale=32768.0, increment_period=2000")
    scale_artifacts(SOURCE, tmp_path / "python")
    assert contents(tmp_path / "out") == contents(tmp_path / "python")


def test_options_reach_the_folder(tmp_path: Path) -> None:
    options = ["--initial-loss-scale=16", "--increment-period=3", "--multiplier=4", "--loss=onnx::loss::2"]
    result = graphscale("scale", SOURCE, "-o", "out", "--json", *options, folder=tmp_path)
    report = json.loads(result.stdout)
    assert (report["loss"], report["loss_found"]) == ("onnx::loss::2", "named")
    assert report["policy"] == json.loads(gs.DynamicLossScale(16, 3, 4).to_json())
    assert float(read_checkpoint(tmp_path / "out" / "checkpoint").frozen["current_loss_scale"]) == 16


def test_a_dry_run_writes_nothing(tmp_path: Path) -> None:
    for arguments in (["-o", "out"], []):
        result = graphscale("scale", SOURCE, "--dry-run", "--json", *arguments, folder=tmp_path)
        assert result.returncode == 0
        assert [state["input"] for state in json.loads(result.stdout)["state"]] == list(STATES)
        assert contents(tmp_path) == {}


def test_a_repair_is_a_warning(tmp_path: Path) -> None:
    result = graphscale("scale", FOLDERS / "digits_adamw_ir14", "-o", "out", folder=tmp_path)
    assert result.returncode == 0
    assert " ".join(result.stderr.split()).startswith("warning: optimizer_model.onnx has IR version 14")


def test_force_replaces_a_folder(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "old").write_text("old")
    assert graphscale("scale", SOURCE, "-o", "out", folder=tmp_path).returncode == 2
    assert graphscale("scale", SOURCE, "-o", "out", "--force", folder=tmp_path).returncode == 0
    assert not (tmp_path / "out" / "old").exists()
    assert onnx.load(tmp_path / "out" / "training_model.onnx").graph.node


@pytest.mark.sample(1)
@pytest.mark.parametrize("module", ["onnxruntime", "flatbuffers", "torch"])
def test_the_package_is_imported_without(module: str) -> None:
    import subprocess
    import sys

    code = f"import sys, graphscale.ort.artifacts, graphscale.cli; sys.exit({module!r} in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
