"""`graphscale --help`: each text as it is in help/, and examples that run.

After a wanted change: `UPDATE_GOLDEN=1 python -m pytest tests/cli/test_help.py`, and read the difference.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import graphscale as gs
from fuzz.hostile import bench
from graphscale.cli import COMMANDS, load_command, make_command
from graphscale.cli.help import describe
from graphscale.policy import presets
from graphscale.targets import TARGETS
from graphscale.training.schedules import SCHEDULES
from tests.cli.command import graphscale
from tests.conftest import ROOT
from tests.training.runs import make_digits

GOLDEN = Path(__file__).parent / "help"
EXAMPLES = [(name, line) for name in COMMANDS for line in describe(load_command(name))[1]]


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.cli.command.TERMINAL", {"COLUMNS": "80", "NO_COLOR": "1"})


@pytest.mark.static
@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_each_text(command: str) -> None:
    words, path = [command] if command else [], GOLDEN / f"{command or 'graphscale'}.txt"
    shown = graphscale(*words, "-h")
    assert shown.returncode == 0 and shown.stderr == ""
    assert shown.stdout == graphscale(*words, "--help").stdout
    if not command:
        assert shown.stdout == graphscale().stdout
    if os.environ.get("UPDATE_GOLDEN"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(shown.stdout, encoding="utf-8")
    assert shown.stdout == path.read_text(encoding="utf-8")
    assert all(len(line) <= 80 for line in shown.stdout.splitlines())


def test_no_text_is_left_over() -> None:
    assert {path.stem for path in GOLDEN.iterdir()} == {"graphscale", *COMMANDS}


@pytest.mark.parametrize(
    ("command", "choices"),
    [
        *((command, TARGETS) for command in ("scale", "autocast", "fuse")),
        *((command, ("dynamic", *presets.NAMES)) for command in ("scale", "autocast", "fuse")),
        *((command, ("float16", "bfloat16")) for command in ("scale", "autocast")),
        ("train", SCHEDULES),
        *((command, ("CUDAExecutionProvider",)) for command in ("train", "verify")),
    ],
)
def test_choices_are_listed(command: str, choices: tuple[str, ...]) -> None:
    words = re.findall(r"[\w-]+", graphscale(command, "-h").stdout)
    assert not {*choices} - {*words}


# --- examples ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that the examples name; a step of its own for train."""
    folder = tmp_path_factory.mktemp("examples")
    bench.fill(folder)
    shutil.rmtree(folder / "scaled")
    gs.scale_artifacts(folder / "artifacts", folder / "scaled")
    (folder / "train").mkdir()
    make_digits(folder / "train")
    return folder


def test_every_command_has_an_example() -> None:
    assert {name for name, _ in EXAMPLES} == set(COMMANDS)


@pytest.mark.sample(6)
@pytest.mark.parametrize(("command", "line"), EXAMPLES, ids=[line for _, line in EXAMPLES])
def test_examples_run(command: str, line: str, made: Path, tmp_path: Path) -> None:
    program, name, *words = shlex.split(line)
    assert (program, name) == ("graphscale", command)
    if command == "demo":  # takes seconds, and has tests of its own
        make_command(name).make_context(name, words)
        return
    folder = shutil.copytree(made / "train" if command == "train" else made, tmp_path / "here")
    more = ["--state", "state.npz", "--learning-rate=0.1"] if command == "train" else []
    done = graphscale(name, *words, *more, folder=folder)
    assert done.returncode == int("--exit-code" in words), done.stderr


# --- the version, and what a shell completes --------------------------------------------------------------------------


def test_the_version() -> None:
    shown = graphscale("--version")
    assert (shown.returncode, shown.stdout, shown.stderr) == (0, f"graphscale {gs.__version__}\n", "")
    assert gs.__version__ == metadata.version("graphscale")


COMPLETE = "import sys; sys.argv[1:] = []; from graphscale.cli import main\ntry: main()\n"
COMPLETE += "finally: print([name for name in sys.modules if name.startswith('graphscale.cli.')], file=sys.stderr)"


@pytest.mark.full
@pytest.mark.parametrize(
    ("words", "completed"),
    [
        (["gr", "sp"], ["split"]),
        (["gr", "lower"], ["lower", "lower-training"]),
        (["gr", "scale", "m.onnx", "--target", "ort-c"], ["ort-cpu", "ort-cuda"]),
        (["gr", "scale", "m.onnx", "--loss-scale", "d"], ["dynamic", "deepspeed"]),
        (["gr", "autocast", "--dtype", "b"], ["bfloat16"]),
        (["gr", "train", "--schedule", "c"], ["constant", "cosine"]),
        (["gr", "verify", "--see"], ["--seed", "--seed-edge"]),
    ],
)
def test_a_shell_completes(words: list[str], completed: list[str]) -> None:
    variables = {
        "_GRAPHSCALE_COMPLETE": "complete_bash",
        "COMP_WORDS": " ".join(words),
        "COMP_CWORD": str(len(words) - 1),
    }
    done = subprocess.run(
        [sys.executable, "-c", COMPLETE],
        env={**os.environ, **variables},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert sorted(done.stdout.split()) == sorted(completed)
    # The names of commands stand in the group: it imports none of them.
    loaded = {name for name in COMMANDS if f"graphscale.cli.{name.replace('-', '_')}'" in done.stderr}
    assert loaded == ({words[1]} if len(words) > 2 else set())
