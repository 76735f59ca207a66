"""The wheel: its files, its metadata, and its work on its own."""

from __future__ import annotations

import configparser
import email.parser
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from email.message import Message
from pathlib import Path

import pytest

import graphscale as gs
from tests.conftest import MODELS, ROOT

pytestmark = [pytest.mark.packaging, pytest.mark.full]
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
INFO = f"graphscale-{VERSION}.dist-info"
pytest.importorskip("build", reason="building the wheel needs build")
pytest.importorskip("hatchling", reason="building the wheel needs hatchling")
pytest.importorskip("hatch_fancy_pypi_readme", reason="building the wheel needs hatch-fancy-pypi-readme")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, ROOT]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    (path,) = folder.glob("*.whl")
    assert path.name == f"graphscale-{VERSION}-py3-none-any.whl"
    return zipfile.ZipFile(path)


@pytest.fixture(scope="module")
def metadata(wheel: zipfile.ZipFile) -> Message:
    return email.parser.Parser().parsestr(wheel.read(f"{INFO}/METADATA").decode())


def test_it_holds_the_package_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    names = wheel.namelist()
    assert len(names) == len(set(names))
    assert {name.split("/")[0] for name in names} == {"graphscale", INFO}
    package = {name for name in names if name.startswith("graphscale/")}
    assert {Path(name).suffix for name in package} == {".py", ".typed", ".onnx", ".css", ".js"}
    assert {"graphscale/py.typed", "graphscale/demo/digits_step.onnx", "graphscale/__main__.py"} <= package
    source = {path.relative_to(ROOT).as_posix() for path in (ROOT / "graphscale").rglob("*") if path.is_file()}
    assert package == {name for name in source if "__pycache__" not in name}


def test_it_is_small(wheel: zipfile.ZipFile) -> None:
    assert Path(str(wheel.filename)).stat().st_size < 1_050_000
    package = [entry for entry in wheel.infolist() if entry.filename.startswith("graphscale/")]
    assert max(entry.compress_size for entry in package) < 15_000  # code, and two small steps for the demo


def test_the_entry_point(wheel: zipfile.ZipFile) -> None:
    parser = configparser.ConfigParser()
    parser.read_string(wheel.read(f"{INFO}/entry_points.txt").decode())
    assert dict(parser["console_scripts"]) == {"graphscale": "graphscale.cli:main"}


def test_the_licence(wheel: zipfile.ZipFile, metadata: Message) -> None:
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata.get_all("License-File") == ["LICENSE"]
    text = wheel.read(f"{INFO}/licenses/LICENSE")
    assert text == (ROOT / "LICENSE").read_bytes()
    assert b"Apache License" in text


def test_the_metadata(metadata: Message) -> None:
    assert (metadata["Name"], metadata["Version"], metadata["Requires-Python"]) == ("graphscale", VERSION, ">=3.11")
    assert metadata["Summary"]
    readme, shown = (ROOT / "README.md").read_text(encoding="utf-8"), metadata.get_payload()
    link = re.compile(r"\]\(([^)]+)\)")
    assert link.sub("", shown).strip() == link.sub("", readme).strip()
    assert all(target.startswith("https://") for target in link.findall(shown))
    requirements = metadata.get_all("Requires-Dist") or []
    core = {re.split("[<>=;]", requirement)[0] for requirement in requirements if "extra ==" not in requirement}
    assert {name.replace("_", "-") for name in core} == {
        "ml-dtypes",
        "numpy",
        "onnx",
        "onnx-ir",
        "packaging",
        "rich",
        "safetensors",
        "typer",
    }
    assert {"ort", "training", "demo", "test", "dev"} <= set(metadata.get_all("Provides-Extra") or [])


def test_it_works_on_its_own(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    """Unpacked into an empty folder, away from the checkout, it scales a model."""
    wheel.extractall(tmp_path / "site")
    code = f"""
import sys
sys.path.insert(0, {str(tmp_path / "site")!r})
import graphscale
assert graphscale.__file__.startswith({str(tmp_path)!r}), graphscale.__file__
sys.argv = ["graphscale", "scale", {str(MODELS / "pytorch" / "mse_tanh.onnx")!r}, "-o", "scaled.onnx", "--json"]
from graphscale.cli import main
main()
"""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert gs.inspect(tmp_path / "scaled.onnx").proved
