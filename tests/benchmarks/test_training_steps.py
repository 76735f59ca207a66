"""The benchmarks run: with tiny models, and where no other framework is installed.

`step_graphs` holds what PyTorch exports for that:

    python benchmarks/training_steps/export_graphs.py tests/benchmarks/step_graphs --quick mlp-8-sgd transformer-4-adamw
"""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest

from tests.conftest import ROOT, assert_all_same_bits

pytestmark = pytest.mark.full

GRAPHS = ROOT / "tests" / "benchmarks" / "step_graphs"
RATE = np.array(0.01, np.float32)  # of SGD in those graphs
RATIO = r"\d+\.\d{3} \(\d+\.\d{3} to \d+\.\d{3}\)"


def step_cost(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run benchmark 1 on one thread."""
    command = [sys.executable, str(ROOT / "benchmarks" / "step_cost.py"), "--threads", "1", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def quick(folder: Path, *names: str) -> subprocess.CompletedProcess[str]:
    return step_cost("--quick", "--rounds", "2", "--graphs", str(folder), "--only", *names)


def test_step_cost_prints_ratios_of_steps_that_do_the_same() -> None:
    done = quick(GRAPHS, "mlp-8-sgd", "transformer-4-adamw")
    assert done.returncode == 0, done.stderr
    for name in ("mlp-8-sgd", "transformer-4-adamw"):
        rows = re.findall(rf"^\| {name} \| [\d.,]+ \| {RATIO} \| {RATIO} \| {RATIO} \|$", done.stdout, re.MULTILINE)
        assert len(rows) == 2, done.stdout  # in wall time and in CPU time
        assert f"{name}: onnx: " in done.stderr
    for framework in ("PyTorch", "TensorFlow", "Keras"):
        assert f"Without {framework}: " in done.stdout


def test_step_cost_measures_in_new_processes() -> None:
    done = step_cost(
        "--quick",
        "--rounds",
        "2",
        "--graphs",
        str(GRAPHS),
        "--only",
        "mlp-8-sgd",
        "--sides",
        "onnx",
        "--processes",
        "3",
    )
    assert done.returncode == 0, done.stderr
    assert len(re.findall(rf"^\| mlp-8-sgd \| [\d.,]+ \| {RATIO} \| {RATIO} \| {RATIO} \|$", done.stdout, re.M)) == 2
    assert "medians of 3 processes" in done.stdout
    assert done.stderr.count("mlp-8-sgd: onnx: cpu:") == 3


def test_step_cost_counts_no_time_of_steps_that_differ(tmp_path: Path) -> None:
    for path in GRAPHS.glob("mlp-8-sgd.*.onnx"):
        model = onnx.load(path)
        if path.name == "mlp-8-sgd.update.onnx":
            [rate] = [tensor for tensor in model.graph.initializer if onnx.numpy_helper.to_array(tensor) == RATE]
            rate.CopyFrom(onnx.numpy_helper.from_array(2 * RATE, rate.name))
        onnx.save(model, tmp_path / path.name)
    done = quick(tmp_path, "mlp-8-sgd")
    assert done.returncode == 1
    assert re.search(r"mlp-8-sgd: weights of onnx host differ from the plain ones by \d", done.stderr)
    assert "|" not in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "mlp-8-sgd"], "no graphs of mlp-8-sgd: --torch names an interpreter"),
        (["--graphs", str(GRAPHS), "--only", "mlp-64-sgd"], "no graphs of mlp-64-sgd"),
        (["--rounds", "1"], "--rounds: quartiles need 2"),
    ],
)
def test_step_cost_says_what_is_missing(arguments: list[str], message: str) -> None:
    done = step_cost("--quick", *arguments)
    assert done.returncode == 2
    assert message in done.stderr


def test_step_cost_refuses_graphs_of_another_size() -> None:
    done = step_cost("--graphs", str(GRAPHS), "--only", "mlp-8-sgd")
    assert done.returncode == 1
    assert "fc1.weight is (32, 16), the workload's (2048, 784); export the graphs again" in done.stderr


@pytest.mark.parametrize(("seconds", "steps", "turns"), [(0.2, 2, 1), (0.03, 2, 5), (0.01, 5, 5), (1e-4, 20, 5)])
def test_turns_are_short_and_fill_a_round(
    seconds: float, steps: int, turns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    benchmark, sides = (importlib.import_module(name) for name in ("step_cost", "training_steps.sides"))

    class Clockwork:
        """The plain step takes so long, once it is warm."""

        def run(self, side: str, count: int) -> object:
            wall = 9.0 if count == 1 or side != sides.PLAIN else seconds
            return sides.Time(cpu=0.0, wall=wall)

    assert benchmark.calibrate(Clockwork(), [sides.PLAIN, "session"]) == (steps, turns)


def test_all_ways_follow_the_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """Growth and a skipped step, which the benchmark itself never meets."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    onnx_sides = importlib.import_module("training_steps.onnx_sides")
    workload = importlib.import_module("training_steps.workloads").workloads(True)["mlp-8-sgd"]
    monkeypatch.setattr(onnx_sides, "INCREMENT_PERIOD", 3)
    made = onnx_sides.maker(GRAPHS, 1, spinning=False)(workload)
    overflow = {**made.batches[0], "x": np.full_like(made.batches[0]["x"], np.inf)}
    scaled = {name: side for name, side in made.sides.items() if side.loss_scale() is not None}
    assert list(scaled) == ["session", "loop", "host"]
    for batch in (*made.batches, overflow, *made.batches):
        for side in scaled.values():
            side.step(batch)
        states = {side.loss_scale() for side in scaled.values()}
        assert len(states) == 1
    assert states == {(2.0**16, 1)}  # doubled, halved, doubled
    for batch in (*made.batches, *made.batches):
        made.sides["plain"].step(batch)
    for side in scaled.values():
        assert_all_same_bits(side.weights(), made.sides["plain"].weights())
