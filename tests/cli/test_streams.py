"""Standard streams that are full, closed, or without a reader, and Ctrl-C at any time: never a traceback."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from graphscale.cli import COMMANDS
from tests.cli.command import graphscale
from tests.cli.test_process import ARTIFACTS, ORIGINAL
from tests.training.runs import DIGITS, DIGITS_COMMAND, make_digits

pytestmark = pytest.mark.static

CALLS = {
    "scale": ("scale", ORIGINAL, "-o", "out.onnx"),
    "inspect": ("inspect", "step.onnx"),
    "autocast": ("autocast", ORIGINAL, "-o", "out.onnx"),
    "demo": ("demo", "--steps=100", "-o", "out.png"),
    "lower": ("lower", "step.onnx", "-o", "out.onnx"),
    "lower-training": ("lower-training", ORIGINAL, "-o", "out.onnx"),
    "strip": ("strip", "step.onnx", "-o", "out.onnx"),
    "split": ("split", "step.onnx", "-o", "grads.onnx", "update.onnx"),
    "fuse": ("fuse", ARTIFACTS, "-o", "out.onnx"),
    "export-weights": ("export-weights", "state.npz", DIGITS, "-o", "out.onnx"),
    "train": (*DIGITS_COMMAND, "--max-steps=2"),
    "plot": ("plot", "run.jsonl", "-o", "out.png"),
    "verify": ("verify", DIGITS, "step.onnx", "--runs=0"),
    "lint": ("lint", "step.onnx"),
    "diff": ("diff", DIGITS, "step.onnx"),
    "doctor": ("doctor",),
}
FULL = "graphscale: cannot write to standard output: No space left on device\n"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    make_digits(folder)
    options = ("--max-steps=2", "--metrics=run.jsonl", "--quiet")
    assert graphscale(*DIGITS_COMMAND, *options, folder=folder).returncode == 0
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    return shutil.copytree(made, tmp_path / "here")


def shell(folder: Path, redirection: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run graphscale in a shell with its streams redirected; the exit code is that of graphscale."""
    words = [sys.executable, "-m", "graphscale", *map(str, arguments)]
    line = f"{shlex.join(words)} {redirection}\nexit ${{PIPESTATUS[0]}}"
    return subprocess.run(["bash", "-c", line], cwd=folder, capture_output=True, text=True, check=False, timeout=60)


def test_every_command_is_called() -> None:
    assert set(CALLS) == set(COMMANDS)


@pytest.mark.full
@pytest.mark.parametrize("command", COMMANDS)
def test_a_full_disk(command: str, folder: Path) -> None:
    done = shell(folder, "> /dev/full", *CALLS[command])
    assert (done.returncode, done.stderr) == (2, FULL)


@pytest.mark.full
@pytest.mark.parametrize("command", COMMANDS)
def test_a_full_disk_for_json(command: str, folder: Path) -> None:
    done = shell(folder, "> /dev/full", *CALLS[command], "--json")
    assert (done.returncode, done.stderr) == (2, FULL)


@pytest.mark.full
def test_a_full_disk_for_help(folder: Path) -> None:
    assert shell(folder, "> /dev/full", "--help").stderr == FULL


@pytest.mark.full
@pytest.mark.parametrize("command", COMMANDS)
def test_a_pipe_that_nobody_reads(command: str, folder: Path) -> None:
    """As other programs of Unix, it ends by SIGPIPE without a word."""
    done = shell(folder, "| true", *CALLS[command])
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")


@pytest.mark.full
@pytest.mark.parametrize("command", COMMANDS)
def test_a_pipe_that_nobody_reads_for_json(command: str, folder: Path) -> None:
    done = shell(folder, "| true", *CALLS[command], "--json")
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")


@pytest.mark.full
def test_the_first_line(folder: Path) -> None:
    done = shell(folder, "| head -n 1", *CALLS["inspect"])
    assert (done.returncode in (0, 128 + signal.SIGPIPE), done.stdout, done.stderr) == (True, "step.onnx\n", "")


@pytest.mark.full
@pytest.mark.parametrize("command", COMMANDS)
def test_a_closed_stdout(command: str, folder: Path) -> None:
    done = shell(folder, ">&-", *CALLS[command])
    assert (done.returncode, done.stderr) == (2, "graphscale: cannot write to standard output: Bad file descriptor\n")


@pytest.mark.full
def test_no_output_gets_the_number_of_a_closed_stream(folder: Path) -> None:
    """Without a descriptor in its place, what is meant for stdout would go into the file that is opened next."""
    assert graphscale(*DIGITS_COMMAND, "--max-steps=2", "--metrics=whole.jsonl", "--quiet", folder=folder).stdout == ""
    shell(folder, "<&- >&- 2>&-", *DIGITS_COMMAND, "--max-steps=2", "--metrics=closed.jsonl")
    assert (folder / "closed.jsonl").read_bytes() == (folder / "whole.jsonl").read_bytes()


@pytest.mark.full
@pytest.mark.parametrize("redirection", ["2>&-", "2> /dev/full", "2>&1 >&- | true"])
def test_stderr(redirection: str, folder: Path) -> None:
    done = shell(folder, redirection, "inspect", "missing.onnx")
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "")


@pytest.mark.full
def test_an_encoding_that_lacks_characters(folder: Path) -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    shutil.copy(folder / "step.onnx", folder / "größe.onnx")
    command = [sys.executable, "-m", "graphscale", "lint", "größe.onnx"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, check=False)
    assert done.stdout.startswith(b"gr\\xf6\\xdfe.onnx") and done.stderr == b""


INTERRUPTED = """
import os, runpy, signal, sys
imports, last = 0, int(sys.argv.pop(1))
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background process ignores it
def count(event, arguments):
    global imports
    if event == "import":
        imports += 1
        if imports == last:
            signal.raise_signal(signal.SIGINT)
sys.argv[0] = "-m"
sys.addaudithook(count)
try:
    runpy.run_module("graphscale", run_name="__main__", alter_sys=False)
finally:
    if last == 0:
        print(imports, file=sys.stderr)
"""


def interrupt(folder: Path, at: int, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run graphscale, which gets SIGINT at an import, by its number."""
    command = [sys.executable, "-c", INTERRUPTED, str(at), *map(str, arguments)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.full
@pytest.mark.parametrize("command", ["scale", "train", "demo", "verify"])
def test_ctrl_c_during_imports(command: str, folder: Path) -> None:
    count = int(interrupt(folder, 0, *CALLS[command]).stderr.split()[-1])
    assert count > 200
    codes = set()
    for at in range(20, count, count // 7):
        done = interrupt(folder, at, *CALLS[command])
        codes.add(done.returncode)
        assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr, at
    assert codes <= {130, -signal.SIGINT, 0} and codes != {0}
