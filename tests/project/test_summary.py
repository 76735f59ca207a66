"""Results in a few lines, as text and as HTML: short, escaped, and made without any work."""

from __future__ import annotations

import re
import threading
from html.parser import HTMLParser
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

import graphscale as gs
from graphscale.process.summary import Summary, few
from graphscale.session.result import StepResult
from tests.checks.drawing.graphs import deep_network, hostile_step
from tests.session.digits import batch, make

SHORT = 16


def results(model: Any) -> list[Summary]:
    """Every kind of result that needs no runtime."""
    scaled = gs.scale(model)
    mixed = gs.autocast(model, emulate=True)
    return [
        *(scaled, scaled.report, gs.inspect(model), gs.roles(model), gs.lint(model), gs.lint(scaled.model)),
        *(mixed, mixed.report, gs.autocast(model, loss_scale="dynamic", emulate=True), gs.diff(model, scaled.model)),
    ]


class Cells(HTMLParser):
    """The elements and the texts of a table."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.texts: list[str] = []
        self.styles: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.add(tag)
        assert {name for name, _ in attrs} <= {"style", "scope"}
        self.styles += [value for name, value in attrs if name == "style"]

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def assert_short(result: Summary) -> None:
    lines = repr(result).splitlines()
    assert len(lines) <= SHORT
    assert lines[0].startswith(f"{type(result).__name__}: ")
    assert all(len(line) <= 170 and line.isprintable() for line in lines)
    cells = Cells(result._repr_html_())
    assert cells.tags <= {"table", "caption", "tbody", "tr", "th", "td"}
    # The same texts, whatever the form.
    assert cells.texts[0] == lines[0]
    assert [line.split() for line in lines[1:]] == [
        [*name.split(), *text.split()] for name, text in zip(cells.texts[1::2], cells.texts[2::2], strict=True)
    ]


@pytest.mark.full
def test_a_large_graph_has_a_short_form() -> None:
    for result in results(deep_network(40)):
        assert_short(result)
    assert "40" in repr(gs.inspect(deep_network(40)))


def test_names_from_a_file_stay_text() -> None:
    seen = []
    for result in results(hostile_step()):
        assert_short(result)
        html = result._repr_html_()
        seen.append("onerror" in html)
        assert "<img" not in html and "<svg" not in html and "</script" not in html
        assert "\u2028" not in repr(result) + html
    assert any(seen)


def test_colours_are_those_of_the_notebook() -> None:
    """A table on a dark page is light on dark: it names no colour but a half-transparent grey."""
    for style in Cells(gs.inspect(deep_network(2))._repr_html_()).styles:
        colours = set(re.findall(r"(?:color|background)\s*:\s*([^;]+)", style))
        assert colours <= {"inherit", "transparent"}
        assert set(re.findall(r"rgba?\([^)]*\)|#[0-9a-f]{3,8}\b", style)) <= {"rgba(128,128,128,.35)"}


def test_each_public_result_has_one() -> None:
    found = {name: getattr(gs, name) for name in gs.__all__ if isinstance(getattr(gs, name), type)}
    reports = {name for name in found if name.endswith(("Model", "Report", "Result", "Session"))} | {"GradientCheck"}
    assert len(reports) >= 8
    for name in reports:
        assert issubclass(found[name], Summary), name
        assert found[name].__repr__ is Summary.__repr__, name


def test_verify_says_what_failed() -> None:
    original = hostile_step()
    scaled = gs.scale(original).model
    good = gs.verify(original, scaled, runs=2)
    assert_short(good)
    assert repr(good).startswith("VerifyReport: verified")
    broken = ir.from_proto(scaled)
    scale = next(node for node in broken.graph if node.metadata_props.get("graphscale.pass") == "unscale-gradients")
    scale.replace_input_with(1, scale.inputs[0])
    bad = gs.verify(original, broken, runs=2)
    assert_short(bad)
    assert not bad.ok and "fails: " in repr(bad)


def test_check_gradients_counts_its_verdicts() -> None:
    checked = gs.check_gradients(deep_network(2))
    assert_short(checked)
    assert "agrees  2: w0, w1" in repr(checked)


class TestSession:
    def test_it_reads_no_state_and_waits_for_no_step(self, monkeypatch: pytest.MonkeyPatch) -> None:
        session = make()
        monkeypatch.setattr(session._carried, "buffers", None)
        monkeypatch.setattr(session, "_plan", None)
        held, done = threading.Event(), threading.Event()

        def step() -> None:
            with session._access:
                held.set()
                done.wait(30)

        other = threading.Thread(target=step)
        other.start()
        assert held.wait(30)
        try:
            assert_short(session)
            text = repr(session)
        finally:
            done.set()
            other.join()
        assert text.startswith("Session: open, state on cpu\n")
        assert "DynamicLossScale(" in text and "arrays" in text and "images float32[" in text

    def test_a_closed_one_says_so(self) -> None:
        session = make()
        session.close()
        assert repr(session).startswith("Session: closed\n")
        assert_short(session)

    def test_a_step_shows_its_numbers(self) -> None:
        result = make().step(batch())
        assert_short(result)
        assert repr(result).startswith("StepResult: applied\n")
        assert f"loss        {float(result['loss']):.6g}" in repr(result)
        bad = batch()
        bad["images"][0] = np.inf
        assert repr(make().step(bad)).startswith("StepResult: skipped\n")

    def test_arrays_are_shown_by_their_shapes_and_many_are_counted(self) -> None:
        outputs = {f"o{i}": np.zeros((i, 3), np.float16) for i in range(30)}
        text = repr(StepResult(outputs, {"all_finite": True}, {}, False))
        assert "o2   float16[2, 3]" in text
        assert "...  and 20 more" in text

    def test_the_status_on_a_gpu_stays_there(self) -> None:
        class OnDevice:
            def numpy(self) -> Any:
                raise AssertionError("copied")

        result = StepResult({"loss": np.float32(2).reshape(())}, {"all_finite": OnDevice()}, {}, False)
        assert_short(result)
        assert "2" in repr(result)


def test_few_names_of_many() -> None:
    assert few([]) == "none"
    assert few(["a", "b"]) == "a, b"
    assert few(list("abcdef")) == "a, b, c, d and 2 more"
