"""What benchmarks/cuda_step.py runs in which order, what it refuses, and what it counts.

What only a GPU can give is pretended here: its driver, its provider and its memory.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from tests.conftest import ROOT

pytestmark = pytest.mark.full


@pytest.fixture
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Imports a module of benchmarks/, which imports what is beside it."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module


class Fake:
    """A side whose steps overflow when they are told to; its only weight goes as far in each that is applied."""

    def __init__(self, overflows: Iterator[bool], scaled: bool = True, loss: float = 1.0, pace: float = 1.0) -> None:
        self.overflows, self.loss, self.pace = overflows, loss, pace
        self.state: tuple[float, int] | None = (2.0**15, 0) if scaled else None
        self.seen: list[tuple[Any, bool]] = []
        self.applied = 0

    def step(self, batch: Any, *, fetch: bool) -> float | None:
        self.seen.append((batch, fetch))
        overflow = next(self.overflows, False)
        self.applied += not overflow
        if self.state is not None:
            scale, good = self.state
            self.state = (scale / 2, 0) if overflow else (scale, good + 1)
        return self.loss if fetch else None

    def weights(self) -> dict[str, np.ndarray]:
        return {"w": np.array([self.pace * self.applied])}

    def loss_scale(self) -> tuple[float, int] | None:
        return self.state

    def close(self) -> None:
        self.seen.clear()


class FakeWorkload:
    def weights(self) -> dict[str, np.ndarray]:
        return {"w": np.zeros(1)}


def bench_of(module: Any, sides: Mapping[str, Fake], **more: Any) -> Any:
    makers = {name: (lambda side=side: side) for name, side in sides.items()}
    ways = module.Ways(
        makers, ["a", "b", "c"], lambda names: dict.fromkeys(names, module.Facts()), lambda: None, **more
    )
    bench = module.DeviceBench(lambda workload: ways, {"fake": FakeWorkload()}, tuple(sides))
    bench.prepare("fake")
    return bench


@pytest.fixture
def device_bench(benchmarks: Callable[[str], Any]) -> Any:
    return benchmarks("training_steps.device_bench")


def test_a_step_that_was_skipped_is_run_again(device_bench: Any) -> None:
    low = Fake(iter([True, True, False, True]))
    bench = bench_of(device_bench, {"plain": Fake(iter([]), scaled=False), "float16-session": low})
    found = bench.check()["float16-session"]
    assert (found["skipped"], found["losses"], found["distance"]) == (3, [1.0] * 5, 0)
    assert [batch for batch, _ in low.seen] == ["a", "a", "a", "b", "b", "c", "a", "b"]
    assert low.state == (2.0**12, 4)
    turn = bench.run("float16-session", 4)
    assert [batch for batch, _ in low.seen[8:]] == ["c", "a", "b", "c"]
    assert [fetch for _, fetch in low.seen[8:]] == [False, False, False, True]
    assert (turn["skipped"], turn["loss"]) == (False, 1.0)
    assert turn["seconds"] > 0
    low.overflows = iter([False, True])
    assert bench.run("float16-session", 3)["skipped"]


@pytest.mark.parametrize(
    ("name", "side", "message"),
    [
        ("session", Fake(iter([True])), r"session: after a step the loss scale and count \(32768.0, 0\) became"),
        ("float16-session", Fake(iter([True] * 21)), "float16-session: after a step"),
        ("session", Fake(iter([]), loss=1.01), "the losses of session are"),
        ("float16", Fake(iter([]), scaled=False, loss=float("nan")), "the losses of float16 are"),
        ("session", Fake(iter([]), pace=1.03), "the weights of session are 3.0e-02 of their way"),
        ("float16-session", Fake(iter([]), pace=1.3), "the weights of float16-session are 3.0e-01 of their way"),
    ],
)
def test_ways_that_differ_are_refused(device_bench: Any, name: str, side: Fake, message: str) -> None:
    bench = bench_of(device_bench, {"plain": Fake(iter([]), scaled=False), name: side})
    with pytest.raises(ValueError, match=message):
        bench.check()


def test_float16_without_a_loss_scale_may_go_astray(device_bench: Any) -> None:
    low = {"float16": Fake(iter([]), scaled=False, pace=0.7), "float16-session": Fake(iter([]), pace=0.9)}
    found = bench_of(device_bench, {"plain": Fake(iter([]), scaled=False)} | low).check()
    assert {side: round(each["distance"], 3) for side, each in found.items()} == {
        "plain": 0,
        "float16": 0.3,
        "float16-session": 0.1,
    }


def test_what_a_framework_cannot_run_is_left_out(device_bench: Any) -> None:
    sides = {"plain": Fake(iter([]), scaled=False), "float16": Fake(iter([]), scaled=False)}
    reasons = {"float16": "no kernel"}
    bench = bench_of(device_bench, sides, unsupported=reasons.get)
    assert bench.prepare("fake") == {"facts": {"plain": vars(device_bench.Facts())}, "left_out": reasons}
    assert list(bench.check()) == ["plain"]


def test_rounds_with_a_skipped_step_do_not_count(benchmarks: Callable[[str], Any]) -> None:
    script = benchmarks("cuda_step")

    class Scripted:
        turns, bad = 0, {5}  # the first round comes after two turns of calibration each, and takes four turns

        def prepare(self, name: str) -> dict[str, Any]:
            return {"facts": {}, "left_out": {}}

        def check(self) -> dict[str, Any]:
            return {side: {"losses": [1.0], "skipped": 0, "distance": 0.0} for side in ("plain", "session")}

        def run(self, side: str, steps: int) -> dict[str, Any]:
            Scripted.turns += 1
            skipped = side == "session" and Scripted.turns in self.bad
            return {"seconds": float(Scripted.turns), "skipped": skipped, "loss": 1.0}

        def close(self) -> None:
            pass

    bench = Scripted()
    found = script.measure({"onnx": bench}, "fake", 2, 1.0)
    assert found["dropped"] == 1
    assert found["seconds"]["onnx"] == {"plain": [10.5, 14.5], "session": [10.5, 14.5]}
    Scripted.turns, Scripted.bad = 0, set(range(1000))
    with pytest.raises(ValueError, match="in 3 rounds steps were skipped"):
        script.measure({"onnx": bench}, "fake", 2, 1.0)
    other = Scripted()
    other.check = lambda: {"plain": {"losses": [1.1], "skipped": 0, "distance": 0.0}}
    with pytest.raises(ValueError, match="the losses of torch and onnx differ"):
        script.measure({"onnx": bench, "torch": other}, "fake", 2, 1.0)


def test_frameworks_must_agree(benchmarks: Callable[[str], Any]) -> None:
    compare = benchmarks("cuda_step").compare
    one, other = ({"plain": {"losses": [2.0, loss]}} for loss in (1.0, 1.002))
    compare({"onnx": one, "torch": one})
    with pytest.raises(ValueError, match="the losses of torch and onnx differ"):
        compare({"onnx": one, "torch": other})


def test_memcpy_nodes_are_counted_in_branches_too(benchmarks: Callable[[str], Any]) -> None:
    count = benchmarks("training_steps.placement").memcpy_nodes
    make = onnx.helper.make_node

    def graph(*nodes: onnx.NodeProto) -> onnx.GraphProto:
        return onnx.helper.make_graph(nodes, "graph", [], [])

    def branch(*nodes: onnx.NodeProto) -> onnx.NodeProto:
        return make("If", ["c"], ["d"], then_branch=graph(*nodes), else_branch=graph())

    inner = branch(make("MemcpyToHost", ["a"], ["b"]))
    outer = branch(inner, make("MemcpyFromHost", ["a"], ["f"]))
    model = onnx.helper.make_model(graph(make("MemcpyToHost", ["x"], ["y"]), outer, make("Neg", ["x"], ["z"])))
    assert count(model) == (3, 2)


def test_the_last_run_of_a_profile_is_read(benchmarks: Callable[[str], Any], tmp_path: Path) -> None:
    placement = benchmarks("training_steps.placement")

    def event(name: str, begin: int, op_type: str = "", provider: str = "", cat: str = "Node") -> Mapping[str, Any]:
        args = {"op_name": op_type, "provider": f"{provider}ExecutionProvider"} if provider else {}
        return {"cat": cat, "name": name, "ts": begin, "dur": 1, "args": args}

    events = [
        event("model_run", 10, cat="Session"),
        event("first_kernel_time", 11, "Add", "CPU"),
        event("model_run", 20, cat="Session"),
        event("graphscale/check-finite/Mul_kernel_time", 21, "Mul", "CUDA"),
        event("graphscale/check-finite/Shape_kernel_time", 22, "Shape", "CPU"),
        event("copy_kernel_time", 23, "MemcpyToHost", "CUDA"),
        event("device_kernel_time", 24, cat="Kernel"),
        {"cat": "Session", "name": "an instant", "ts": 25},
    ]
    profile = tmp_path / "profile.json"
    profile.write_text(json.dumps(events))
    found = placement.nodes_of_a_run(profile)
    assert [(node.op_type, node.on_host, node.inserted) for node in found] == [
        ("Mul", False, True),
        ("Shape", True, True),
        ("MemcpyToHost", False, False),
    ]
    profile.write_text("[]")
    with pytest.raises(ValueError, match="no run in it"):
        placement.nodes_of_a_run(profile)


@pytest.fixture
def pretended(benchmarks: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    """A machine whose GPU is the CPU, and loses 1 MB of memory whenever one looks."""
    device = benchmarks("training_steps.device_onnx")
    of_numpy, bind_output = ort.OrtValue.ortvalue_from_numpy, ort.IOBinding.bind_output

    class Gpu:
        free = 10_000_000

        def free_memory(self) -> int:
            Gpu.free -= 1_000_000
            return Gpu.free

        def synchronize(self) -> None:
            pass

    monkeypatch.setattr(ort.OrtValue, "ortvalue_from_numpy", staticmethod(lambda array, *_: of_numpy(array)))
    monkeypatch.setattr(ort.IOBinding, "bind_output", lambda binding, name, *_: bind_output(binding, name))
    monkeypatch.setattr(device.Machine, "providers", ["CPUExecutionProvider"])
    monkeypatch.setattr(benchmarks("training_steps.device_graphs"), "Gpu", Gpu)
    return device.Machine("cuda", 1, False)


@pytest.mark.parametrize(
    ("way", "copies", "runs"),
    [("plain", 0, 1), ("session", 0, 1), ("loop", 0, 1), ("host", 6, 2), ("float16-host", 6, 2)],
)
def test_copies_and_syncs_of_a_step(
    benchmarks: Callable[[str], Any], pretended: Any, way: str, copies: int, runs: int
) -> None:
    """The host fetches the gradients of six weights; each run of a session ends with a sync."""
    workload = benchmarks("training_steps.workloads").large_workloads(True)["mlp-8-sgd"]
    facts = benchmarks("training_steps.device_graphs").facts_of(
        ROOT / "tests" / "benchmarks" / "step_graphs", workload, pretended, way
    )
    assert (facts.copies, facts.syncs, facts.memory) == (copies, copies + runs, 1_000_000)
    assert (facts.memcpy_nodes, facts.memcpy_in_branches) == (0, 0)
    products = {op_type: count for op_type, count in facts.host_nodes.items() if op_type.endswith(("MatMul", "Gemm"))}
    assert sum(products.values()) == 8  # three forward, five backward
    assert (facts.inserted_on_host > 0) == (way not in ("plain", "host"))


def test_sides_that_do_not_fit_are_refused(benchmarks: Callable[[str], Any], device_bench: Any) -> None:
    check = benchmarks("training_steps.device_graphs").check_room
    found = {name: device_bench.Facts(memory=20_000_000_000) for name in ("plain", "session")}
    check(found, 40_000_000_000)
    with pytest.raises(ValueError, match=r"take 40.0 GB of the GPU \(plain 20.0, session 20.0\), and 39.0 are free"):
        check(found, 39_000_000_000)


@pytest.mark.pytorch
def test_syncs_of_pytorch_are_those_that_it_warns_of(
    benchmarks: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch", reason="needs PyTorch")
    modes: list[str] = []
    for function, result in {"memory_reserved": 3, "max_memory_reserved": 10}.items():
        monkeypatch.setattr(torch.cuda, function, lambda result=result: result)
    for function in ("empty_cache", "reset_peak_memory_stats", "synchronize"):
        monkeypatch.setattr(torch.cuda, function, lambda: None)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)

    class Syncing(Fake):
        def step(self, batch: Any, *, fetch: bool) -> float | None:
            for _ in range(2 * (modes == ["warn"])):
                warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
            warnings.warn("something else", stacklevel=1)
            return super().step(batch, fetch=fetch)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        facts = benchmarks("training_steps.device_torch")._facts(lambda name: Syncing(iter([])), "plain", {})
    assert (facts.syncs, facts.memory, facts.memcpy_nodes) == (2, 7, None)
    assert modes == ["warn", "default"]


def test_an_error_of_the_other_process_is_one_here(benchmarks: Callable[[str], Any], tmp_path: Path) -> None:
    python = tmp_path / "python"
    answers = ['"2.13.0"', '{"result": {"plain": 1}}', '{"error": "the losses differ"}']
    python.write_text("#!/bin/sh\n" + "read call\n".join(f"echo '{answer}'\n" for answer in answers))
    python.chmod(0o755)
    bench = benchmarks("training_steps.remote").RemoteDevice(python, [], 1)
    assert (bench.version, bench.check()) == ("2.13.0", {"plain": 1})
    with pytest.raises(ValueError, match="the losses differ"):
        bench.check()
    with pytest.raises((RuntimeError, BrokenPipeError)):
        bench.check()


def test_the_driver_of_a_gpu(benchmarks: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    class Driver:
        """Takes what the real one takes, and gives what it would."""

        fails = ""

        def __getattr__(self, function: str) -> Callable[..., int]:
            def call(*arguments: Any) -> int:
                calls.append(function)
                if function == "cuDeviceGetName":
                    arguments[0].value = b"A GPU"
                if function == "cuMemGetInfo_v2":
                    arguments[0]._obj.value, arguments[1]._obj.value = 2**33, 2**34
                return 100 if function == self.fails else 0

            return call

    monkeypatch.setattr(ctypes, "CDLL", lambda name: Driver())
    gpu = benchmarks("training_steps.gpu").Gpu()
    assert (gpu.name(), gpu.free_memory()) == ("A GPU", 2**33)
    calls.clear()
    gpu.synchronize()
    assert calls == ["cuCtxPushCurrent_v2", "cuCtxSynchronize", "cuCtxPopCurrent_v2"]
    monkeypatch.setattr(Driver, "fails", "cuCtxSynchronize")
    with pytest.raises(RuntimeError, match="cuCtxSynchronize of the NVIDIA driver failed with error 100"):
        gpu.synchronize()
    assert calls[-1] == "cuCtxPopCurrent_v2"
