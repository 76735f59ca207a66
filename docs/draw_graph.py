"""Draw docs/graph.png: the page that `graphscale inspect --html` writes, in a browser, with the pointer on a node.

python docs/draw_graph.py    (with what `pip install -e '.[browser,demo]'` brings, Chromium and chromedriver)
"""

# ruff: noqa: D103

from __future__ import annotations

import io
import shutil
import tempfile
from pathlib import Path

from PIL import Image
from selenium import webdriver
from selenium.webdriver import ActionChains
from selenium.webdriver.chrome.service import Service

import graphscale as gs
from graphscale.checks.drawing import draw_inspection

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "models" / "pytorch" / "mlp_momentum.onnx"
WIDTH, HEIGHT = 2040, 900
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --hide-scrollbars"
)


def open_browser(profile: str) -> webdriver.Chrome:
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or shutil.which("google-chrome") or ""
    for flag in (*FLAGS.split(), f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    browser = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    size = {"width": WIDTH, "height": HEIGHT, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    return browser


def picture(page: Path, profile: str) -> Image.Image:
    browser = open_browser(profile)
    try:
        browser.get(page.as_uri())
        seed = browser.find_element("css selector", "#boxes .pass-scale-loss")
        ActionChains(browser).move_to_element(seed).perform()
        assert "inserted by scale-loss" in browser.find_element("id", "tip").text
        assert browser.get_log("browser") == []
        return Image.open(io.BytesIO(browser.get_screenshot_as_png())).convert("RGB")
    finally:
        browser.quit()


def main() -> None:
    scaled = gs.scale(MODEL).model
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder, "page.html")
        page.write_text(draw_inspection(scaled, gs.inspect(scaled), MODEL.name), encoding="utf-8")
        image = picture(page, f"{folder}/profile")
    target = Path(__file__).with_name("graph.png")
    image.quantize(128, dither=Image.Dither.NONE).save(target, optimize=True)
    assert target.stat().st_size < 300_000


if __name__ == "__main__":
    main()
