"""The measures of the benchmark programs: graphs, ways to run a step, readings of profiles."""

from __future__ import annotations

import collections
import importlib
import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

import graphscale as gs
from tests.benchmarks.test_programs import GRAPHS, WAYS
from tests.build import EXACT
from tests.conftest import HAS_TRAINING, NEEDS_TRAINING, ROOT, assert_all_same_bits, run_once

pytestmark = pytest.mark.full

BENCHMARKS = ROOT / "benchmarks"


@pytest.fixture
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Imports a module of benchmarks/, which imports what is beside it."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


def feeds_of(model: ir.Model) -> dict[str, np.ndarray]:
    """A batch, and the state with moments of zero: then the next first moment is a tenth of the clipped gradient."""
    random = np.random.default_rng(1)
    feeds = {
        value.name: np.zeros(value.shape.numpy(), np.float32) if ".moment" in value.name else value.const_value.numpy()
        for value in model.graph.initializers.values()
        if value.is_graph_input()
    }
    tokens, targets = random.integers(0, 32, (2, 16))
    return {**feeds, "tokens": tokens, "targets": targets, "learning_rate": np.float32(0.01), "step": np.float32(0)}


def test_a_model_like_gpt_is_scaled_to_the_last_bit(benchmarks: Callable[[str], Any], tmp_path: Path) -> None:
    """With the weights in the model, and in a file beside it, which is copied."""
    path = tmp_path / "step.onnx"
    gpt_like = benchmarks("gpt_like")
    ir.save(gpt_like.gpt_step(gpt_like.Size(blocks=2), path.with_suffix(".data")), path)
    result = gs.scale(path)
    assert result.report.proved and result.report.coverage == 1.0
    (tmp_path / "scaled").mkdir()
    output = tmp_path / "scaled" / "out.onnx"
    result.save(output)
    assert output.with_name("out.onnx.data").read_bytes() == path.with_suffix(".data").read_bytes()
    feeds = feeds_of(ir.load(path))
    expected, _ = run_once(path, feeds, EXACT)
    actual, _ = run_once(output, feeds, EXACT)
    assert_all_same_bits(actual, expected)
    assert actual["all_finite"]


def test_help_starts_no_runtime() -> None:
    command = [sys.executable, "-X", "importtime", "-m", "graphscale", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    modules = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()}
    assert "Usage: graphscale" in done.stdout and "graphscale" in modules
    assert not modules & {"onnxruntime", "torch", "matplotlib"}


def test_importing_graphscale_is_cheap() -> None:
    """No library but those that it stands on is loaded, with all that scales: the rest of the cost is its own code."""
    libraries = "import sys, onnx, onnx_ir; before = {*sys.modules}; "
    code = f"{libraries}import graphscale, graphscale.pipeline; print(*{{*sys.modules}} - before)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    packages = {name.partition(".")[0] for name in done.stdout.split()}
    assert "graphscale" in packages
    assert packages - sys.stdlib_module_names <= {"graphscale", "onnx", "onnx_ir", "numpy", "ml_dtypes"}


@pytest.mark.parametrize(("optimized", "unfused"), [(False, 0), (True, 1)])
def test_what_was_inserted_is_all_that_a_session_runs_besides(
    benchmarks: Any, tmp_path: Path, optimized: bool, unfused: int
) -> None:
    """Without it, the kernels of a step in gs.Session are those of the plain step, the optimizer in its branch too.

    ONNX Runtime makes a constant factor of the plain step part of a MatMul, which it cannot once the scale is between.
    """
    times, loops = benchmarks("kernel_times"), benchmarks("loops")
    made = benchmarks("gradient_sets").GradientSet(2, 256, "products", constant_rate=False)
    model, weights = ir.to_proto(made.model()), made.weights()
    result = gs.scale(model)

    def options(name: str) -> ort.SessionOptions:
        plain = loops.options()
        if not optimized:
            plain.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        return times.profiled(plain, tmp_path, name)

    session = gs.Session(result, state=weights, session_options=options("session"))
    plain = loops.ByBinding(model, {name: f"{name}.next" for name in weights}, weights, options("plain"))
    for batch in made.batches(3):
        session.step(batch)
        plain.step(batch)
    session.close()
    del plain
    ours, theirs = (times.runs_of(times.profile_in(tmp_path, name)) for name in ("session", "plain"))
    assert len(ours) == len(theirs) == 3
    for one, other in zip(ours, theirs, strict=True):
        rest = collections.Counter(kernel.op_type for kernel in one if not times.inserted(kernel.name))
        rest.subtract(kernel.op_type for kernel in other)
        assert {op_type: count for op_type, count in rest.items() if count} == ({"Mul": unfused} if unfused else {})
        assert not any(times.inserted(kernel.name) for kernel in other)
        assert any(kernel.op_type == "If" and times.inserted(kernel.name) for kernel in one)
    found = times.inserted_kernels(ours)
    shares = times.parts(found)
    assert {part.partition(" ")[0] for part in shares} >= {"bound-gradients", "update-scale"}
    assert sum(shares.values()) == pytest.approx(1)
    assert 0 < times.least(found) <= min(sum(kernel.seconds for kernel in run) for run in found)


def test_the_time_of_an_if_is_without_its_branches(benchmarks: Any, tmp_path: Path) -> None:
    def event(name: str, begin: int, length: int, op_type: str | None = None) -> Mapping[str, Any]:
        return {"name": name, "ts": begin, "dur": length, "args": {"op_name": op_type} if op_type else {}}

    executor = "SequentialExecutor::Execute"
    events = [
        event("session_initialization", 0, 5),
        event("early_kernel_time", 2, 1, "Add"),  # constant folding, in no run
        event("outer_kernel_time", 12, 80, "If"),
        event(executor, 15, 70),
        event("inner_kernel_time", 20, 40, "If"),
        event(executor, 25, 30),
        event("work_kernel_time", 30, 20, "Sub"),
        event(executor, 11, 88),
        event("model_run", 10, 90),
    ]
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(events))
    [run] = benchmarks("kernel_times").runs_of(path)
    found = {kernel.name: round(1e6 * kernel.seconds) for kernel in run}
    assert found == {"outer": 10, "inner": 10, "work": 20}


# --- the ways to run a step -------------------------------------------------------------------------------------------


def test_all_ways_on_a_cpu_follow_the_rule(benchmarks: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Growth and a skipped step, which the benchmark itself never meets."""
    onnx_sides = benchmarks("training_steps.onnx_sides")
    monkeypatch.setattr(onnx_sides, "INCREMENT_PERIOD", 3)
    made = onnx_sides.maker(GRAPHS, 1, spinning=False)(
        benchmarks("training_steps.workloads").workloads(True)["mlp-8-sgd"]
    )
    overflow = {**made.batches[0], "x": np.full_like(made.batches[0]["x"], np.inf)}
    scaled = {name: side for name, side in made.sides.items() if side.loss_scale() is not None}
    assert list(scaled) == ["file", "one buffer", "session", "loop", "host"]
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


@pytest.mark.skipif(not HAS_TRAINING, reason=NEEDS_TRAINING)
def test_a_folder_follows_the_rule(benchmarks: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Growth and a skipped step."""
    for module in ("folder_sides", "device_bench"):
        monkeypatch.setattr(benchmarks(f"training_steps.{module}"), "INCREMENT_PERIOD", 3)
    workload = benchmarks("training_steps.workloads").workloads(True)["mlp-8-sgd"]
    made = benchmarks("training_steps.folder_sides").maker(GRAPHS, 1, spinning=False)(workload)
    plain, scaled = made.sides.values()
    assert plain.loss_scale() is None
    overflow = {**made.batches[0], "x": np.full_like(made.batches[0]["x"], np.inf)}
    states = []
    for batch in (*made.batches, overflow, *made.batches):
        scaled.step(batch)
        states.append(scaled.loss_scale())
    counts = [(2.0**15, 1), (2.0**15, 2), (2.0**16, 0), (2.0**16, 1), (2.0**15, 0)]
    assert states == [*counts, (2.0**15, 1), (2.0**15, 2), (2.0**16, 0), (2.0**16, 1)]
    for batch in (*made.batches, *made.batches):
        plain.step(batch)
    names = workload.weights()
    ours, theirs = ({name: side.weights()[name] for name in names} for side in (scaled, plain))
    assert_all_same_bits(ours, theirs)


def test_what_loss_scaling_costs(benchmarks: Callable[[str], Any]) -> None:
    """The tables of step_cost.py, of times that are known."""
    report, time = benchmarks("step_report"), benchmarks("training_steps.sides").Time

    def times(**ratios: list[float]) -> dict[str, list[Any]]:
        plain = [time(1e-3, 2e-3)] * 3
        return {"plain": plain} | {
            side: [time(1e-3, 2e-3 * value) for value in found] for side, found in ratios.items()
        }

    onnx_times = times(file=[1.02, 1.04, 1.03], session=[1.0] * 3, host=[1.5] * 3)
    onnx_times["one buffer"] = onnx_times["session"]
    found = {
        "onnx": onnx_times,
        "folder": times(scaled=[1.07] * 3),
        "torch": times(GradScaler=[1.10, 1.11, 1.12]),
        "tensorflow": times(MixedPrecisionLossScaleOptimizer=[1.02, 1.00, 1.05]),
    }
    assert report.costs(found, "wall") == [
        "+3.0 % (+2.0 to +4.0)",
        "+0.0 % (+0.0 to +0.0)",
        "+7.0 % (+7.0 to +7.0)",
        "+0.0 % (+0.0 to +0.0)",
        "+11.0 % (+10.0 to +12.0)",
        "+2.0 % (+0.0 to +5.0)",
        "+50.0 % (+50.0 to +50.0)",
    ]
    assert report.costs(found, "cpu") == ["+0.0 % (+0.0 to +0.0)"] * 7
    expected = ["yes", "yes", "no, within the noise", "yes", "no"]
    assert report.verdict("mlp-8-sgd", found, "wall") == expected
    slow = {**found, "onnx": {**onnx_times, "file": times(file=[1.04] * 3)["file"]}}
    assert report.verdict("mlp-8-sgd", slow, "wall")[0] == "yes"
    assert report.verdict("transformer-4-sgd", slow, "wall")[0] == "no"


def test_all_ways_on_a_device_follow_the_rule(
    benchmarks: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32 and float16."""
    for module in ("device_bench", "device_graphs"):
        monkeypatch.setattr(benchmarks(f"training_steps.{module}"), "INCREMENT_PERIOD", 3)
    device = benchmarks("training_steps.device_onnx").Machine("cpu", 1, False)
    workload = benchmarks("training_steps.workloads").large_workloads(True)["mlp-8-sgd"]
    made = benchmarks("training_steps.device_graphs").Graphs(GRAPHS, workload, device)
    sides = {way: made.side(way, device.session_options) for way in WAYS}
    scaled = {way: side for way, side in sides.items() if side.loss_scale() is not None}
    assert list(scaled) == ["session", "loop", "loop-onnx", "host", "float16-session", "float16-host"]
    batches = [*made.batches(), *made.batches()]
    batches.insert(4, {**batches[0], "x": device.value(np.full((8, 16), np.inf, np.float32))})
    for batch in batches:
        for side in scaled.values():
            side.step(batch, fetch=False)
        assert len({side.loss_scale() for side in scaled.values()}) == 1
    assert scaled["loop"].loss_scale() == (2.0**16, 1)
    for batch in (*made.batches(), *made.batches()):
        sides["plain"].step(batch, fetch=False)
    plain = sides["plain"].weights()
    for way in ("session", "loop", "loop-onnx", "host"):
        assert_all_same_bits(sides[way].weights(), plain)
    for side in sides.values():
        side.close()
