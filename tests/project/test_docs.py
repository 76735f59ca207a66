"""The site of docs/: its code runs, its nav is complete, and its generated parts are complete."""

from __future__ import annotations

import ast
import functools
import importlib.util
import logging
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import graphscale as gs
from graphscale.checks.linting.codes import CODES
from graphscale.cli import COMMANDS, main, make_command
from graphscale.passes.casting.settings import default_rules
from graphscale.targets import TARGETS
from tests.conftest import HAS_TRAINING, NEEDS_TRAINING
from tests.project.test_readme import ROOT, assert_shown, folder

pytestmark = pytest.mark.static

__all__ = ["folder"]  # the fixture

DOCS = ROOT / "docs"
SITE = runpy.run_path(str(DOCS / "pages.py"))
# A block runs unless the line above it says why not. Blocks of a page run in order, in one folder and one namespace.
BLOCK = re.compile(r"^(?:<!-- not run: ([^\n]+) -->\n)?```(\w+)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
CONSOLE = re.compile(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", re.MULTILINE)
EXIT_CODE = re.compile(r"# exit code (\d)$")
SOURCE = re.compile(r"^<!-- source: .+ -->$", re.MULTILINE)
# The steps that the quick starts export: these have the same inputs.
STEPS = {
    "start/pytorch.md": "../tests/exporters/pytorch_step",
    "start/jax.md": "../tests/exporters/jax_step",
    "start/tensorflow.md": "../tests/exporters/keras_step",
}
TRAINING = {"how-to/own-optimizer.md", "start/artifacts.md"}  # these run gradient operators of ONNX Runtime
# Generated lint pages have tests of their own.
OWN = sorted(page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md") if page.parent.name != "lint")


def text_of(page: str) -> str:
    return (DOCS / page).read_text(encoding="utf-8")


@functools.cache
def blocks(page: str) -> list[tuple[str, str, str]]:
    """The reason not to run it, the language and the text of each block, with the scripts that the page shows."""
    return BLOCK.findall(SOURCE.sub(lambda match: SITE["expand"](match[0], page), text_of(page)))


def runnable(page: str) -> list[tuple[str, str]]:
    return [(kind, text) for reason, kind, text in blocks(page) if kind in ("python", "bash", "console") and not reason]


def nav_of(entries: Any) -> Iterator[str]:
    for entry in entries:
        for item in entry.values() if isinstance(entry, dict) else [entry]:
            if isinstance(item, str):
                yield item
            else:
                yield from nav_of(item)


class Machine:
    """Runs the blocks of a page in this process, which is much quicker than one process for each."""

    def __init__(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        self.capsys, self.monkeypatch = capsys, monkeypatch
        self.names: dict[str, Any] = {"__name__": "docs"}

    def run(self, kind: str, text: str) -> None:
        if kind == "python":
            exec(compile(text, "docs", "exec"), self.names)
        elif kind == "bash":
            for line in text.replace("\\\n", " ").splitlines():
                self.command(line)
        else:
            for line, shown in CONSOLE.findall(text):
                assert_shown(self.command(line), shown)

    def command(self, line: str) -> str:
        arguments = shlex.split(line, comments=True)
        assert arguments[0] == "graphscale", f"only graphscale is run: {line}"
        self.monkeypatch.setattr(sys, "argv", arguments)
        self.capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        out, error = self.capsys.readouterr()
        expected = EXIT_CODE.search(line)
        assert ended.value.code == (int(expected[1]) if expected else 0), f"{line}: {error or out}"
        return out


@pytest.fixture
def machine(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("NO_COLOR", "1")
    level = logging.getLogger("onnx_ir").level
    monkeypatch.setattr(logging.getLogger("onnx_ir"), "level", level)
    return Machine(capsys, monkeypatch)


@pytest.mark.parametrize("page", [page for page in OWN if runnable(page)])
def test_pages_run(page: str, machine: Machine, folder: Path) -> None:
    if page in TRAINING and not HAS_TRAINING:
        pytest.skip(NEEDS_TRAINING)
    if page in STEPS:
        for name, suffix in (("step", ".onnx"), ("step", ".npz"), ("batch", ".npz")):
            (folder / f"{name}{suffix}").symlink_to(ROOT / "models" / f"{STEPS[page]}{suffix}")
    for kind, text in runnable(page):
        machine.run(kind, text)


def test_there_is_something_to_run() -> None:
    count = {kind: sum(k == kind for page in OWN for k, _ in runnable(page)) for kind in ("python", "bash", "console")}
    assert count["python"] >= 15 and count["bash"] >= 12 and count["console"] >= 3
    reasons = [reason for page in OWN for reason, _, _ in blocks(page) if reason]
    assert sum(not reason.startswith("tests/") for reason in reasons) <= 13
    assert all((ROOT / reason.split()[0]).is_file() for reason in reasons if reason.startswith("tests/"))


@pytest.mark.parametrize("page", OWN)
def test_python_that_is_not_run_is_python(page: str) -> None:
    for _, language, text in blocks(page):
        if language == "python":
            ast.parse(text)


# --- the site ---------------------------------------------------------------------------------------------------------


def test_the_nav_lists_every_page_once() -> None:
    lines = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    listed = re.findall(r"^ *- .*: (\S+)$", lines, re.MULTILINE)
    assert "lint/" in listed
    pages = [*(page for page in listed if page != "lint/"), *nav_of(SITE["lint_pages"]())]
    assert sorted(pages) == sorted(page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md"))


def test_markers_are_known_and_expand() -> None:
    used = set()
    for page in OWN:
        used |= {name for kind, name in SITE["MARKER"].findall(text_of(page)) if kind == "generated"}
        assert "<!-- generated" not in (made := SITE["expand"](text_of(page), page))
        assert "<!-- include" not in made and "<!-- source" not in made
    assert used == set(SITE["GENERATORS"])


def test_pictures_exist_and_are_small() -> None:
    shown = {
        (DOCS / page).parent / link for page in OWN for link in re.findall(r"!\[[^\]]+\]\(([^)]+)\)", text_of(page))
    }
    assert len(shown) >= 9
    for picture in shown:
        assert picture.is_file(), picture
        assert picture.stat().st_size < 150_000, picture
    assert not re.findall(r"!\[\]", "".join(map(text_of, OWN))), "a picture has no text that stands for it"


def test_links_of_included_files_lead_to_pages() -> None:
    for page in ("project/contributing.md", "project/models.md", "project/changelog.md", "project/performance.md"):
        made = SITE["expand"](text_of(page), page)
        links = [link for link in re.findall(r"\]\(([^)#]+)", made) if "://" not in link]
        assert [link for link in links if not ((DOCS / page).parent / link).exists()] == []
        assert re.match(r"# \w", made)
        assert len(re.findall(r"^# ", re.sub(r"```.*?```", "", made, flags=re.DOTALL), re.MULTILINE)) == 1


def test_the_command_reference_has_every_command_and_option() -> None:
    made = SITE["command_line"]()
    sections = dict(re.findall(r"^## (\S+)\n(.*?)(?=^## |\Z)", made, re.MULTILINE | re.DOTALL))
    assert set(sections) == set(COMMANDS)
    for name in COMMANDS:
        said = sections[name]
        for parameter in make_command(name).params:
            if parameter.param_type_name == "option" and parameter.name != "help":
                assert all(f"`{option}`" in said for option in parameter.opts), (name, parameter.name)
                assert parameter.help in said
        assert f"graphscale {name}" in said


def test_the_tables_have_all_that_the_code_has() -> None:
    made = {name: generate() for name, generate in SITE["GENERATORS"].items()}
    lists = "".join(made[name] for name in made if name.startswith("operators-") and name != "operators-wide")
    for (_, operator), rule in default_rules().items():
        assert f"`{operator}`" in lists
        assert rule.reason in made["operators-deny"]
    assert sum(row.count("`") // 2 for row in lists.splitlines()) >= len(default_rules())
    assert all(f"| `{name}` |" in made["targets"] for name in TARGETS)
    presets = gs.presets.NAMES
    assert all(f"| `{name}` |" in made["presets"] for name in presets)
    assert "| `deepspeed` | 2<sup>16</sup> | 1000 | 1 | none | `growth_delay='first'` `hysteresis=2`" in made["presets"]
    assert all(f"| `{option}` |" in made["dynamic-options"] for option in gs.presets.PolicyOptions.__annotations__)


def test_every_public_name_is_in_the_reference() -> None:
    said = re.findall(r"^::: (\S+)$", text_of("reference/api.md"), re.MULTILINE)
    last = {name.rpartition(".")[2] for name in said}
    assert set(gs.__all__) - {"GraphscaleError"} <= last
    assert "GraphscaleError" in text_of("reference/api.md")
    for name in said:
        module, _, attribute = name.rpartition(".")
        found = sys.modules.get(name) or getattr(importlib.import_module(module), attribute)
        assert found.__doc__, name


def test_lint_codes_are_in_the_nav() -> None:
    assert set(nav_of(SITE["lint_pages"]())) == {"lint/index.md", *(code.page for code in CODES.values())}


@pytest.mark.parametrize("script", ["draw_analysis", "draw_before_after", "draw_policies"])
def test_the_pictures_show_what_the_code_does(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib", reason="draws")
    monkeypatch.syspath_prepend(str(DOCS))
    names = runpy.run_path(str(DOCS / f"{script}.py"))
    if script != "draw_policies":
        names["check"]()
        assert all((DOCS / f"{name}.png").is_file() for name in names.get("PICTURES", ["before_after"]))
    else:
        for _, policy, _ in names["SHOWN"]:
            scales = names["trajectory"](policy)
            assert len(set(scales)) > 3 and min(scales) < max(scales)


@pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="needs mkdocs: pip install '.[docs]'")
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr
    assert "WARNING -" not in result.stderr
    home = (tmp_path / "site" / "index.html").read_text(encoding="utf-8")
    assert not re.findall(r'<(?:script|link|img)[^>]+(?:src|href)="(?:https?:)?//(?!graphscale\.)[^"]*"', home)


# --- the glossary -----------------------------------------------------------------------------------------------------

GLOSSARY = re.findall(r"^\*\*(.+)\*\*\n:   \S", text_of("concepts/glossary.md"), re.MULTILINE)
# The words that the project's writing must not vary.
FIXED = [
    *("carried state", "cotangent", "coverage", "degree", "finite check", "gradient", "guard", "loss scale"),
    *("lowering", "next value", "place", "role", "seed edge", "skip", "unscale"),
]


def test_the_glossary_is_whole_and_sorted() -> None:
    assert len(GLOSSARY) == text_of("concepts/glossary.md").count("\n**") == len(set(GLOSSARY))
    assert sorted(GLOSSARY) == GLOSSARY
    assert set(FIXED) <= set(GLOSSARY)


@pytest.mark.parametrize("term", GLOSSARY)
def test_each_term_is_used(term: str) -> None:
    """At least two other pages have the term, in the singular or with an ending."""
    word = re.compile(r"\b" + r"\s+".join(term.split()), re.IGNORECASE)
    others = [page for page in OWN if page != "concepts/glossary.md"]
    assert sum(bool(word.search(text_of(page))) for page in others) >= 2
