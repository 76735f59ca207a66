"""Names, texts and paths of files reach the terminal only as text: every command, with every option."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import xml.dom.minidom
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from graphscale.cli import COMMANDS, make_command
from graphscale.cli.show import join_command
from graphscale.errors import printable
from tests.cli.command import graphscale
from tests.cli.hostile import FILE, HOSTILE, fill
from tests.conftest import ROOT

pytestmark = pytest.mark.static

MODEL, SCALED, OUT = f"{FILE}model.onnx", f"{FILE}scaled.onnx", f"{FILE}out.onnx"
PAGE, PICTURE = f"{FILE}out.html", f"{FILE}out.svg"
CHECK = ("--check-gradients", "--dim", f"{HOSTILE}=8")
TRAIN = ("train", SCALED, "--data", f"{FILE}data.npz", "--state", f"{FILE}state.npz", "--max-steps=3")
CALLS: dict[str, tuple[str, ...]] = {
    "scale": ("scale", MODEL, "-o", OUT),
    "inspect": ("inspect", MODEL, "--html", PAGE, "--roles-out", f"{FILE}out.json", *CHECK),
    "autocast": ("autocast", MODEL, "-o", OUT),
    "demo": ("demo", "-o", PICTURE, "--steps=100"),
    "lower": ("lower", SCALED, "-o", f"{FILE}lowered.onnx"),
    "lower-training": ("lower-training", MODEL, "-o", OUT),
    "strip": ("strip", SCALED, "-o", f"{FILE}stripped.onnx"),
    "split": ("split", SCALED, "-o", f"{FILE}grads.onnx", f"{FILE}update.onnx"),
    "fuse": ("fuse", f"{FILE}artifacts", "-o", OUT),
    "export-weights": ("export-weights", f"{FILE}state.npz", MODEL, "-o", OUT),
    "train": (*TRAIN, "--checkpoint-dir", f"{FILE}run", "--metrics", f"{FILE}out.jsonl", "-o", OUT),
    "plot": ("plot", f"{FILE}run.jsonl", "-o", PICTURE, "--column", HOSTILE, "--title", HOSTILE),
    "verify": ("verify", MODEL, SCALED, "--runs=1"),
    "lint": ("lint", f"{FILE}cast.onnx", "--sarif", f"{FILE}out.sarif"),
    "diff": ("diff", MODEL, SCALED, "--html", PAGE),
}
BAD = ("missing.onnx", "broken.onnx", "unknown.onnx", "data.npz", "artifacts")


def options(command: str) -> Iterator[str]:
    """Yield every option of a command that takes a value."""
    for parameter in make_command(command).params:
        if isinstance(parameter, typer.core.TyperOption) and not parameter.is_flag:
            yield parameter.opts[-1]


def assert_text(printed: str) -> None:
    """Nothing is printed but lines of characters that a terminal shows."""
    for line in printed.split("\n"):
        assert printable(line) == line


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("hostile")
    fill(made)
    return made


@pytest.fixture
def folder(filled: Path, tmp_path: Path) -> Path:
    return shutil.copytree(filled, tmp_path / "here")


def test_every_command_is_called() -> None:
    assert set(COMMANDS) == {*CALLS, "doctor"}


@pytest.mark.sample(1)
@pytest.mark.parametrize("command", CALLS)
def test_success(command: str, folder: Path, filled: Path, tmp_path: Path) -> None:
    done = graphscale(*CALLS[command], folder=folder)
    assert done.returncode == (command == "lint"), done.stderr
    assert_text(done.stdout)
    assert_text(done.stderr)
    assert "[red]" in done.stdout.replace("\n", "")  # it stands there unchanged: no markup
    done = graphscale(*CALLS[command], "--json", folder=shutil.copytree(filled, tmp_path / "again"))
    assert done.stdout.isascii()
    assert_text(done.stdout)
    json.loads(done.stdout)


@pytest.mark.sample(1)
@pytest.mark.parametrize("command", CALLS)
def test_errors(command: str, folder: Path) -> None:
    """Each file that is named is missing, damaged, or of another kind; and each option has a hostile value."""
    first, *rest = CALLS[command]
    calls = [
        [first, *rest[:at], FILE + bad, *rest[at + 1 :]]
        for at, word in enumerate(rest)
        if word.startswith(FILE)
        for bad in BAD
    ]
    calls += [[first, *rest, f"{option}={value}"] for option in options(command) for value in (HOSTILE, FILE)]
    calls += [[first, *rest, FILE], [first, *rest, f"--{FILE}"]]
    for call in calls:
        done = graphscale(*call, folder=folder)
        assert_text(done.stdout)
        assert_text(done.stderr)
        if done.returncode == 2:
            hints = [line for line in done.stderr.splitlines() if line.startswith("graphscale: hint: the option --")]
            assert len(done.stderr.splitlines()) == 1 + len(hints) and len(hints) <= 1


@pytest.mark.full
def test_in_colour(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal rich writes colours, moves the cursor, and does not write a link or a title."""
    monkeypatch.setattr("tests.cli.command.TERMINAL", {"COLUMNS": "200", "FORCE_COLOR": "1", "TERM": "xterm-256color"})
    for command, call in CALLS.items():
        done = graphscale(*call, folder=folder)
        for printed in (done.stdout, done.stderr):
            assert_text(re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\r", "", printed))
        assert "[2J" in done.stdout and "\x1b[2J" not in done.stdout, command


@pytest.mark.full
def test_files(folder: Path) -> None:
    """Pages, pictures and logs are well-formed, and names are texts in them."""
    for command in ("inspect", "plot", "lint"):
        graphscale(*CALLS[command], folder=folder)
    page, log = ((folder / f"{FILE}out.{suffix}").read_text("utf-8") for suffix in ("html", "sarif"))
    assert "$x^{&lt;b&gt;&amp;" in page and "$x^{<b>" not in page
    texts = "".join(node.data for node in _texts(xml.dom.minidom.parse(str(folder / PICTURE))))
    assert printable(HOSTILE) in texts
    assert HOSTILE in json.loads(log)["runs"][0]["results"][0]["locations"][0]["logicalLocations"][0]["name"]


def _texts(node: Any) -> Iterator[Any]:
    for child in node.childNodes:
        yield from [child] if child.nodeType == child.TEXT_NODE else _texts(child)


def test_usage() -> None:
    done = graphscale(FILE)
    assert done.returncode == 2
    assert_text(done.stderr)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("fc1.weight", "fc1.weight"),
        ("größe 重み", "größe 重み"),
        ("a\\b", "a\\b"),
        ("\x1b[31m", "\\x1b[31m"),
        ("a\nb\tc", "a\\nb\\tc"),
        ("\x00\x7f\x80\x9f", "\\x00\\x7f\\x80\\x9f"),
        ("\u202a\u202e\u2066\u2069\u200e\u200f\u061c", "\\u202a\\u202e\\u2066\\u2069\\u200e\\u200f\\u061c"),
        ("\u2028\u2029\u200b\u200d\ufeff\u2060", "\\u2028\\u2029\\u200b\\u200d\\ufeff\\u2060"),
        ("\ud800\udcff", "\\ud800\\udcff"),
        ("\U000e0041\ufe0f\u3164", "\\U000e0041\\ufe0f\\u3164"),
    ],
)
def test_printable(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_one_module_prints() -> None:
    """All others go through it, so that nothing is printed unescaped."""
    for path in (ROOT / "graphscale" / "cli").glob("*.py"):
        if path.name != "show.py":
            printing = re.compile(r"(?<!\.)\bprint\(|rich\.(text|table|markup)|\bConsole\(")
            assert not printing.search(path.read_text("utf-8")), path.name


def test_a_command_to_paste() -> None:
    words = ["graphscale", "a b.onnx", HOSTILE, FILE, "it's"]
    line = join_command(words)
    assert_text(line)
    done = subprocess.run(["bash", "-c", f"printf '%s\\0' {line}"], capture_output=True, check=True)
    assert [os.fsdecode(word) for word in done.stdout.split(b"\0")[:-1]] == words
