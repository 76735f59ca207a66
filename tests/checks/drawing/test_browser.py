"""The pages in a real browser: no errors, and hover, click, keys, search and zoom do what they should."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import graphscale as gs
from graphscale.checks.diffing.compare import compare
from graphscale.checks.drawing import draw_comparison, draw_inspection
from tests.checks.drawing.graphs import HOSTILE, deep_network, hostile_step, scaled_model
from tests.chromium import BROWSER_MARKS, open_browser

pytestmark = BROWSER_MARKS


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with open_browser(tmp_path_factory.mktemp("profile")) as browser:
        browser.execute_cdp_cmd("Performance.enable", {"timeDomain": "threadTicks"})
        yield browser


class Page:
    """An open page, with the words for what is done to it."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def all(self, selector: str) -> list[Any]:
        found: list[Any] = self.driver.find_elements("css selector", selector)
        return found

    def one(self, selector: str) -> Any:
        return self.driver.find_element("css selector", selector)

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def hover(self, selector: str) -> str:
        from selenium.webdriver import ActionChains

        ActionChains(self.driver).move_to_element(self.one(selector)).perform()
        tip = self.one("#tip")
        return str(tip.text) if tip.is_displayed() else ""

    def press(self, *keys: str) -> None:
        from selenium.webdriver import ActionChains

        ActionChains(self.driver).send_keys(*keys).perform()

    def is_in_view(self, selector: str) -> bool:
        area = "const r = arguments[0].getBoundingClientRect();"
        return bool(
            self.run(
                f"{area} const m = document.querySelector('main').getBoundingClientRect();"
                "return r.left >= m.left && r.right <= m.right && r.top >= m.top && r.bottom <= m.bottom",
                self.one(selector),
            )
        )

    def scale(self) -> float:
        return float(self.run("return document.getElementById('view').transform.baseVal.consolidate().matrix.a"))

    def cpu_seconds(self) -> float:
        """CPU time that the page has taken, scripts, layout and painting together."""
        metrics = self.driver.execute_cdp_cmd("Performance.getMetrics", {})["metrics"]
        return float(next(metric["value"] for metric in metrics if metric["name"] == "TaskDuration"))

    def complaints(self) -> list[str]:
        return [entry["message"] for entry in self.driver.get_log("browser")]


@pytest.fixture(scope="module")
def open_page(driver: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Page]:
    folder = tmp_path_factory.mktemp("pages")

    numbers = itertools.count()

    def open_it(text: str) -> Page:
        path: Path = folder / f"page{next(numbers)}.html"
        path.write_text(text, encoding="utf-8")
        driver.get(path.as_uri())
        return Page(driver)

    return open_it


@pytest.fixture
def page(open_page: Callable[[str], Page]) -> Iterator[Page]:
    """The page of a scaled step with momentum inside; nothing that a test does may raise an error in it."""
    model = scaled_model("pytorch/mlp_momentum")
    opened = open_page(draw_inspection(model, gs.inspect(model), "mlp_momentum.onnx"))
    yield opened
    assert opened.complaints() == []


PLACE = "#boxes .pass-scale-loss"


class TestOneBox:
    def test_hover_tells_types_and_degrees(self, page: Page) -> None:
        text = page.hover(PLACE)
        lines = text.splitlines()
        assert lines[:2] == ["Mul", "graphscale/scale-loss/ones_like.scaled"]
        assert "inserted by scale-loss" in text
        assert "float32 [], constant 1.0" in text
        assert any(line.startswith("out ones_like.scaled") for line in lines)
        assert text.count("\u00d7 S") == 2  # the loss scale itself, and the product
        assert page.hover("h1") == ""

    def test_hover_shows_what_it_is_linked_to(self, page: Page) -> None:
        page.hover(PLACE)
        near = page.all(".box.near")
        assert sorted(box.get_attribute("aria-label").split()[0] for box in near) == ["Div", "Mul"]
        assert len(page.all(".link.near")) == 1
        page.hover("h1")
        assert page.all(".near") == []

    def test_a_click_pins_and_its_links_lead_on(self, page: Page) -> None:
        page.one(PLACE).click()
        pinned = page.one("#pinned")
        assert pinned.is_displayed() and "ones_like.scaled" in pinned.text
        assert page.one(PLACE).get_attribute("aria-pressed") == "true"
        page.one("#unpin").click()
        assert not pinned.is_displayed()
        page.one("#boxes .pass-unscale-gradients").click()
        pinned.find_element("css selector", "button.jump").click()
        assert pinned.find_element("css selector", "b").text != "Div"
        assert page.is_in_view(".box.pinned")

    def test_keys_walk_along_the_links(self, page: Page) -> None:
        from selenium.webdriver.common.keys import Keys

        page.run("document.querySelector(arguments[0]).focus()", PLACE)
        page.press(Keys.ARROW_DOWN)
        label = "return document.activeElement.getAttribute('aria-label')"
        assert page.run(label).startswith("Div node_div_1")
        assert "node_div_1" in page.one("#tip").text
        page.press(Keys.ENTER)
        assert "node_div_1" in page.one("#pinned").text
        page.press(Keys.ESCAPE)
        assert not page.one("#pinned").is_displayed()
        page.press(Keys.TAB)
        assert page.run(label) and not page.run(label).startswith("Div node_div_1")


class TestSearch:
    def test_it_jumps_to_a_node(self, page: Page) -> None:
        from selenium.webdriver.common.keys import Keys

        page.press("/")
        page.one("#search").send_keys("fc2.bias.next.guarded")
        found = [item.text.split() for item in page.all("#results li")]
        assert found[0] == ["graphscale/guard-updates/fc2.bias.next.guarded", "Where"]
        page.one("#search").send_keys(Keys.ENTER)
        assert "fc2.bias.next.guarded" in page.one("#pinned").text
        assert page.is_in_view(".box.pinned")
        assert page.scale() >= 0.85

    def test_values_are_found_and_what_is_not_there_is_said(self, page: Page) -> None:
        page.one("#search").send_keys("addmm_1")
        assert any("output of node_addmm_1" in item.text for item in page.all("#results li"))
        page.one("#search").clear()
        page.one("#search").send_keys("no such node")
        assert [item.text for item in page.all("#results li")] == ["nothing of this name"]

    def test_tables_lead_to_boxes(self, page: Page) -> None:
        page.one("td .jump").click()
        assert page.is_in_view(".box.pinned")


class TestView:
    def test_zoom_and_fit(self, page: Page) -> None:
        first = page.scale()
        page.one("#in").click()
        assert page.scale() > first
        page.press("0")
        assert page.scale() == pytest.approx(first)
        for box in ("#boxes .forward", "#boxes .output.update", "#boxes .loss"):
            assert page.is_in_view(box)

    def test_the_wheel_zooms_at_the_pointer(self, page: Page) -> None:
        place = "const r = document.querySelector(arguments[0]).getBoundingClientRect(); return [r.x, r.y]"
        before, scale = page.run(place, PLACE), page.scale()
        page.run(
            "document.getElementById('drawing').dispatchEvent(new WheelEvent('wheel', {deltaY: -300, "
            "clientX: arguments[0], clientY: arguments[1], cancelable: true}))",
            *before,
        )
        assert page.scale() > 1.3 * scale
        assert page.run(place, PLACE) == pytest.approx(before, abs=2)

    def test_dragging_pans_and_does_not_pin(self, page: Page) -> None:
        from selenium.webdriver import ActionChains

        place = "const r = document.querySelector(arguments[0]).getBoundingClientRect(); return [r.x, r.y]"
        before = page.run(place, PLACE)
        ActionChains(page.driver).drag_and_drop_by_offset(page.one(PLACE), 60, -40).perform()
        assert page.run(place, PLACE) == pytest.approx([before[0] + 60, before[1] - 40], abs=2)
        assert not page.one("#pinned").is_displayed()

    def test_the_legend_shows_one_kind_only(self, page: Page) -> None:
        entry = next(b for b in page.all(".legend button") if b.text.endswith("guard-updates"))
        entry.click()
        assert entry.get_attribute("aria-pressed") == "true"
        matches = page.all(".box.match")
        assert len(matches) == 8
        assert all("pass-guard-updates" in box.get_attribute("class") for box in matches)
        entry.click()
        assert page.all(".match") == []

    def test_colours_differ_between_light_and_dark(self, page: Page) -> None:
        colour = "return getComputedStyle(document.body).backgroundColor"
        seen = []
        for scheme in ("light", "dark"):
            features = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
            page.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", features)
            seen.append(page.run(colour))
        page.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
        assert seen == ["rgb(244, 245, 246)", "rgb(20, 23, 27)"]


@pytest.mark.parametrize("whole", [False, True])
def test_a_drawing_starts_with_all_that_can_be_read_or_at_the_seed_edge(
    open_page: Callable[[str], Page], whole: bool
) -> None:
    model = gs.scale(deep_network(58)).model
    page = open_page(draw_inspection(model, gs.inspect(model), "deep", whole=whole))
    assert page.is_in_view(PLACE)
    assert page.is_in_view(".callout")
    assert page.scale() >= 0.5
    boxes = page.all("#boxes .box")
    seen = [box for box in boxes if page.is_in_view(f"#{box.get_attribute('id')}")]
    if not whole:
        assert len(seen) == len(boxes) < 150
        return
    assert 10 < len(seen) < len(boxes)
    # The seed edge is in the middle, but where the window would be empty beyond the end of the drawing.
    places = """const m = document.querySelector('main').getBoundingClientRect();
        const [r, v] = [arguments[0], '#view'].map((name) => document.querySelector(name).getBoundingClientRect());
        return [[r.x + r.width / 2 - m.x - m.width / 2, v.left - m.left, m.right - v.right],
                [r.y + r.height / 2 - m.y - m.height / 2, v.top - m.top, m.bottom - v.bottom]]"""
    for offset, *gaps in page.run(places, PLACE):
        assert abs(offset) < 2 or max(gaps) == pytest.approx(40, abs=10)  # the frame is around boxes and lanes
    page.press("0")
    assert page.scale() < 0.5
    assert page.complaints() == []


def test_the_rest_of_a_long_table_comes_on_demand(open_page: Callable[[str], Page]) -> None:
    model = gs.scale(deep_network(70)).model
    page = open_page(draw_inspection(model, gs.inspect(model), "deep"))
    table = next(d for d in page.all("aside details") if d.text.startswith("Gradients"))
    table.find_element("css selector", "summary").click()
    assert len(table.find_elements("css selector", "tbody tr")) == 40
    table.find_element("css selector", ".more").click()
    rows = table.find_elements("css selector", "tbody tr")
    assert len(rows) == len({row.text for row in rows}) == 70
    assert table.find_elements("css selector", ".more") == []
    rows[-1].find_element("css selector", ".jump").click()
    assert page.is_in_view(".box.pinned")
    assert page.complaints() == []


def test_hostile_names_are_shown_and_never_run(open_page: Callable[[str], Page]) -> None:
    step = hostile_step()
    scaled = gs.scale(step).model
    for text in (
        draw_inspection(scaled, gs.inspect(scaled), HOSTILE),
        draw_comparison(compare(step, scaled), HOSTILE, "B"),
    ):
        page = open_page(text)
        assert "onerror" in page.hover("#boxes .multiple:not(.pass-scale-loss)")
        page.one("#boxes .multiple").click()
        page.one("#search").send_keys("script")
        assert len(page.all("#results li")) > 5
        assert page.all("img") == []
        assert page.driver.title.endswith("graphscale")
        assert page.complaints() == []


def test_pages_of_all_kinds_open_without_errors(open_page: Callable[[str], Page]) -> None:
    for name in ("pytorch/attention_adamw_clip", "ort/recurrent", "ort/transformer", "jax/conv"):
        model = scaled_model(name)
        page = open_page(draw_inspection(model, gs.inspect(model), name))
        assert page.all(".box")
        assert page.complaints() == []


def test_a_large_graph_opens_soon(open_page: Callable[[str], Page]) -> None:
    """More than 5,000 nodes: folded, but every one of them can be found."""
    model = gs.scale(deep_network(280)).model
    text = draw_inspection(model, gs.inspect(model), "deep")
    page = open_page(text)
    assert page.run("return document.querySelectorAll('*').length") < 2500
    assert page.run("return document.readyState") == "complete"
    assert 0 < page.cpu_seconds() < 5
    page.one("#search").send_keys("n_dw123")
    assert "n_dw123" in page.all("#results li")[0].text
    page.all("#results li")[0].click()
    assert page.is_in_view(".box.pinned")
    assert "nodes" in page.one("#pinned").text
    assert page.complaints() == []
