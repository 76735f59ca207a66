"""Wrong uses: one line each, with what is wrong and what to do, exit code 2, and nothing written."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

import graphscale as gs
from tests.cli.command import contents, graphscale
from tests.cli.wrong_uses import COMMANDS, PYTHON, Files, fill_folder

pytestmark = pytest.mark.static


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("uses")


@pytest.fixture(scope="module")
def files(folder: Path) -> Files:
    return fill_folder(folder)


@pytest.mark.usefixtures("files")
@pytest.mark.sample(15)
@pytest.mark.parametrize("command", COMMANDS)
def test_command(command: str, folder: Path) -> None:
    done = graphscale(*shlex.split(command), folder=folder)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("graphscale: ")
    assert not [word for word in COMMANDS[command] if word not in line], line


def test_nothing_is_written(files: Files, folder: Path) -> None:
    before = contents(folder)
    for command in list(COMMANDS)[::10]:
        graphscale(*shlex.split(command), folder=folder)
    assert contents(folder) == before


@pytest.mark.sample(4)
@pytest.mark.parametrize("use", PYTHON)
def test_python(use: str, files: Files) -> None:
    call, words = PYTHON[use]
    with pytest.raises(gs.GraphscaleError) as raised:
        call(files)
    assert "\n" not in str(raised.value)
    assert not [word for word in words if word not in str(raised.value)], str(raised.value)
