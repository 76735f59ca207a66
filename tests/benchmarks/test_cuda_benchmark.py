"""benchmarks/cuda_step.py: on a CPU with tiny models, on a GPU where there is one, and its parts one by one.

Without a GPU the graphs that it would run there are held against the facts of `tests.benchmarks.cuda_kernels`.
"""

from __future__ import annotations

import importlib
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import graphscale as gs
from graphscale.graph.builder import PASS_KEY
from graphscale.session.fence import add_fence
from tests.benchmarks.cuda_kernels import Release, misplaced
from tests.conftest import ROOT, assert_all_same_bits, has_cuda

pytestmark = pytest.mark.full

BENCHMARKS = ROOT / "benchmarks"
GRAPHS = ROOT / "tests" / "benchmarks" / "step_graphs"
NAMES = ("mlp-8-sgd", "transformer-4-adamw")
WAYS = ("plain", "session", "loop", "host", "float16", "float16-session", "float16-host")
RATIO = r"\d+\.\d{3} \(\d+\.\d{3} to \d+\.\d{3}\)"
ADDED = r"-?\d+\.\d % \(-?\d+\.\d to -?\d+\.\d\)"


@pytest.fixture
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Imports a module of benchmarks/, which imports what is beside it."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


def cuda_step(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARKS / "cuda_step.py"), "--threads", "1", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def quick(*arguments: str) -> subprocess.CompletedProcess[str]:
    return cuda_step("--quick", "--rounds", "2", *arguments)


def test_it_prints_ratios_and_facts_of_steps_that_do_the_same(tmp_path: Path) -> None:
    kept = tmp_path / "found.json"
    done = quick("--device", "cpu", "--graphs", str(GRAPHS), "--only", *NAMES, "--json", str(kept))
    assert done.returncode == 0, done.stderr
    assert "Without PyTorch: " in done.stdout
    found = json.loads(kept.read_text())
    for name in NAMES:
        assert re.search(rf"^\| {name} \| [\d.,]+ \|( {RATIO} \|){{6}}$", done.stdout, re.MULTILINE), done.stdout
        assert re.search(rf"^\| {name} \|( {ADDED} \|){{4}}$", done.stdout, re.MULTILINE), done.stdout
        for way in WAYS:
            row = rf"^\| {name}, ONNX Runtime, {way} \| 0 \| 0 \| \d+ \(.*\) \| \d+ \| — \| — \| — \| \d\.\de.\d\d \|$"
            assert re.search(row, done.stdout, re.MULTILINE), done.stdout
        seconds, checks = found["workloads"][name]["seconds"]["onnx"], found["workloads"][name]["checks"]["onnx"]
        assert list(seconds) == list(checks) == list(WAYS)
        assert all(len(rounds) == 2 and min(rounds) > 0 for rounds in seconds.values())
        assert all(len(check["losses"]) == 5 and check["skipped"] == 0 for check in checks.values())
        assert checks["session"]["distance"] == checks["loop"]["distance"] == checks["host"]["distance"] == 0
        assert 0 < checks["float16-session"]["distance"] < 0.1
        facts = found["workloads"][name]["facts"]["onnx"]
        assert facts["plain"]["inserted_on_host"] == 0 < facts["session"]["inserted_on_host"]
        assert facts["plain"]["host_nodes"]["Sub"] == facts["session"]["host_nodes"]["Sub"]


@pytest.mark.pytorch
def test_with_pytorch_which_exports_the_graphs(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="needs PyTorch")
    pytest.importorskip("onnxscript", reason="needs onnxscript, with which PyTorch exports")
    kept = tmp_path / "found.json"
    arguments = ["--torch", sys.executable, "--graphs", str(tmp_path / "graphs"), "--json", str(kept)]
    done = quick("--device", "cpu", "--only", "transformer-4-adamw", *arguments)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "graphs" / "transformer-4-adamw.step.onnx").exists()
    [found] = json.loads(kept.read_text())["workloads"].values()
    assert list(found["seconds"]["onnx"]) == list(WAYS)
    left_out = found["left_out"]["torch"]
    ways = [way for way in ("plain", "GradScaler", "float16", "float16-GradScaler") if way not in left_out]
    assert all("cannot run it on a CPU" in reason for reason in left_out.values())
    assert list(found["seconds"]["torch"]) == ways
    assert found["checks"]["torch"]["GradScaler"]["distance"] == 0
    columns = rf"[\d.,]+ \|( ({RATIO}|—) \|){{3}}"
    assert re.search(rf"^\| transformer-4-adamw \| {columns}$", done.stdout, re.MULTILINE), done.stdout


@pytest.mark.cuda
def test_on_a_gpu(tmp_path: Path) -> None:
    kept = tmp_path / "found.json"
    try:
        torch = importlib.import_module("torch")
    except ImportError:
        torch = None
    with_torch = ["--torch", sys.executable] if torch is not None and torch.cuda.is_available() else []
    done = quick("--graphs", str(GRAPHS), "--only", *NAMES, "--json", str(kept), *with_torch)
    assert done.returncode == 0, done.stderr
    for found in json.loads(kept.read_text())["workloads"].values():
        facts = found["facts"]["onnx"]
        assert list(facts) == list(WAYS)
        for plain, others in {"plain": ("session", "loop"), "float16": ("float16-session",)}.items():
            for way in others:
                assert facts[way]["memcpy_nodes"] <= facts[plain]["memcpy_nodes"]
                assert facts[way]["inserted_on_host"] == 0
                assert facts[way]["syncs"] <= facts[plain]["syncs"]
        assert facts["host"]["copies"] > facts["plain"]["copies"]
        assert all(each["memory"] > 0 for each in facts.values())
        for each in found["facts"].get("torch", {}).values():
            assert each["syncs"] >= 0 and each["memory"] > 0


# --- what it refuses --------------------------------------------------------------------------------------------------


@pytest.mark.skipif(has_cuda(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_in_a_line() -> None:
    done = quick("--graphs", str(GRAPHS), "--only", *NAMES)
    assert done.returncode == 2
    assert done.stdout == ""
    [line] = done.stderr.splitlines()
    reason = "CUDAExecutionProvider is not among|has no NVIDIA GPU with a driver|CUDAExecutionProvider does not start"
    assert re.match(rf"cuda_step\.py: cannot run with --device cuda: .*({reason})", line)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rounds", "1"], "--rounds: quartiles need 2"),
        (["--only", "mlp-9-sgd"], "--only: there is no mlp-9-sgd; there are mlp-8-sgd"),
        (["--only", "mlp-8-sgd"], "no graphs of mlp-8-sgd: --torch names an interpreter"),
        (["--torch", "nowhere/python"], "--torch names no interpreter"),
    ],
)
def test_it_says_what_is_missing(arguments: list[str], message: str) -> None:
    done = cuda_step("--device", "cpu", "--quick", *arguments)
    assert done.returncode == 2
    assert message in done.stderr


@pytest.fixture
def machine(benchmarks: Callable[[str], Any]) -> Any:
    return benchmarks("cuda_machine")


def test_an_interpreter_that_cannot_do_it(machine: Any, tmp_path: Path) -> None:
    for script, device, expected in (
        ("echo 2.13.0 False", "cuda", "PyTorch 2.13.0 of .* finds no CUDA"),
        ("echo No module named torch >&2; exit 1", "cpu", r"has no PyTorch \(No module named torch\)"),
        ("echo 2.13.0 False", "cpu", None),
        ("echo 2.13.0 True", "cuda", None),
    ):
        python = tmp_path / "python"
        python.write_text(f"#!/bin/sh\n{script}\n")
        python.chmod(0o755)
        found = machine._lacks_torch(python, device)
        assert found is None if expected is None else re.search(expected, found)


@pytest.mark.filterwarnings("ignore:Specified provider")
def test_a_provider_that_does_not_start(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver is not enough: libraries may be missing, and ONNX Runtime would go on with the CPU."""
    monkeypatch.setattr(machine, "Gpu", object)
    monkeypatch.setattr(machine.ort, "get_available_providers", lambda: ["CUDAExecutionProvider"])
    if not has_cuda():
        assert "CUDAExecutionProvider does not start (" in machine._lacks_cuda()
    monkeypatch.setattr(machine.ort, "get_available_providers", lambda: ["CPUExecutionProvider"])
    assert "CUDAExecutionProvider is not among the providers" in machine._lacks_cuda()


def test_it_refuses_graphs_of_another_size(tmp_path: Path) -> None:
    for path in GRAPHS.glob("mlp-8-sgd.*.onnx"):
        shutil.copy(path, tmp_path / path.name.replace("mlp-8-", "mlp-1024-"))
    done = cuda_step("--device", "cpu", "--graphs", str(tmp_path), "--only", "mlp-1024-sgd")
    assert done.returncode == 1
    assert "fc1.weight is (32, 16), the workload's (6880, 784); export the graphs again" in done.stderr


def test_no_time_counts_of_steps_that_differ(tmp_path: Path) -> None:
    for path in GRAPHS.glob("mlp-8-sgd.*.onnx"):
        model = onnx.load(path)
        if path.name == "mlp-8-sgd.update.onnx":
            rate = np.array(0.01, np.float32)
            [tensor] = [t for t in model.graph.initializer if onnx.numpy_helper.to_array(t) == rate]
            tensor.CopyFrom(onnx.numpy_helper.from_array(2 * rate, tensor.name))
        onnx.save(model, tmp_path / path.name)
    done = quick("--device", "cpu", "--graphs", str(tmp_path), "--only", "mlp-8-sgd", "--ways", "host")
    assert done.returncode == 1
    assert re.search(r"the weights of host are \d\.\de.\d\d of their way from the plain ones", done.stderr)
    assert "|" not in done.stdout


# --- the graphs -------------------------------------------------------------------------------------------------------


def test_the_models_have_100_million_weights(benchmarks: Callable[[str], Any]) -> None:
    made = benchmarks("training_steps.workloads").large_workloads(False)
    assert {name: made[name].size() for name in made} == {
        "transformer-8x512-sgd": 99_980_032,
        "mlp-1024-sgd": 100_152_170,
        "transformer-8x512-adamw": 99_980_032,
        "mlp-1024-adamw": 100_152_170,
    }


@pytest.fixture(params=NAMES)
def graphs(request: pytest.FixtureRequest, benchmarks: Callable[[str], Any]) -> Callable[[str], Any]:
    """The graphs of a workload for a device."""
    workload = benchmarks("training_steps.workloads").large_workloads(True)[request.param]
    machine = benchmarks("training_steps.device_onnx").Machine
    make = benchmarks("training_steps.device_graphs").Graphs
    return lambda device: make(GRAPHS, workload, machine(device, 1, False))


def inserted(model: ir.Model) -> set[str]:
    return {node.metadata_props[PASS_KEY] for node in model.graph if PASS_KEY in node.metadata_props}


def test_nothing_that_is_inserted_needs_a_copy_on_cuda(graphs: Callable[[str], Any]) -> None:
    """In the file, as the loop runs it, and with the fence that a gs.Session adds."""
    for low in (False, True):
        scaled = ir.from_proto(graphs("cuda").scaled(low=low).model)
        wanted = {"scale-loss", "unscale-gradients", "check-finite", "update-loss-scale", "guard-updates"}
        assert inserted(scaled) >= wanted | ({"autocast"} if low else set())
        for release in Release:
            assert misplaced(scaled, release) == []
        values = {value.name: value for node in scaled.graph for value in node.outputs}
        add_fence(scaled.graph, values["all_finite"], values["loss"])
        for release in Release:
            assert misplaced(scaled, release) == []


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("part", ["step", "gradients"])
def test_no_cast_needs_a_copy_on_cuda(name: str, part: str) -> None:
    cast = ir.from_proto(gs.autocast(onnx.load(GRAPHS / f"{name}.{part}.onnx"), "float16", target="ort-cuda").model)
    assert inserted(cast) == {"autocast"}
    for release in Release:
        assert misplaced(cast, release) == []


def test_a_check_that_a_release_has_no_kernel_for_is_found() -> None:
    """So that the two tests above can fail."""
    scaled = gs.scale(onnx.load(GRAPHS / "mlp-8-sgd.step.onnx"), target="ort-training-cuda").model
    assert any("no CUDA kernel for IsAllFinite" in line for line in misplaced(ir.from_proto(scaled), Release.GPU))


def test_all_ways_follow_the_rule(
    graphs: Callable[[str], Any], benchmarks: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Growth and a skipped step, in float32 and float16."""
    for module in ("device_bench", "device_graphs"):
        monkeypatch.setattr(benchmarks(f"training_steps.{module}"), "INCREMENT_PERIOD", 3)
    device = benchmarks("training_steps.device_onnx").Machine("cpu", 1, False)
    made = graphs("cpu")
    sides = {way: made.side(way, device.session_options) for way in WAYS}
    scaled = {way: side for way, side in sides.items() if side.loss_scale() is not None}
    assert list(scaled) == ["session", "loop", "host", "float16-session", "float16-host"]
    batches = [*made.batches(), *made.batches()]
    overflows = "x" in batches[0]  # tokens cannot be infinite
    if overflows:
        batches.insert(4, {**batches[0], "x": device.value(np.full((8, 16), np.inf, np.float32))})
    for number, batch in enumerate(batches):
        losses = {way: side.step(batch, fetch=number % 2 == 0) for way, side in scaled.items()}
        assert all((loss is None) == (number % 2 == 1) for loss in losses.values())
        assert len({side.loss_scale() for side in scaled.values()}) == 1
    assert scaled["loop"].loss_scale() == ((2.0**16, 1) if overflows else (2.0**17, 2))
    for batch in (*made.batches(), *made.batches()):
        sides["plain"].step(batch, fetch=False)
    plain = sides["plain"].weights()
    for way in ("session", "loop", "host"):
        state = sides[way].weights()
        assert_all_same_bits({key: state[key] for key in plain}, plain)
    for side in sides.values():
        side.close()
