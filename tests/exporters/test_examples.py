"""The examples of the quick starts: each exporter gives a step like the one that stands for it where the page runs."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import graphscale as gs
from tests.conftest import ROOT

pytestmark = pytest.mark.static

DOCS = ROOT / "docs"
# The calls that make an exporter give a whole step, and what of them the scripts of models/ and the examples share.
RECIPES = {
    "gradient_graph.py": ("models/ort/gradients.py", ("GradientGraphBuilder", "build", "load_from_string", "sorted")),
    "ort_artifacts.py": ("models/ort/artifacts.py", ("generate_artifacts", "load", "save")),
}


def calls(path: Path) -> dict[str, list[tuple[int, set[str | None]]]]:
    """The calls of a script by the function's name: how many arguments go by position, and which by name."""
    found: dict[str, list[tuple[int, set[str | None]]]] = {}
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
            name = node.func.id if isinstance(node.func, ast.Name) else node.func.attr
            found.setdefault(name, []).append((len(node.args), {keyword.arg for keyword in node.keywords}))
    return found


@pytest.mark.pytorch
@pytest.mark.parametrize("example", RECIPES)
def test_examples_call_the_exporters_as_the_scripts_of_models_do(example: str) -> None:
    script, names = RECIPES[example]
    ours, theirs = calls(DOCS / "examples" / example), calls(ROOT / script)
    for name in names:
        assert name in theirs, f"{script} does not call {name} any more"
        for count, keywords in ours[name]:
            fits = [their for their in theirs[name] if their[0] == count and keywords <= their[1]]
            assert fits, f"{example} calls {name} otherwise than {script}"


@pytest.mark.pytorch
@pytest.mark.tensorflow
@pytest.mark.jax
@pytest.mark.parametrize(
    ("example", "made", "like", "needs"),
    [
        ("pytorch_step.py", "step.onnx", "../tests/exporters/pytorch_step", ("torch", "onnxscript")),
        ("jax_step.py", "step.onnx", "../tests/exporters/jax_step", ("jax", "jax2onnx", "optax")),
        ("tensorflow_step.py", "step.onnx", "../tests/exporters/keras_step", ("tensorflow", "tf2onnx")),
        ("ort_artifacts.py", "artifacts/training_model.onnx", "ort/digits_mlp", ("torch", "onnxruntime.training")),
    ],
)
def test_examples_export(example: str, made: str, like: str, needs: tuple[str, ...], tmp_path: Path) -> None:
    """The result is a graph like that of models/ which stands for it where the page runs."""
    for package in needs:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs {package}")
    command, environment = [sys.executable, str(DOCS / "examples" / example)], {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        command,
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    report, other = gs.inspect(tmp_path / made), gs.inspect(ROOT / "models" / f"{like}.onnx")
    assert report.coverage == 1.0
    assert report.contractions >= 3
    assert len(report.places) == len(other.places) == 1
    assert {state.input for state in report.state} <= {state.input for state in other.state}
    assert bool(report.state) == bool(other.state)
    if example == "pytorch_step.py":
        with gs.Session(gs.scale(tmp_path / made)) as session:
            session.save_state(tmp_path / "state.safetensors")
        (tmp_path / made).unlink()
        page = (DOCS / "start" / "pytorch.md").read_text(encoding="utf-8")
        (text,) = re.findall(r"^<!-- not run: test_examples_export .+ -->\n```python\n(.+?)^```$", page, re.M | re.S)
        (tmp_path / "back.py").write_text(text)
        (tmp_path / "docs").symlink_to(DOCS)  # the page runs its blocks where the script is docs/examples/...
        subprocess.run([sys.executable, "back.py"], cwd=tmp_path, env=environment, timeout=300, check=True)
        assert not (tmp_path / made).exists(), "the import of the script exports nothing"
