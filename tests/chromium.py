"""Chromium for tests of pages, driven by selenium."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DRIVER = shutil.which("chromedriver")
LACKS = [
    name
    for name, there in (
        ("Chromium", BROWSER),
        ("chromedriver", DRIVER),
        ("selenium (pip install '.[browser]')", importlib.util.find_spec("selenium")),
    )
    if not there
]
BROWSER_MARKS = [pytest.mark.browser, pytest.mark.skipif(bool(LACKS), reason=f"needs {', '.join(LACKS)}")]

_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1500,950",
)


@contextmanager
def open_browser(profile: Path) -> Iterator[Any]:
    """Start Chromium with an empty profile, and close it in the end."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for flag in (*_FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    browser = webdriver.Chrome(options=options, service=Service(DRIVER))
    try:
        yield browser
    finally:
        browser.quit()
