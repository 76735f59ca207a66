"""The amount of text: --quiet, --verbose and --json of every command, and the objects that the docs describe."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import re
import shutil
from pathlib import Path

import pytest

import graphscale as gs
from graphscale.cli import COMMANDS
from graphscale.ort.standard_forms import LoweringReport
from graphscale.passes.casting.cast_report import AutocastReport
from graphscale.replicas import SplitReport
from tests.cli.bad_graphs import ambiguous_ema
from tests.cli.command import graphscale, refuse, succeed
from tests.cli.test_process import ARTIFACTS, ORIGINAL
from tests.cli.test_streams import CALLS, made  # noqa: F401
from tests.conftest import ROOT
from tests.training.runs import DIGITS_COMMAND

PAGE = (ROOT / "docs" / "reference" / "cli.md").read_text(encoding="utf-8")
REPORTS = {each.__name__: each for each in (AutocastReport, gs.DiffReport, gs.LintReport, LoweringReport)}
REPORTS |= {each.__name__: each for each in (gs.Report, SplitReport)}
WRITING = ("scale", "autocast", "lower", "lower-training", "strip", "split", "fuse", "export-weights", "plot")


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:  # noqa: F811
    return shutil.copytree(made, tmp_path / "here")


def check_demo(command: str) -> None:
    if command == "demo" and not all(map(importlib.util.find_spec, ("sklearn", "matplotlib"))):
        pytest.skip("the demo needs scikit-learn and matplotlib")


def documented() -> dict[str, set[str]]:
    """The keys of each command's object, from the table of the page."""
    found = {}
    for commands, text in re.findall(r"^\| (`.+?) \| (.+) \|$", PAGE.partition("## Output")[2], re.MULTILINE):
        keys = set(re.findall(r"`([a-z_]+)`", re.sub(r"\(`done`.*?\)", "", text))) - {"gradient_check"}
        for name in re.findall(r"`(\w+Report|Report)`", text):
            if name in REPORTS:
                keys |= {field.name for field in dataclasses.fields(REPORTS[name])}
        for command in re.findall(r"`([\w-]+)`", commands):
            found[command] = keys if command == "scale" else keys - {"trial"}
    return found


def test_every_command_is_documented() -> None:
    assert set(documented()) == set(COMMANDS)


@pytest.mark.sample(3)
@pytest.mark.parametrize("command", COMMANDS)
def test_json_is_one_object_with_the_documented_keys(command: str, folder: Path) -> None:
    check_demo(command)
    done = graphscale(*CALLS[command], "--json", folder=folder)
    assert done.returncode == 0 and done.stderr == ""
    assert set(json.loads(done.stdout)) == documented()[command]


@pytest.mark.full
@pytest.mark.parametrize("command", COMMANDS)
def test_quiet(command: str, folder: Path) -> None:
    check_demo(command)
    for option in ("-q", "--quiet"):
        done = graphscale(*CALLS[command], option, folder=folder)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.sample(2)
@pytest.mark.parametrize("command", WRITING)
def test_few_lines_and_with_verbose_all_there_is_to_say(command: str, folder: Path) -> None:
    short, long = (succeed(folder, *CALLS[command], *more) for more in ((), ("-v",)))
    assert 1 <= len(short.splitlines()) <= 3
    assert " -> " in short.splitlines()[0]
    assert len(long.splitlines()) >= len(short.splitlines())
    if command in ("scale", "autocast", "lower", "split", "fuse"):
        assert len(long.splitlines()) > 5


@pytest.mark.full
def test_train_names_the_skipped_steps(folder: Path) -> None:
    command = (*DIGITS_COMMAND, "--epochs=1", "--no-shuffle")
    said = succeed(folder, *command, "--verbose")
    assert re.findall(r"^step (\d+) skipped, loss scale \d+ -> \d+$", said, re.MULTILINE) == ["7", "16"]
    assert " skipped, loss scale " not in succeed(folder, *command)
    found = json.loads(succeed(folder, *command, "--json", "--metrics=out.csv"))
    assert (found["end"], found["steps"], found["skipped"], found["metrics"]) == ("done", 19, 2, "out.csv")


def test_warnings(folder: Path) -> None:
    """They are said on stderr, and are in the object; --quiet drops them."""
    command = ("autocast", ORIGINAL, "-o", "out.onnx", "--dtype=bfloat16", "--emulate")
    shown = graphscale(*command, folder=folder)
    assert len(shown.stdout.splitlines()) == 2
    assert shown.stderr == "warning: bfloat16 has the range of float32: no loss scale is needed\n"
    assert json.loads(graphscale(*command, "--json", folder=folder).stdout)["warnings"]
    assert graphscale(*command, "--quiet", folder=folder).stderr == ""


def test_errors_are_said_in_any_case(folder: Path) -> None:
    for option in ("-q", "--json", "-v"):
        refuse(folder, "inspect", "missing.onnx", option, words=["missing.onnx"])


@pytest.mark.parametrize("pair", ["-q -v", "--quiet --json", "-v --json"])
def test_they_exclude_each_other(pair: str, folder: Path) -> None:
    refuse(folder, "fuse", ARTIFACTS, "-o", "out.onnx", *pair.split(), words=["exclude each other"])


# --- names of earlier releases ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", [["--seed", "{}"], ["--seed={}"]])
@pytest.mark.parametrize("command", ["scale", "autocast", "inspect"])
def test_the_old_name_of_the_edge(command: str, form: list[str], folder: Path) -> None:
    place = json.loads(succeed(folder, "inspect", ORIGINAL, "--json"))["places"][0]
    edge = f"{place['node']}:{place['input']}"
    call = [command, ORIGINAL, "--loss=loss", "--json", *([] if command == "inspect" else ["--dry-run"])]
    old = graphscale(*call, *(word.format(edge) for word in form), folder=folder)
    assert old.stderr == f"graphscale: hint: the option --seed is called --seed-edge now: --seed-edge {edge}\n"
    assert old.stdout == succeed(folder, *call, "--seed-edge", edge)


def test_the_seed_of_inspect_is_a_number(folder: Path) -> None:
    refuse(folder, "inspect", ORIGINAL, "--seed=3", words=["--seed goes with --check-gradients"])
    words = ["--seed-edge nope: expected NODE:INDEX"]
    done = graphscale("inspect", ORIGINAL, "--seed=nope", folder=folder)
    assert done.returncode == 2 and words[0] in done.stderr


def test_the_old_names_of_verify(folder: Path) -> None:
    call = [*CALLS["verify"], "--providers=CPUExecutionProvider,CPUExecutionProvider", "-q"]
    assert graphscale(*call, folder=folder).stderr == ""
    shown = graphscale(*CALLS["verify"], "--place", "nope:0", folder=folder)
    hint, error = shown.stderr.splitlines()
    assert hint.endswith("--seed-edge nope:0") and error.startswith("graphscale: --seed-edge nope:0: there is no node")


@pytest.mark.parametrize(
    ("command", "option", "message"),
    [
        ("autocast", "--keep-node nope", "there is no node 'nope'"),
        ("train", "--keep-checkpoints 0", "expected 1 or more"),
    ],
)
def test_the_old_name_of_what_is_kept(command: str, option: str, message: str, folder: Path) -> None:
    name, value = option.split()
    more = ["--checkpoint-dir=saved"] if command == "train" else []
    done = graphscale(*CALLS[command], *more, "--keep", value, folder=folder)
    hint, *_, error = done.stderr.splitlines()
    assert hint == f"graphscale: hint: the option --keep is called {name} now: {option}"
    assert message in error


def test_hints_have_the_new_name(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(ambiguous_ema().SerializeToString())
    done = graphscale("scale", "model.onnx", "--dry-run", "--seed-edge=a", folder=tmp_path)
    assert "--seed-edge" in done.stderr and "--seed " not in done.stderr
