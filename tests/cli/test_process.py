"""Each command has the same texts and files in its own process as in the process of the tests."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from graphscale.cli import COMMANDS
from tests.cli.command import contents, graphscale, graphscale_process
from tests.conftest import MODELS, ROOT
from tests.training.runs import DIGITS_COMMAND, make_digits

pytestmark = pytest.mark.static

ORIGINAL = MODELS / "pytorch" / "mlp_momentum.onnx"
ARTIFACTS = MODELS / "ort" / "artifacts" / "digits_sgd"
CALLS = {
    "scale": ("scale", ORIGINAL, "-o", "out.onnx"),
    "inspect": ("inspect", "step.onnx"),
    "autocast": ("autocast", ORIGINAL, "-o", "out.onnx", "--json"),
    "demo": ("demo", "--steps=0"),
    "lower": ("lower", "step.onnx", "-o", "out.onnx"),
    "lower-training": ("lower-training", ORIGINAL, "-o", "out.onnx"),
    "strip": ("strip", "step.onnx", "-o", "out.onnx"),
    "split": ("split", "step.onnx", "-o", "halves"),
    "fuse": ("fuse", ARTIFACTS, "-o", "out.onnx", "--loss-scale=dynamic"),
    "export-weights": ("export-weights", "fused.onnx", ARTIFACTS / "eval_model.onnx", "-o", "out.onnx"),
    "train": (*DIGITS_COMMAND, "--epochs=1", "-o", "out.onnx", "--quiet"),
    "plot": ("plot", "missing.jsonl", "-o", "out.png"),
    "verify": ("verify", MODELS.parent / "graphscale" / "demo" / "digits_step.onnx", "step.onnx", "--runs=1"),
    "lint": ("lint", "step.onnx"),
    "diff": ("diff", MODELS.parent / "graphscale" / "demo" / "digits_step.onnx", "step.onnx"),
    "doctor": ("doctor",),
    "": (),
    "version": ("--version",),
    "no such command": ("resize", "step.onnx"),
    "no such file": ("scale", "missing.onnx", "-o", "out.onnx"),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a scaled step, data for it, and a fused step."""
    folder = tmp_path_factory.mktemp("made")
    make_digits(folder)
    assert graphscale("fuse", ARTIFACTS, "-o", "fused.onnx", folder=folder).returncode == 0
    return folder


def test_every_command_is_called() -> None:
    assert set(COMMANDS) <= set(CALLS)


@pytest.mark.full
@pytest.mark.parametrize("call", CALLS)
def test_a_process_of_its_own(call: str, made: Path, tmp_path: Path) -> None:
    results = []
    for run in (graphscale_process, graphscale):
        folder = tmp_path / "here"
        shutil.copytree(made, folder)
        done = run(*CALLS[call], folder=folder)
        # `doctor` says where the package lies, and pads its lines to that: another folder takes the installed one.
        stdout = re.sub(r" in /\S+/graphscale\b| +$", "", done.stdout, flags=re.MULTILINE)
        results.append((done.returncode, stdout, done.stderr, contents(folder)))
        shutil.rmtree(folder)
    alone, here = results
    assert alone[:3] == here[:3]
    assert alone[3] == here[3]


@pytest.mark.full
def test_a_command_imports_nothing_of_another() -> None:
    code = "import sys; from graphscale.cli import main; sys.argv[1:] = ['inspect', sys.argv[1]]\n"
    code += "try: main()\nexcept SystemExit: pass\n"
    code += "sys.exit(any(name in sys.modules for name in ('graphscale.training', 'graphscale.demo', 'onnxruntime')))"
    assert (
        subprocess.run(
            [sys.executable, "-c", code, ORIGINAL], cwd=ROOT, stdout=subprocess.DEVNULL, check=False
        ).returncode
        == 0
    )
