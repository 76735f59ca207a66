"""A plugin of pytest: it writes down tier, seconds and outcome of each test, and runs the tests of a list in order."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

LISTED = os.environ.get("GRAPHSCALE_MUTANT_TESTS")
RECORD = os.environ.get("GRAPHSCALE_MUTANT_RECORD")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep the tests of the list, in its order."""
    if LISTED:
        order = {name: i for i, name in enumerate(Path(LISTED).read_text(encoding="utf-8").splitlines())}
        items[:] = sorted((item for item in items if item.nodeid in order), key=lambda item: order[item.nodeid])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Write down how a test went."""
    report = yield
    if RECORD and (report.when == "call" or report.failed):
        full = item.get_closest_marker("full") is not None
        with Path(RECORD, f"{os.getpid()}.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps([item.nodeid, full, report.duration, report.outcome]) + "\n")
    return report
