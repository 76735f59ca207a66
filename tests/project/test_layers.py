"""The layout of the package: few modules at its root, no two of one name, and the layers that CONTRIBUTING draws."""

from __future__ import annotations

import re
import tomllib
from collections import Counter

import pytest

from tests.conftest import ROOT

pytestmark = pytest.mark.static

PACKAGE = ROOT / "graphscale"


def test_at_most_eight_modules_at_the_root() -> None:
    assert len(list(PACKAGE.glob("*.py"))) <= 8


def test_no_two_modules_of_one_name() -> None:
    counts = Counter(path.stem for path in PACKAGE.rglob("*.py") if path.name != "__init__.py")
    assert [name for name, count in counts.items() if count > 1] == []


def test_the_picture_of_the_layers_is_the_contract() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"][
        "contracts"
    ]
    layers = next(contract["layers"] for contract in contracts if contract["id"] == "layers")
    picture = re.search(
        r"^## Layers\n.*?^```text\n(.*?)^```", (ROOT / "CONTRIBUTING.md").read_text("utf-8"), re.M | re.S
    )
    assert picture is not None
    drawn = [set(line[:48].split()) for line in picture[1].splitlines()]
    assert drawn == [set(layer.split(" | ")) for layer in layers if layer != "__main__"]


def test_the_guide_names_files_that_exist() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    known = {path.name for folder in (PACKAGE, ROOT / "tests", ROOT / "docs") for path in folder.rglob("*.py")}
    named = {path.rsplit("/", 1)[-1] for path in re.findall(r"`([\w/]+\.py)`", text)}
    assert named - known == {"document_nodes.py"}, "but for the example"


def test_files_are_short() -> None:
    lines = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in PACKAGE.rglob("*.py")}
    assert [str(path) for path, count in lines.items() if count > 400] == []
    assert [str(path) for path, count in lines.items() if path.parent.name == "passes" and count > 150] == []
