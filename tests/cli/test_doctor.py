"""`graphscale doctor`: the installation that runs, and others that are made up."""

from __future__ import annotations

import importlib
import json
import shlex
import sys
from collections.abc import Callable
from importlib import metadata
from typing import Any

import onnxruntime as ort
import pytest
from packaging.requirements import Requirement

import graphscale as gs
from graphscale.cli import installation
from graphscale.graph.releases import release_of
from graphscale.targets import TARGETS
from tests.cli.command import cell, graphscale
from tests.conftest import HAS_TRAINING

PIP = [sys.executable, "-m", "pip", "install"]


def doctor() -> dict[str, Any]:
    found = graphscale("doctor", "--json")
    assert found.stderr == ""
    facts: dict[str, Any] = json.loads(found.stdout)
    assert found.returncode == int(bool(facts["problems"]))
    for command in facts["advice"].values():
        words = shlex.split(command.rpartition(" && ")[2])
        assert words[: len(PIP)] == PIP
        assert [Requirement(word) for word in words[len(PIP) :] if word != "--force-reinstall"]
    return facts


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let distributions have other versions, None for those that are missing, and these be the runtimes."""
    real = metadata.version

    def change(runtimes: dict[str, str] | None = None, **versions: str | None) -> None:
        known = {name.replace("_", "-"): number for name, number in versions.items()} | (runtimes or {})

        def version(name: str) -> str:
            if (number := known.get(name, "")) is None:
                raise metadata.PackageNotFoundError(name)
            return number or real(name)

        monkeypatch.setattr(installation.metadata, "version", version)
        if runtimes is not None:
            found = {"onnxruntime": [*runtimes]} if runtimes else {}
            monkeypatch.setattr(installation.metadata, "packages_distributions", lambda: found)

    return change


@pytest.mark.full
def test_this_installation() -> None:
    shown, facts = graphscale("doctor"), doctor()
    assert shown.returncode == 0 and shown.stdout.splitlines()[-1 - len(facts["advice"])] == "nothing is broken"
    assert cell(shown.stdout, "graphscale").startswith(f"{gs.__version__} in ")
    assert cell(shown.stdout, "Python").startswith(f"{sys.version.split()[0]} on ")
    assert ort.__version__ in cell(shown.stdout, "runtime")
    assert [*facts["providers"]] == ort.get_available_providers()
    assert facts["providers"]["CPUExecutionProvider"] == ""
    release = release_of(ort.__version__)
    assert release is not None
    for name, target in TARGETS.items():
        runs = facts["targets"][name]
        assert runs["opset"] == [10, min(release.max_opset, target.max_opset)] or runs["lacks"]
    assert facts["targets"]["onnx"]["lacks"] == ""
    assert (facts["targets"]["ort-training"]["lacks"] == "") is HAS_TRAINING


def test_runtimes_over_each_other(pretend: Callable[..., None]) -> None:
    pretend({"onnxruntime": "1.22.0", "onnxruntime-training": "1.19.2"})
    facts = doctor()
    assert facts["problems"] == [
        "onnxruntime and onnxruntime-training are installed over each other: they share one import name"
    ]
    remove, install = facts["advice"]["one runtime alone"].split(" && ")
    assert remove.endswith("uninstall -y onnxruntime onnxruntime-training")
    assert install.endswith("install onnxruntime-training==1.19.2")
    assert "broken: onnxruntime and" in graphscale("doctor").stdout


def test_no_runtime(pretend: Callable[..., None]) -> None:
    """The compiler needs none."""
    pretend({})
    facts = doctor()
    assert (facts["problems"], facts["runtimes"], facts["providers"]) == ([], {}, {})
    assert facts["advice"]["gs.Session, verify and train"].endswith("install onnxruntime")
    assert {runs["lacks"] for runs in facts["targets"].values()} == {
        "onnxruntime",
        "onnxruntime-gpu",
        "onnxruntime-training",
    }
    assert graphscale("doctor").returncode == 0


def test_a_damaged_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.import_module

    def damaged(name: str, *rest: Any) -> Any:
        if name == "onnxruntime":
            raise ImportError("libonnxruntime.so:\n no such file")
        return real(name, *rest)

    monkeypatch.setattr(importlib, "import_module", damaged)
    facts = doctor()
    assert facts["problems"] == ["onnxruntime cannot be used: libonnxruntime.so: no such file"]
    assert "--force-reinstall" in facts["advice"]["the runtime again"]


def test_an_old_runtime(pretend: Callable[..., None]) -> None:
    """It limits the versions of every target that it runs."""
    pretend({"onnxruntime": "1.21.1"})
    targets = doctor()["targets"]
    assert (targets["onnx"]["opset"], targets["onnx"]["ir_version"]) == ([10, 22], [4, 10])
    assert targets["ort-training"]["lacks"] == "onnxruntime-training"


@pytest.mark.full
def test_extras(pretend: Callable[..., None]) -> None:
    pretend(matplotlib=None, scikit_learn="0.1")
    facts = doctor()
    assert facts["extras"]["plot"] == {"installed": {}, "missing": ["matplotlib>=3.8"]}
    assert facts["extras"]["demo"]["missing"] == ["matplotlib>=3.8", "scikit-learn>=1.4"]
    assert facts["problems"] == []
    assert shlex.split(facts["advice"]["the extra plot"]) == [*PIP, "matplotlib>=3.8"]
    pretend(matplotlib="3.8", scikit_learn="1.4")
    facts = doctor()
    assert facts["extras"]["plot"] == {"installed": {"matplotlib": "3.8"}, "missing": []}
    assert not {"the extra plot", "the extra demo"} & {*facts["advice"]}
    assert not any("onnxruntime" in command for command in facts["advice"].values())


@pytest.mark.full
def test_requirements_of_graphscale(pretend: Callable[..., None]) -> None:
    pretend(onnx="1.0", safetensors=None)
    facts = doctor()
    assert facts["problems"] == ["graphscale needs onnx<2,>=1.18, safetensors>=0.4"]
    assert shlex.split(facts["advice"]["the requirements of graphscale"])[-2:] == ["onnx<2,>=1.18", "safetensors>=0.4"]
