"""The page of JAX: its script exports a step, and its last block loads the trained values back."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import graphscale as gs

for package in ("jax", "jax2onnx", "optax"):
    pytest.importorskip(package, reason=f"needs {package}")

pytestmark = [pytest.mark.jax]
ROOT = Path(__file__).parents[2]


def test_the_page_loads_the_weights_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs").symlink_to(ROOT / "docs")
    runpy.run_path("docs/examples/jax_step.py", run_name="__main__")
    with gs.Session(gs.scale("step.onnx")) as session:
        sample = np.load("step.npz")
        session.step({name: sample[name] for name in ("x", "labels")})
        session.save_state("trained.safetensors")
        trained = session.state_dict()
    Path("step.onnx").unlink()
    page = (ROOT / "docs" / "start" / "jax.md").read_text(encoding="utf-8")
    block = re.findall(r"^```python\n(.*?)^```$", page.partition("## Load it back")[2], re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(block[0], "jax.md", "exec"), names)
    for name, value in names["params"].items():
        np.testing.assert_array_equal(value, trained[name], err_msg=name)
    assert names["moments"][0].count == 1
    assert not Path("step.onnx").exists(), "the import of the script exports nothing"
