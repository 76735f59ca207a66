"""benchmarks/pass_cost.py at a tiny size, the training steps that it generates, and what graphscale imports."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import graphscale as gs
from tests.build import EXACT
from tests.conftest import ROOT, assert_all_same_bits, run_once

pytestmark = pytest.mark.full

BENCHMARKS = ROOT / "benchmarks"


@pytest.fixture
def gpt_like(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The generator, which imports what is beside it."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("gpt_like")


def feeds_of(model: ir.Model) -> dict[str, np.ndarray]:
    """A batch, and the state with moments of zero: then the next first moment is a tenth of the clipped gradient."""
    random = np.random.default_rng(1)
    feeds = {
        value.name: np.zeros(value.shape.numpy(), np.float32) if ".moment" in value.name else value.const_value.numpy()
        for value in model.graph.initializers.values()
        if value.is_graph_input()
    }
    tokens, targets = random.integers(0, 32, (2, 16))
    return {
        **feeds,
        "tokens": tokens,
        "targets": targets,
        "learning_rate": np.asarray(0.01, np.float32),
        "step": np.asarray(0, np.float32),
    }


def test_the_gradients_are_those_of_the_loss(gpt_like: Any) -> None:
    """Along a random direction of each weight, the loss changes as the gradient says, up to the factor of clipping."""
    model = gpt_like.gpt_step(gpt_like.Size(blocks=1))
    proto, feeds, random = ir.to_proto(model), feeds_of(model), np.random.default_rng(2)
    onnx.checker.check_model(proto, full_check=True)
    step, _ = run_once(proto, feeds, EXACT)
    factors = []
    for name in gpt_like.Size(blocks=1).weights():
        gradient = step[f"{name}.moment1.next"].astype(np.float64) / 0.1
        direction = gradient / np.linalg.norm(gradient) + 0.1 * random.standard_normal(gradient.shape)
        expected = float((gradient * direction).sum())
        if expected < 1e-3:  # what is left of it in float32 is noise
            continue
        losses = []
        for sign in (1, -1):
            moved = (feeds[name] + sign * 1e-2 * direction).astype(np.float32)
            losses.append(float(run_once(proto, {**feeds, name: moved}, EXACT)[0]["loss"]))
        factors.append((losses[0] - losses[1]) / 2e-2 / expected)
    assert len(factors) > 10
    np.testing.assert_allclose(factors, np.median(factors), rtol=0.05)


def test_it_is_scaled_to_the_last_bit(gpt_like: Any, tmp_path: Path) -> None:
    """With the weights in the model, and in a file beside it, which is copied as it is."""
    path = tmp_path / "step.onnx"
    model = gpt_like.gpt_step(gpt_like.Size(blocks=2), path.with_suffix(".data"))
    ir.save(model, path)
    result = gs.scale(path)
    assert result.report.proved
    assert result.report.coverage == 1.0
    (tmp_path / "scaled").mkdir()
    output = tmp_path / "scaled" / "out.onnx"
    result.save(output)
    assert output.with_name("out.onnx.data").read_bytes() == path.with_suffix(".data").read_bytes()
    expected, _ = run_once(path, feeds_of(model), EXACT)
    actual, _ = run_once(output, feeds_of(model), EXACT)
    assert_all_same_bits(actual, expected)
    assert actual["all_finite"]


def test_the_benchmark(tmp_path: Path) -> None:
    numbers = tmp_path / "rounds.json"
    sizes = ["--nodes", "600", "--rounds", "2", "--large-rounds", "1", "--large-blocks", "1", "--large-width", "16"]
    command = [sys.executable, BENCHMARKS / "pass_cost.py", *sizes, "--json", numbers, "--folder", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    small, large = json.loads(numbers.read_text())["costs"]
    assert (small["graph"], large["graph"]) == ("gpt", "large gpt")
    assert large["megabytes"] > 9  # its embedding and its mask are of full size
    for cost, rounds in ((small, 2), (large, 1)):
        for job in ("bare", "graphscale"):
            assert {len(values) for values in cost["rounds"][job].values()} == {rounds}
            assert all(value > 0 for values in cost["rounds"][job].values() for value in values)
            wall, process = (cost["rounds"][job][measure] for measure in ("wall", "process"))
            assert all(job_alone < whole for job_alone, whole in zip(wall, process, strict=True))
    assert "| gpt | 553 |" in done.stdout
    assert "| large gpt, over bare |" in done.stdout
    mine, theirs = (min(large["rounds"][job]["wall"]) for job in ("graphscale", "bare"))
    assert f"| least over least | {mine / theirs:.2f} | 2 |" in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["rounds.json"]


def test_growth_is_that_of_each_round(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """What another round of the smaller graph has cost, when the machine was faster, is no part of it."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    pass_cost = importlib.import_module("pass_cost")
    costs = []
    for nodes, walls in ((9_881, [0.5, 1.0, 0.4]), (100_193, [5.0, 11.0, 4.0])):
        measures = {"wall": walls, "cpu": walls, "process": [wall + 1 for wall in walls]}
        subject = pass_cost.Subject("gpt", nodes, Path("step.onnx"), 3)
        costs.append(pass_cost.Cost(subject, dict.fromkeys(pass_cost.JOBS, measures)))
    assert costs[1].growth(costs[0], "graphscale", "wall") == (10.0, 10.0, 10.5)
    imports = {key: [1.0] for key in ("base", "graphscale", "scale", "bare peak", "graphscale peak")}
    pass_cost.print_limits(costs, imports)
    printed = capsys.readouterr().out
    assert "| 100,000 nodes over 10,000, the job by the clock | 10.00 | 12 | yes |" in printed
    assert "the job by the clock: graphscale 10.00 (10.00 to 10.50), bare 10.00 (10.00 to 10.50)." in printed


def test_help_starts_no_runtime() -> None:
    command = [sys.executable, "-X", "importtime", "-m", "graphscale", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    modules = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()}
    assert "Usage: graphscale" in done.stdout
    assert "graphscale" in modules
    assert not modules & {"onnxruntime", "torch", "matplotlib"}


def test_importing_graphscale_is_cheap() -> None:
    """Less than 0.4 of what it stands on, with all that scales; the best of three: other work disturbs it."""
    command = [sys.executable, BENCHMARKS / "pass_cost_job.py", "import", "graphscale"]
    ratios = []
    for _ in range(3):
        seconds = json.loads(subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout)
        ours = seconds["graphscale"] + seconds["graphscale.pipeline"]
        ratios.append(ours / (seconds["onnx"] + seconds["onnx_ir"]))
    assert min(ratios) < 0.4
