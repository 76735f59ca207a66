"""Every code has a page; the graph before has the finding, and the one after has none."""

from __future__ import annotations

import importlib.util
import re
from types import ModuleType

import onnx
import pytest

import graphscale as gs
from graphscale.checks.linting.codes import CODES, GROUPS
from graphscale.checks.linting.linter import RULES
from tests.build import parse
from tests.conftest import ROOT

pytestmark = pytest.mark.static

PAGES = ROOT / "docs" / "lint"


def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("lint_pages", ROOT / "docs" / "lint_pages.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def graphs(code: str) -> list[onnx.ModelProto]:
    text = (PAGES / f"{code}.md").read_text(encoding="utf-8")
    return [parse(block) for block in re.findall(r"^```onnx\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)]


@pytest.mark.sample(8)
@pytest.mark.parametrize("code", CODES)
def test_the_graphs_of_a_page(code: str) -> None:
    before, after = graphs(code)
    for model in (before, after):
        onnx.checker.check_model(model)
    found = gs.lint(before).findings
    assert code in [finding.code for finding in found]
    finding = next(finding for finding in found if finding.code == code)
    assert finding.severity == CODES[code].severity
    assert finding.why == CODES[code].why and finding.fix == CODES[code].fix
    names = {value for node in before.graph.node for value in (*node.input, *node.output)}
    assert finding.value is None or finding.value in names
    assert gs.lint(after).findings == ()


# The optimizer's operator updates four states; and who divides in float16 has cast the scale to it.
ALSO = {"GS406": {"GS406"}, "GS501": {"GS501"}, "GS603": {"GS601", "GS603"}}


@pytest.mark.sample(8)
@pytest.mark.parametrize("code", CODES)
def test_a_mistake_has_one_finding(code: str) -> None:
    found = [finding.code for finding in gs.lint(graphs(code)[0]).findings]
    assert set(found) == ALSO.get(code, {code})
    assert code in ALSO or len(found) == 1


def test_there_is_a_page_for_each_code_and_no_other() -> None:
    assert {path.stem for path in PAGES.glob("*.md")} == {*CODES, "index"}


def test_pages_say_what_the_table_says() -> None:
    pages = generator()
    assert (PAGES / "index.md").read_text(encoding="utf-8") == pages.index()
    for code in CODES.values():
        text = (PAGES / f"{code.code}.md").read_text(encoding="utf-8")
        assert text == pages.with_heading(code, text), f"run python docs/lint_pages.py: {code.code}"


def test_the_table() -> None:
    assert list(CODES) == sorted(CODES)
    assert len({code.name for code in CODES.values()}) == len(CODES)
    for name, code in CODES.items():
        assert re.fullmatch(r"GS[1-9]\d\d", name) and name[2] in GROUPS
        assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", code.name)
        assert code.why.endswith(".") and code.fix.endswith(".") and not code.title.endswith(".")


def test_every_code_has_a_rule() -> None:
    assert {code for codes, _ in RULES for code in codes} == set(CODES)
