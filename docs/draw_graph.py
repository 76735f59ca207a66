"""Draw docs/graph.png and docs/drawings/: the pages of `graphscale inspect --html` and `diff --html`, in a browser.

python docs/draw_graph.py    (with what `pip install -e '.[browser,demo]'` brings, Chromium and chromedriver)
"""

# ruff: noqa: D103

from __future__ import annotations

import io
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from PIL import Image
from selenium.webdriver import ActionChains

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import graphscale as gs  # noqa: E402
from graphscale.checks.diffing.compare import compare  # noqa: E402
from graphscale.checks.drawing import draw_comparison, draw_inspection  # noqa: E402
from tests.checks.drawing.graphs import deep_network  # noqa: E402
from tests.chromium import open_browser  # noqa: E402

MODEL = ROOT / "models" / "pytorch" / "mlp_momentum.onnx"
# Layers of a network, by the nodes that its step has when it is scaled.
LAYERS = {100: 5, 1_000: 55, 12_000: 666}
WIDE, WINDOW = (2040, 900), (1500, 950)
DARK = 1_000  # nodes of those that are drawn in the dark as well


def pages() -> Iterator[tuple[str, str, bool]]:
    """Yield the name, the page, and whether it is opened in the dark."""
    for nodes, layers in LAYERS.items():
        step = deep_network(layers)
        scaled = gs.scale(step).model
        drawn = {
            "inspect": draw_inspection(scaled, gs.inspect(scaled), "scaled.onnx"),
            "diff": draw_comparison(compare(step, scaled), "step.onnx", "scaled.onnx"),
        }
        for kind, page in drawn.items():
            yield f"{kind}-{nodes}", page, False
            if nodes == DARK:
                yield f"{kind}-{nodes}-dark", page, True


def open_page(browser: Any, path: Path, text: str, size: tuple[int, int], dark: bool = False) -> None:
    metrics = {"width": size[0], "height": size[1], "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
    path.write_text(text, encoding="utf-8")
    browser.get(path.as_uri())


def save(browser: Any, target: Path, most: int) -> None:
    assert browser.get_log("browser") == []
    image = Image.open(io.BytesIO(browser.get_screenshot_as_png())).convert("RGB")
    image.quantize(96, dither=Image.Dither.NONE).save(target, optimize=True)
    assert target.stat().st_size < most, target


def main() -> None:
    folder = ROOT / "docs" / "drawings"
    folder.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary, open_browser(Path(temporary, "profile")) as browser:
        path = Path(temporary, "page.html")
        scaled = gs.scale(MODEL).model
        open_page(browser, path, draw_inspection(scaled, gs.inspect(scaled), MODEL.name), WIDE)
        seed = browser.find_element("css selector", "#boxes .pass-scale-loss")
        ActionChains(browser).move_to_element(seed).perform()
        assert "inserted by scale-loss" in browser.find_element("id", "tip").text
        save(browser, ROOT / "docs" / "graph.png", 300_000)
        for name, text, dark in pages():
            open_page(browser, path, text, WINDOW, dark)
            save(browser, folder / f"{name}.png", 150_000)


if __name__ == "__main__":
    main()
