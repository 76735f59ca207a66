"""The pages of the project are true: their code runs, their links lead somewhere, their numbers hold."""

from __future__ import annotations

import ast
import inspect
import os
import re
import runpy
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import pytest

import graphscale as gs
from tests.cli.command import drop_progress

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
PYTHON = [text for language, text in BLOCKS if language == "python"]
BASH = [text for language, text in BLOCKS if language == "bash"]
SET_UP = [text.rstrip() for text in BASH if text.startswith("python3 -m venv")]
# The commands of a block run one after the other, and a console session after the block before it.
COMMANDS = [text for text in BASH if text.startswith("graphscale")]
# A console session: each command with the output that the page shows.
SESSIONS = [
    (command, shown)
    for language, text in BLOCKS
    if language == "console"
    for command, shown in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", text, re.MULTILINE)
]
RESULTS = (ROOT / "benchmarks" / "RESULTS.md").read_text(encoding="utf-8")
PAGES = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "models/README.md", "benchmarks/README.md"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the models at hand, as in a checkout."""
    (tmp_path / "models").symlink_to(ROOT / "models")
    return tmp_path


def run(command: list[str], folder: Path) -> str:
    path = f"{sysconfig.get_path('scripts')}{os.pathsep}{os.environ['PATH']}"
    result = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "PATH": path, "COLUMNS": "100", "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert drop_progress(result.stderr) == ""
    return result.stdout


def test_the_set_up_commands_stand_at_the_top() -> None:
    first, second = SET_UP
    assert [text for _, text in BLOCKS[:2]] == [f"{first}\n", f"{second}\n"]
    assert README.index(second) < README.index("\n## ")
    assert first.startswith("python3 -m venv .venv && . .venv/bin/activate && pip install ")
    assert first.endswith(" && graphscale demo")
    assert "python -m pytest" in second
    extras = re.findall(r"\[(\w+)\]", first + second)
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert all(re.search(rf"^{extra} = \[", project, re.MULTILINE) for extra in extras)


def test_ci_runs_the_test_command_of_this_page() -> None:
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    (extraction,) = (line for line in script.splitlines() if line.startswith("test_command=$("))
    found = run(["bash", "-c", f'{extraction}; printf %s "$test_command"'], ROOT)
    assert found == SET_UP[1]
    assert re.search(r'^bash .*-c "\$test_command"$', script, re.MULTILINE)


@pytest.mark.full
@pytest.mark.parametrize("code", PYTHON, ids=range(len(PYTHON)))
def test_python_blocks_run(code: str, folder: Path) -> None:
    run([sys.executable, "-c", code], folder)


@pytest.mark.full
@pytest.mark.parametrize("commands", COMMANDS, ids=range(len(COMMANDS)))
def test_commands_run(commands: str, folder: Path) -> None:
    run(["bash", "-e", "-c", commands], folder)


@pytest.mark.full
def test_sessions_show_what_the_commands_print(folder: Path) -> None:
    run(["bash", "-e", "-c", COMMANDS[0]], folder)
    for command, shown in SESSIONS:
        assert_shown(run(["bash", "-c", command], folder), shown)


def assert_shown(printed: str, shown: str) -> None:
    """Each line that a page shows is printed, in this order; `...` stands for others."""
    lines, position = [" ".join(line.split()) for line in printed.splitlines()], 0
    for line in (" ".join(line.split()) for line in shown.splitlines()):
        if line not in ("", "..."):
            assert line in lines[position:], f"not printed, or not in this order: {line}"
            position = lines.index(line, position) + 1


def test_there_is_something_to_run() -> None:
    assert [len(PYTHON), len(COMMANDS), len(SESSIONS)] == [1, 1, 1]
    assert len(COMMANDS[0].splitlines()) == 3


def test_the_page_is_short() -> None:
    assert len(README.split()) <= 900


def test_the_cost_is_a_row_of_the_results() -> None:
    """Each number is the median under the same head in the first table of the results."""
    head, _, row = (
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in README.splitlines()
        if re.match(r"\|.*---:|\| (workload|\S+-\d+-\S+) \|", line)
    )
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in RESULTS.splitlines() if line[:1] == "|"]
    measured = dict(zip(table[0], next(line for line in table if line[0] == row[0]), strict=True))
    assert len(row) == len(head) >= 5
    assert all(measured[name].split(" (")[0] == cell for name, cell in zip(head, row, strict=True))


def test_pages_install_from_a_checkout_or_a_wheel() -> None:
    """The package is not on PyPI."""
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").glob("**/README.md")]:
        for line in re.findall(r"pip install [^\n&]*", page.read_text(encoding="utf-8")):
            assert not re.search(r"graphscale(?!-[\d.]+-py3-none-any\.whl)[\[\s'\"]", line), f"{page.name}: {line}"


CALLS = re.findall(r"`(gs\.exporters\.\w+\.export_step\(.*?\))`", README)


@pytest.mark.parametrize("call", CALLS)
def test_the_calls_of_exporters_have_arguments_that_fit(call: str) -> None:
    tree = ast.parse(call, mode="eval").body
    assert isinstance(tree, ast.Call)
    function = eval(ast.unparse(tree.func), {"gs": gs})
    inspect.signature(function).bind(*tree.args, **{str(each.arg): each.value for each in tree.keywords})


def test_each_framework_has_a_call() -> None:
    assert [call.split(".")[2] for call in CALLS] == ["pytorch", "jax", "tensorflow"]


def version() -> str:
    return str(tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"])


def test_the_wheel_has_the_name_of_the_version() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    named = {name for page in pages for name in re.findall(r"graphscale-[\w.]+-py3", page.read_text(encoding="utf-8"))}
    assert named == {f"graphscale-{version()}-py3"}


def test_the_changelog_begins_with_the_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    heads = re.findall(r"^## \[(.+)\](?: - (\d{4}-\d\d-\d\d))?$", text, re.MULTILINE)
    assert len(heads) == len(re.findall("^## ", text, re.MULTILINE))
    released = [(name, date) for name, date in heads if name != "Unreleased"]
    assert released[0][0] == version()
    assert released == sorted(released, key=lambda entry: entry[1], reverse=True) and all(date for _, date in released)


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files(page: str) -> None:
    path = ROOT / page
    links = re.findall(r"\]\(([^)#\s]+)\)", path.read_text(encoding="utf-8"))
    local = [link for link in links if "://" not in link]
    assert [link for link in local if not (path.parent / link).exists()] == []
    assert all((path.parent / link).stat().st_size < 150_000 for link in local if link.endswith(".png"))


ROW = re.compile(r"^\| `([^`]+\.onnx)` \| .+ \| (\d+) \| (\d+) kB \| (\d+) \| (\d+) \|$", re.MULTILINE)


ROWS = ROW.findall((ROOT / "models" / "README.md").read_text(encoding="utf-8"))


def test_the_table_of_models_is_whole() -> None:
    listed = [(ROOT / "models" / name).resolve() for name, *_ in ROWS]
    assert sorted(listed) == sorted([*ROOT.glob("models/*/*.onnx"), *ROOT.glob("graphscale/demo/*.onnx")])
    assert f"[every graph in models/](models/README.md), {len(ROWS)} from" in README


@pytest.mark.sample(3)
@pytest.mark.parametrize("row", ROWS, ids=[name for name, *_ in ROWS])
def test_the_table_of_models_is_true(row: tuple[str, ...]) -> None:
    name, *numbers = row
    path = ROOT / "models" / name
    report = gs.inspect(path)
    size = round(path.stat().st_size / 1000)
    assert [int(number) for number in numbers] == [report.nodes_before, size, len(report.places), report.contractions]
    assert report.coverage == 1.0


def test_the_drawing_shows_what_the_analysis_finds() -> None:
    pytest.importorskip("matplotlib", reason="draws")
    drawing = runpy.run_path(str(ROOT / "docs" / "draw_degrees.py"))
    drawing["check"]()
