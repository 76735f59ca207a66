"""The programs of benchmarks/ run on tiny models, name missing files, and do not time different steps.

`step_graphs` holds PyTorch's exports for them:

    NAMES="mlp-8-sgd transformer-4-adamw convnet-32-sgd lstm-16-adamw"
    python benchmarks/training_steps/export_graphs.py tests/benchmarks/step_graphs --quick $NAMES
    python benchmarks/training_steps/make_artifacts.py tests/benchmarks/step_graphs --quick $NAMES
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest

from tests.conftest import HAS_TRAINING, NEEDS_TRAINING, ROOT, has_cuda

pytestmark = pytest.mark.full

GRAPHS = Path(__file__).with_name("step_graphs")
MODELS = ("mlp-8-sgd", "transformer-4-adamw", "convnet-32-sgd", "lstm-16-adamw")
FOLDER = "| file, one buffer | folder | `gs.Session` |" if HAS_TRAINING else "Without artifact folders: "
STEPS = ("--graphs", str(GRAPHS), "--only", "mlp-8-sgd", "transformer-4-adamw")
WAYS = ("plain", "session", "loop", "loop-onnx", "host", "float16", "float16-session", "float16-host")


def run(program: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, ROOT / "benchmarks" / program, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def quick(program: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return run(program, "--quick", "--rounds", "2", "--threads", "1", *arguments)


@pytest.mark.parametrize(
    ("program", "arguments", "texts"),
    [
        (
            "step_cost.py",
            (*STEPS[:3], *MODELS),
            ["Without PyTorch: ", "Without Keras: ", FOLDER, "| file | one buffer |"]
            + [f"| {name} | " for name in MODELS],
        ),
        ("step_cost.py", (*STEPS[:4], "--sides", "onnx", "--processes", "3"), ["medians of 3 processes"]),
        (
            "floor.py",
            ("--only", "16", STEPS[4], *STEPS[:2]),
            ["| 16 MB, fed masks, multiplier 3 | 1 |", f"| {STEPS[4]} |"],
        ),
        ("floor.py", ("--variants", "--only", "256"), ["| Div, in place | ", "| MatMul(zeros, g), ReduceSum | "]),
    ],
    ids=["step_cost", "step_cost in new processes", "floor", "other ways of floor"],
)
def test_it_runs(program: str, arguments: tuple[str, ...], texts: list[str]) -> None:
    done = quick(program, *arguments)
    assert done.returncode == 0, done.stderr
    assert [text for text in texts if text not in done.stdout] == []


@pytest.mark.static
def test_the_first_table_has_a_cost_of_every_model() -> None:
    done = quick("step_cost.py", *STEPS[:3], *MODELS)
    head, *rows = [line for line in done.stdout.splitlines() if line.startswith("|")][: 2 + len(MODELS)]
    ways = ["file", "file, one buffer", *(["folder"] if HAS_TRAINING else []), "`gs.Session`", "a rule on the host"]
    assert head == f"| workload | {' | '.join(ways)} |"
    assert [row.split(" | ")[0] for row in rows[1:]] == [f"| {name}" for name in MODELS]
    assert all(row.count(" % (") == len(ways) for row in rows[1:])


@pytest.mark.skipif(not HAS_TRAINING, reason=NEEDS_TRAINING)
def test_a_folder_that_trains_another_model_is_told(tmp_path: Path) -> None:
    graphs = shutil.copytree(GRAPHS, tmp_path / "graphs")
    path = graphs / "mlp-8-sgd.artifacts" / "training_model.onnx"
    model = onnx.load(path)
    [node] = [node for node in model.graph.node if node.op_type == "SoftmaxCrossEntropyLoss"]
    [reduction] = [attribute for attribute in node.attribute if attribute.name == "reduction"]
    reduction.s = b"sum"
    onnx.save(model, path)
    done = quick("step_cost.py", "--graphs", graphs, "--only", "mlp-8-sgd")
    assert done.returncode == 1
    assert "mlp-8-sgd: losses of onnx and folder differ: " in done.stderr
    assert "|" not in done.stdout


@pytest.mark.static
def test_pass_cost(tmp_path: Path) -> None:
    sizes = ["--nodes", "600", "--rounds", "2", "--large-rounds", "1", "--large-blocks", "1", "--large-width", "16"]
    done = run("pass_cost.py", *sizes, "--json", tmp_path / "rounds.json", "--folder", tmp_path)
    assert done.returncode == 0, done.stderr
    for cost in json.loads((tmp_path / "rounds.json").read_text())["costs"]:
        for measures in cost["rounds"].values():
            assert all(job < whole for job, whole in zip(measures["wall"], measures["process"], strict=True))
    assert "| gpt | 553 |" in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["rounds.json"]


@pytest.mark.static
def test_cuda_step_on_a_cpu(tmp_path: Path) -> None:
    done = quick("cuda_step.py", "--device", "cpu", *STEPS, "--json", tmp_path / "found.json")
    assert done.returncode == 0, done.stderr
    for found in json.loads((tmp_path / "found.json").read_text())["workloads"].values():
        checks, facts = found["checks"]["onnx"], found["facts"]["onnx"]
        assert list(found["seconds"]["onnx"]) == list(checks) == list(WAYS)
        assert all(len(check["losses"]) == 5 and check["skipped"] == 0 for check in checks.values())
        assert [checks[way]["distance"] for way in WAYS[:5]] == [0] * 5
        assert 0 < checks["float16-session"]["distance"] < 0.1
        assert facts["plain"]["inserted_on_host"] == 0 < facts["session"]["inserted_on_host"]
        assert facts["plain"]["host_nodes"]["Sub"] == facts["session"]["host_nodes"]["Sub"]
        assert facts["plain"]["launches"] is facts["host"]["launches"] is facts["session"]["launches"] is None
        assert facts["loop"]["launches"] < facts["loop-onnx"]["launches"]


@pytest.mark.pytorch
def test_cuda_step_with_pytorch_which_exports_the_graphs(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="needs PyTorch")
    pytest.importorskip("onnxscript", reason="needs onnxscript, with which PyTorch exports")
    arguments = ["--torch", sys.executable, "--graphs", tmp_path / "graphs", "--json", tmp_path / "found.json"]
    done = quick("cuda_step.py", "--device", "cpu", "--only", "transformer-4-adamw", *arguments)
    assert done.returncode == 0, done.stderr
    [found] = json.loads((tmp_path / "found.json").read_text())["workloads"].values()
    left_out = found["left_out"]["torch"]
    assert all("cannot run it on a CPU" in reason for reason in left_out.values())
    ways = [way for way in ("plain", "GradScaler", "float16", "float16-GradScaler") if way not in left_out]
    assert list(found["seconds"]["torch"]) == ways
    assert found["checks"]["torch"]["GradScaler"]["distance"] == 0


@pytest.mark.cuda
def test_cuda_step_on_a_gpu(tmp_path: Path) -> None:
    done = quick("cuda_step.py", *STEPS, "--json", tmp_path / "found.json")
    assert done.returncode == 0, done.stderr
    for found in json.loads((tmp_path / "found.json").read_text())["workloads"].values():
        facts = found["facts"]["onnx"]
        assert list(facts) == list(WAYS)
        for plain, way in (("plain", "session"), ("plain", "loop"), ("float16", "float16-session")):
            assert facts[way]["memcpy_nodes"] <= facts[plain]["memcpy_nodes"]
            assert facts[way]["inserted_on_host"] == 0
            assert facts[way]["syncs"] <= facts[plain]["syncs"]
        assert facts["host"]["copies"] > facts["plain"]["copies"]
        assert facts["loop"]["launches"] == facts["session"]["launches"] < facts["loop-onnx"]["launches"]


@pytest.mark.parametrize(
    ("program", "arguments", "message"),
    [
        ("step_cost.py", ["--only", "mlp-8-sgd"], "no graphs of mlp-8-sgd: --torch names an interpreter"),
        ("step_cost.py", ["--rounds", "1"], "--rounds: quartiles need 2"),
        ("floor.py", ["--only", "transformer-4-sgd"], "no graphs of transformer-4-sgd: --torch names an interpreter"),
        ("floor.py", ["--rounds", "1"], "--rounds: quartiles need 2"),
        ("cuda_step.py", ["--device", "cpu", "--only", "mlp-9-sgd"], "--only: there is no mlp-9-sgd; there are mlp-8"),
        ("cuda_step.py", ["--device", "cpu", "--torch", "nowhere/python"], "--torch names no interpreter"),
        pytest.param(
            "cuda_step.py",
            STEPS,
            "cuda_step.py: cannot run with --device cuda: ",
            marks=pytest.mark.skipif(has_cuda(), reason="there is a GPU"),
        ),
    ],
)
def test_it_says_what_is_missing(program: str, arguments: list[str], message: str) -> None:
    done = quick(program, *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr


def test_graphs_of_another_size_are_refused(tmp_path: Path) -> None:
    for path in GRAPHS.glob("mlp-8-sgd.*.onnx"):
        shutil.copy(path, tmp_path / path.name.replace("mlp-8-", "mlp-1024-"))
    for program, arguments, size in (
        ("step_cost.py", ["--graphs", GRAPHS, "--only", "mlp-8-sgd"], "(2048, 784)"),
        ("cuda_step.py", ["--device", "cpu", "--graphs", tmp_path, "--only", "mlp-1024-sgd"], "(6880, 784)"),
    ):
        done = run(program, "--threads", "1", *arguments)
        assert done.returncode == 1
        assert f"fc1.weight is (32, 16), the workload's {size}; export the graphs again" in done.stderr


@pytest.mark.parametrize(
    ("program", "arguments", "message"),
    [
        ("step_cost.py", [], "mlp-8-sgd: weights of onnx host differ from the plain ones by "),
        ("cuda_step.py", ["--device", "cpu", "--ways", "host"], "of their way from the plain ones"),
    ],
)
def test_no_time_counts_of_steps_that_differ(program: str, arguments: list[str], message: str, tmp_path: Path) -> None:
    rate = np.array(0.01, np.float32)
    for path in GRAPHS.glob("mlp-8-sgd.*.onnx"):
        model = onnx.load(path)
        if path.name == "mlp-8-sgd.update.onnx":
            [tensor] = [t for t in model.graph.initializer if onnx.numpy_helper.to_array(t) == rate]
            tensor.CopyFrom(onnx.numpy_helper.from_array(2 * rate, tensor.name))
        onnx.save(model, tmp_path / path.name)
    done = quick(program, *arguments, "--graphs", tmp_path, "--only", "mlp-8-sgd")
    assert done.returncode == 1
    assert message in done.stderr
    assert "|" not in done.stdout


@pytest.mark.skipif(not HAS_TRAINING, reason=NEEDS_TRAINING)
def test_lowered_steps_go_the_way_of_the_kernels() -> None:
    runtimes = ("--training", sys.executable, "--stock", sys.executable)
    done = quick("lowered_training.py", *runtimes, "--processes", "1", "--only", "mlp-8-sgd", "lstm-16-adamw")
    assert done.returncode == 0, done.stderr
    heads = [line.split(" | ")[0] for line in done.stdout.splitlines() if line.startswith("|")]
    rows = ["| step", "| ---", "| mlp-8-sgd", "| lstm-16-adamw", "| geometric mean", "| that without LSTMs"]
    assert [head for head in heads if not head.startswith("| ---")] == [row for row in rows if row != "| ---"] * 2
