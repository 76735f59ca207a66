"""The demo as a user runs it: the command, its table and its picture."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sysconfig
from pathlib import Path

import pytest

from graphscale.demo.training import Training
from tests.cli.command import cell, drop_progress

MISSING = [name for name in ("sklearn", "matplotlib") if importlib.util.find_spec(name) is None]
demo_marks = [pytest.mark.full, pytest.mark.skipif(bool(MISSING), reason="the demo needs scikit-learn and matplotlib")]
pytestmark = demo_marks

COMMAND = Path(sysconfig.get_path("scripts"), "graphscale")


def run_demo(folder: Path, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [COMMAND, "demo", *options],
        cwd=folder,
        env={**os.environ, "COLUMNS": "160", "NO_COLOR": "1", **environment},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def finish(folder: Path, *options: str) -> tuple[Path, str]:
    """The folder and the output of one run of the demo, as it comes."""
    result = run_demo(folder, *options)
    assert (result.returncode, drop_progress(result.stderr)) == (0, "")
    return folder, result.stdout


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    return finish(tmp_path_factory.mktemp("demo"))


@pytest.mark.cuda
def test_on_a_gpu(tmp_path: Path) -> None:
    _, output = finish(tmp_path, "--steps", "1000", "--provider", "CUDAExecutionProvider")
    assert cell(output, "steps skipped") == "1"
    assert float(cell(output, "held-out accuracy").removesuffix(" %")) > 90


@pytest.mark.cuda
def test_real_float16_on_a_gpu(tmp_path: Path) -> None:
    finish(tmp_path, "--precision", "--steps", "100", "--provider", "CUDAExecutionProvider")
    assert (tmp_path / "precision.png").stat().st_size > 10_000


def test_the_classifier_learns(finished: tuple[Path, str]) -> None:
    accuracy = float(cell(finished[1], "held-out accuracy").removesuffix(" %"))
    first, last = map(float, cell(finished[1], "training loss").split(" -> "))
    assert 90 < accuracy <= 100
    assert last < first / 10


def test_one_step_is_skipped_and_the_scale_is_halved_there(finished: tuple[Path, str]) -> None:
    assert cell(finished[1], "steps skipped") == "1"
    before, after = map(int, re.findall(r"\d+", cell(finished[1], "step 1140")))
    assert after == before // 2
    first, last, doubled = map(int, re.findall(r"\d+", cell(finished[1], "loss scale")))
    assert last == first * 2 ** (doubled - 1), "every doubling but the halved one is left at the end"
    assert doubled >= 3


def test_the_unscaled_step_gives_the_same_bits(finished: tuple[Path, str]) -> None:
    assert "bit-identical" in cell(finished[1], "without loss scaling")


def test_the_picture_is_all_that_is_left(finished: tuple[Path, str]) -> None:
    folder, _ = finished
    assert [path.name for path in folder.iterdir()] == ["demo.png"]
    path = folder / "demo.png"
    assert 20_000 < path.stat().st_size < 150_000


def test_options(tmp_path: Path) -> None:
    result = run_demo(tmp_path, "--steps", "160", "--seed", "7", "--output", "run.png")
    assert result.returncode == 0, result.stderr
    assert cell(result.stdout, "steps").startswith("160 in ")
    assert cell(result.stdout, "steps skipped") == "1"
    assert (tmp_path / "run.png").is_file()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["-o", "missing/x.png"], "missing"),
        (["-o", "."], "folder"),
        (["--precision", "-o", "missing/x.png"], "missing"),
    ],
)
def test_a_bad_output_is_refused_before_training(tmp_path: Path, options: list[str], message: str) -> None:
    result = run_demo(tmp_path, *options)
    assert result.returncode == 2
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("module", "package"),
    [("onnxruntime", "onnxruntime"), ("sklearn", "scikit-learn"), ("matplotlib", "matplotlib")],
)
def test_what_is_missing_is_named(tmp_path: Path, module: str, package: str) -> None:
    shadow = tmp_path / "shadow"
    shadow.mkdir()
    (shadow / f"{module}.py").write_text(f"raise ModuleNotFoundError('No module named {module}')\n")
    result = run_demo(tmp_path, PYTHONPATH=str(shadow))
    assert result.returncode == 2
    assert result.stderr.startswith(f"graphscale: the demo needs {package}, which ")
    assert "pip install 'matplotlib>=3.8' 'scikit-learn>=1.4'" in result.stderr
    assert result.stderr.count("\n") == 1
    assert not (tmp_path / "demo.png").exists()


def test_a_run_is_reproducible_and_the_seed_matters() -> None:
    first, again, other = (list(Training(100, seed).run()) for seed in (3, 3, 4))
    # repr: NaN, the loss of the overflow, equals itself there.
    assert repr(first) == repr(again)
    assert [r.loss for r in first] != [r.loss for r in other]
    assert [r.step for r in first if not r.applied] == [57]
