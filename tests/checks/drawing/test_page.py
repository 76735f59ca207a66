"""The page as text: complete in itself, and safe against names from files."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from typing import Any

import onnx_ir as ir
import pytest

import graphscale as gs
from graphscale.checks.diffing.compare import compare
from graphscale.checks.drawing import draw_comparison, draw_inspection
from graphscale.checks.drawing import page as page_module
from graphscale.checks.drawing.page import embed_json
from graphscale.files import model_files
from tests.checks.drawing.graphs import HOSTILE, deep_network, hostile_step, scaled_model
from tests.conftest import MODEL_NAMES, MODELS

pytestmark = pytest.mark.static

VOID = {"meta", "link", "input", "img", "br"}


class Page(HTMLParser):
    """The elements of a page; fails on what is not properly nested."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text: dict[str, str] = {}
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open:
            tag = self._open[-1]
            self.text[tag] = self.text.get(tag, "") + data

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.elements)


def inspect_page(model: Any, title: str = "model.onnx") -> str:
    return draw_inspection(model, gs.inspect(model), title)


def facts_of(page: str) -> Any:
    found = re.search(r'<script type="application/json" id="facts">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


@pytest.fixture(scope="module")
def momentum() -> str:
    return inspect_page(scaled_model("pytorch/mlp_momentum"))


def test_it_is_complete_in_itself(momentum: str) -> None:
    page = Page(momentum)
    references = [
        value for _, attributes in page.elements for name, value in attributes.items() if name in ("src", "href")
    ]
    assert set(references) == {"data:,", "#drawing"}
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)|@import|\burl\((?!#)|fetch\(|XMLHttp|eval\(", momentum)


def test_the_policy_allows_its_own_style_and_script_only(momentum: str) -> None:
    page = Page(momentum)
    policy = next(a["content"] for tag, a in page.elements if tag == "meta" and "http-equiv" in a)
    assert policy is not None and "unsafe" not in policy and "default-src 'none'" in policy
    for tag in ("style", "script"):
        text = re.findall(rf"<{tag}>(.*?)</{tag}>", momentum, re.DOTALL)
        assert len(text) == 1
        digest = base64.b64encode(hashlib.sha256(text[0].encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy
    assert not any(name.startswith("on") or name == "style" for _, a in page.elements for name in a)


def test_it_can_be_read_without_seeing_the_drawing(momentum: str) -> None:
    page = Page(momentum)
    boxes = [a for tag, a in page.elements if tag == "g" and (a.get("class") or "").startswith("box ") and "id" in a]
    assert len(boxes) == len(facts_of(momentum)) > 60
    for box in boxes:
        assert box["tabindex"] == "0" and box["role"] == "button" and box["aria-label"]
    assert page.count("title") == 2 + len(boxes)
    report = gs.inspect(scaled_model("pytorch/mlp_momentum"))
    text = " ".join(page.text.values())
    for name in (report.loss, *(g.value for g in report.gradients), *(s.input for s in report.state)):
        assert name in text
    assert "100 % (3 of 3 backward contractions)" in text
    assert "DynamicLossScale" in text


def test_what_hover_tells(momentum: str) -> None:
    facts = facts_of(momentum)
    place = next(fact for fact in facts if fact.get("pass") == "scale-loss")
    assert (place["op"], place["phase"]) == ("Mul", "backward")
    assert place["out"] == [["ones_like.scaled", "float32 []", "1", facts.index(place), ""]]
    assert [value[:3] for value in place["in"]][1] == ["current_loss_scale", "float32 []", "1"]
    assert place["in"][0][4] == "constant 1.0"
    gemm = next(fact for fact in facts if fact.get("op") == "Gemm")
    assert [value[:3] for value in gemm["out"]] == [["addmm", "float32 [8, 32]", "0"]]
    transpose = next(fact for fact in facts if fact.get("op") == "Transpose")
    assert transpose["attributes"] == [["perm", "[1, 0]"]]


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", MODEL_NAMES)
def test_every_graph_gives_a_page(name: str) -> None:
    for model in (ir.load(MODELS / f"{name}.onnx"), scaled_model(name)):
        page = inspect_page(model, name)
        assert len(page) < 800_000
        Page(page)
        facts_of(page)


@pytest.mark.full
def test_a_long_table_has_few_elements_and_no_row_is_lost() -> None:
    model = gs.scale(deep_network(70)).model
    text = inspect_page(model)
    page = Page(text)
    found = re.search(r'<script type="application/json" id="rows">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    rest = json.loads(found[1])
    buttons = [int(a["data-rest"] or "") for _, a in page.elements if "data-rest" in a]
    assert buttons == list(range(len(rest))) != []
    rows = sum(map(len, rest)) + page.count("tr")
    report = gs.inspect(model)
    inserted = sum("graphscale.pass" in node.metadata_props for node in ir.from_proto(model).graph)
    assert rows >= len(report.gradients) + len(report.state) + inserted
    assert page.count("tr") < 300


@pytest.fixture(scope="module")
def pages() -> list[str]:
    step = hostile_step()
    scaled = gs.scale(step).model
    drawn = draw_comparison(compare(step, scaled), HOSTILE, HOSTILE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(page_module, "_LONG", 1)
        patch.setattr(page_module, "_SHOWN", 1)
        with_long_tables = inspect_page(scaled, HOSTILE)
    return [inspect_page(step, HOSTILE), inspect_page(scaled, HOSTILE), drawn, with_long_tables]


class TestHostileNames:
    def test_they_stay_text(self, pages: list[str]) -> None:
        for text in pages:
            page = Page(text)
            assert page.count("script") == 3
            assert page.count("img") == 0
            assert not any("onerror" in a or "onload" in a for _, a in page.elements)
            assert all("onload" not in (a.get("class") or "") for _, a in page.elements)
            assert page.text["h1"] == HOSTILE

    def test_they_arrive_whole(self, pages: list[str]) -> None:
        for text in pages:
            names = {fact.get("name", "") for fact in facts_of(text)}
            assert any(name.startswith(HOSTILE) for name in names)

    def test_a_pass_of_that_name_is_no_class(self) -> None:
        model = gs.scale(model_files.from_proto(hostile_step())).model
        assert isinstance(model, ir.Model)
        next(iter(model.graph)).metadata_props["graphscale.pass"] = f"x {HOSTILE}"
        page = Page(inspect_page(model))
        classes = {name for _, a in page.elements for name in (a.get("class") or "").split()}
        assert "pass-other" in classes
        assert not any(len(name) > 30 or "<" in name for name in classes)


def test_embedded_json_cannot_end_its_element() -> None:
    data = ["</script>", "<!--<script>", "&lt;", "\u2028\u2029", "\ud800"]
    text = embed_json(data)
    assert not set("<>&\u2028\u2029") & set(text)
    assert json.loads(text) == [*data[:4], "?"]
