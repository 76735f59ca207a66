"""The page of examples/browser in Chromium; `python -m tests.examples.browser_site` takes its picture."""

from __future__ import annotations

import functools
import http.server
import io
import os
import runpy
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.chromium import open_browser

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "browser"
LIBRARY = Path(os.environ.get("NODE_MODULES", EXAMPLE / "node_modules")) / "onnxruntime-web" / "dist"
PICTURE = ROOT / "docs" / "browser.png"


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    """A static server without a log."""

    def log_message(self, *_: Any) -> None: ...


def make_site(folder: Path) -> None:
    runpy.run_path(str(EXAMPLE / "prepare.py"))["prepare"](folder, LIBRARY)


@contextmanager
def open_site(site: Path, browser: Any) -> Iterator[None]:
    """Serve a site on this machine, and wait until its page can train."""
    from selenium.webdriver.support.ui import WebDriverWait

    handler = functools.partial(QuietHandler, directory=os.fspath(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        browser.get(f"http://127.0.0.1:{server.server_port}/")
        WebDriverWait(browser, 120).until(lambda opened: opened.find_element("id", "run").is_enabled())
        yield
        server.shutdown()


def run(browser: Any, script: str) -> Any:
    """Run the body of an async function of `page` in the page; return its result."""
    browser.set_script_timeout(120)
    result = browser.execute_async_script(
        "const done = arguments[0];"
        f"(async (page) => {{ {script} }})(window.page)"
        ".then((value) => done({ value }), (error) => done({ error: String(error) }))"
    )
    assert "error" not in result, result
    return result["value"]


def take_picture(path: Path) -> None:
    from PIL import Image

    with tempfile.TemporaryDirectory() as folder:
        make_site(Path(folder, "site"))
        with open_browser(Path(folder, "profile")) as browser, open_site(Path(folder, "site"), browser):
            size = {"width": 900, "height": 980, "deviceScaleFactor": 1, "mobile": False}
            browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
            run(
                browser,
                """
                for (let step = 1; step < 200; step++) {
                  page.infinite = step === 131;
                  await page.step();
                }
                page.show(await page.step());
                await new Promise(requestAnimationFrame);
                """,
            )
            picture = Image.open(io.BytesIO(browser.get_screenshot_as_png())).convert("RGB")
    picture.quantize(128, dither=Image.Dither.NONE).save(path, optimize=True)


if __name__ == "__main__":
    take_picture(PICTURE)
