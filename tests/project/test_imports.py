"""The modules that scaling one network imports: those of other options, runtimes and formulas are left out."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import MODELS

pytestmark = pytest.mark.static

# Upper bounds, to be lowered with the package.
MODULES, LINES = 90, 13_147

SCALE = """
import json, sys
import graphscale as gs
gs.scale(sys.argv[1])
names = (name for name in sys.modules if name.partition(".")[0] == "graphscale")
print(json.dumps({name: sys.modules[name].__file__ for name in names}))
"""


def test_scaling_a_network_imports_few_modules() -> None:
    run = [sys.executable, "-c", SCALE, str(MODELS / "pytorch" / "mlp_momentum.onnx")]
    files = json.loads(subprocess.run(run, check=True, capture_output=True, text=True).stdout)
    lines = {name: len(Path(file).read_text(encoding="utf-8").splitlines()) for name, file in files.items()}
    largest = sorted(lines, key=lambda name: -lines[name])[:20]
    assert len(lines) <= MODULES, sorted(lines)
    assert sum(lines.values()) <= LINES, largest
    unused = ("lowering", "session", "checks", "passes.casting", "passes.telemetry", "passes.lower_training_ops")
    unused += ("passes.lower_optimizers", "graph.diagnosis", "policy.presets", "analysis.own_scale")
    unused += ("analysis.roles.nearness", "flow.bodies")
    unused += ("entries", "graph.releases", "flow.resets", "files.stream_files", "files.contents", "graph.cones")
    unused += ("graph.note_check", "passes.nodes.finite_on_cuda", "analysis.roles.weak_evidence")
    unused += ("analysis.roles.roles_file", "analysis.roles.dependence", "analysis.named_values")
    assert [name for name in lines if name.startswith(tuple(f"graphscale.{each}" for each in unused))] == []
