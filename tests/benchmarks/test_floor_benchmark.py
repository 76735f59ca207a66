"""benchmarks/floor.py with tiny models, and how it tells what graphscale inserted from what was there."""

from __future__ import annotations

import collections
import importlib
import json
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

import graphscale as gs
from graphscale.session.thresholds import Thresholds
from tests.conftest import ROOT

pytestmark = pytest.mark.full

BENCHMARKS = ROOT / "benchmarks"
GRAPHS = ROOT / "tests" / "benchmarks" / "step_graphs"
NUMBER = r"-?[\d,]+\.\d+%?"
SPREAD = rf"{NUMBER} \({NUMBER} to {NUMBER}\)"


@pytest.fixture
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports a module of benchmarks/, which imports what is beside it."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


def floor(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run benchmark 2 on one thread."""
    command = [sys.executable, str(BENCHMARKS / "floor.py"), "--quick", "--rounds", "2", "--threads", "1", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_it_prints_inserted_work_beside_the_floor() -> None:
    done = floor("--only", "16", "transformer-4-adamw", "--graphs", str(GRAPHS))
    assert done.returncode == 0, done.stderr
    numbers = rf"( {SPREAD} \|){{3}} (yes|no) \|( \d+\.\d\d \|)?( {SPREAD} \|){{3}}"
    sets = [
        f"16 MB, {kind}, multiplier {multiplier}"
        for kind in ("products", "sums", "masked", "fed masks", "ordered")
        for multiplier in (2, 3)
    ]
    for name in (*sets, "transformer-4-adamw"):
        assert re.search(rf"^\| {name} \| 1 \|{numbers}$", done.stdout, re.MULTILINE), done.stdout
        assert re.search(rf"^\| {name} \| 1 \| \S+ \S+ \d+%, ", done.stdout, re.MULTILINE), done.stdout


def test_it_times_other_ways() -> None:
    done = floor("--variants", "--only", "256")
    assert done.returncode == 0, done.stderr
    for name in ("MatMul(zeros, g), ReduceSum", "Div, in place"):
        assert re.search(rf"^\| {re.escape(name)} \| {SPREAD} \| \d+\.\d\d \|$", done.stdout, re.MULTILINE)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "transformer-4-sgd"], "no graphs of transformer-4-sgd: --torch names an interpreter"),
        (["--rounds", "1"], "--rounds: quartiles need 2"),
    ],
)
def test_it_says_what_is_missing(arguments: list[str], message: str) -> None:
    done = floor(*arguments)
    assert done.returncode == 2
    assert message in done.stderr


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
    assert {part.partition(" ")[0] for part in shares} >= {"session-bounds", "update-scale"}
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


@pytest.mark.parametrize("multiplier", [2.0, 3.0])
@pytest.mark.parametrize(
    ("kind", "source", "read"),
    [
        ("products", "MatMul", 4),  # two operands of each of two gradients
        ("sums", "Add", 8),
        ("masked", "Mul", 4),
        ("fed masks", "Mul", 0),  # both gradients themselves
        ("ordered", "Gather", 0),
    ],
)
def test_the_kinds_of_gradients(
    benchmarks: Any, tmp_path: Path, kind: str, source: str, read: int, multiplier: float
) -> None:
    """What gives a gradient, whether gs.Session divides it, and what it reads for its bound; weights move."""
    times = benchmarks("kernel_times")
    made = benchmarks("gradient_sets").GradientSet(2, 256, kind, constant_rate=False)
    model = ir.to_proto(made.model())
    onnx.checker.check_model(model, full_check=True)
    producer = {output: node for node in model.graph.node for output in node.output}
    step = producer[producer["weight0.next"].input[1]]
    assert producer[step.input[0]].op_type == source
    result = gs.scale(model, gs.DynamicLossScale(1024.0, multiplier=multiplier))
    assert result.report.proved
    assert result.report.coverage == 1.0
    options = times.profiled(benchmarks("loops").options(), tmp_path, "session")
    by_rows = Thresholds(row_sum_elements=0)  # as if these weights were large
    session = gs.Session(result, state=made.weights(), session_options=options, lowering=by_rows)
    session.step(made.batches(1)[0])
    assert np.abs(session.state_dict()["weight0"] - made.weights()["weight0"]).max() > 1e-6
    session.close()
    [kernels] = times.inserted_kernels(times.runs_of(times.profile_in(tmp_path, "session")))
    found = collections.Counter((times._pass_of(kernel.name), kernel.op_type) for kernel in kernels)
    assert found["unscale-gradients", "Div"] == (0 if multiplier == 2 else 2)
    assert found["session-bounds", "ReduceL1"] == read + (multiplier == 2)  # once of the rate
    assert found["session-bounds", "ReduceSum"] == (0 if read else 4)  # of each gradient by rows, and of these
    assert ("session-probes", "MatMul") not in found
