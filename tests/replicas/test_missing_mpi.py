"""Without mpi4py, all parts but replicas work, and replicas name the missing package."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.replicas.steps import scaled

pytestmark = pytest.mark.mpi

# An interpreter in which mpi4py cannot be found, whether it is installed or not.
_WITHOUT = "import sys\nsys.modules['mpi4py'] = None\n"


def run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", _WITHOUT + code, *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )


@pytest.mark.full
def test_a_session_says_which_extra_to_install() -> None:
    done = run(
        "import graphscale as gs\n"
        "try:\n    gs.ReplicatedSession('missing.onnx', None)\n"
        "except gs.GraphscaleError as error:\n    print(error)\n"
    )
    assert "pip install 'mpi4py>=4' 'mpich>=4.2'" in done.stdout


@pytest.mark.full
def test_the_command_line_says_which_extra_to_install() -> None:
    done = run(
        "sys.argv = ['graphscale', 'train', 'missing.onnx', '--data', 'missing.npz', '--replicas', '2']\n"
        "from graphscale.cli import main\nmain()\n"
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1 and "pip install 'mpi4py>=4' 'mpich>=4.2'" in done.stderr


@pytest.mark.parametrize("count", ["2", "0"])
def test_replicas_that_nobody_started_are_refused(count: str) -> None:
    pytest.importorskip("mpi4py")
    command = [sys.executable, "-m", "graphscale", "train", "missing.onnx", "--data", "missing.npz"]
    done = subprocess.run([*command, "--replicas", count], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and f"--replicas {count}" in done.stderr


@pytest.mark.full
def test_importing_graphscale_imports_no_mpi(tmp_path: Path) -> None:
    scaled("pytorch/mlp_momentum").save(tmp_path / "step.onnx")
    done = run(
        f"import graphscale as gs\ngs.split({str(tmp_path / 'step.onnx')!r})\nprint('onnxruntime' in sys.modules)\n"
    )
    assert done.stdout == "False\n", done.stderr
