"""The sides of ONNX Runtime on a device: float32 and float16, unscaled, scaled by graphscale, scaled on the host."""

from __future__ import annotations

import functools
import gc
import multiprocessing
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from kernel_times import profile_in
from loops import ByBinding, first_values

import graphscale as gs
from training_steps.device_bench import FLOAT16, DeviceSide, Facts, Ways
from training_steps.device_onnx import InSession, Loop, Machine, OnHost
from training_steps.gpu import Gpu
from training_steps.launches import launches
from training_steps.placement import TO_HOST, memcpy_nodes, nodes_of_a_run
from training_steps.sides import PLAIN
from training_steps.workloads import INCREMENT_PERIOD, INITIAL_LOSS_SCALE, RATES, Arrays, Workload

__all__ = ["HOST", "LOOP", "NAMES", "PORTABLE", "SESSION", "Graphs", "check_room", "facts_of", "opener"]

SESSION, LOOP, HOST = "session", "loop", "host"
PORTABLE = f"{LOOP}-onnx"  # scaled for `onnx`: the finite check writes its products
NAMES = (PLAIN, SESSION, LOOP, PORTABLE, HOST, FLOAT16, f"{FLOAT16}-{SESSION}", f"{FLOAT16}-{HOST}")
_GRAPHS = ("step", "gradients", "update")
_PROFILED_STEPS = 3


class Graphs:
    """The graphs of a workload, and the sides that they make.

    Args:
        folder: the folder that `export_graphs.py` wrote.
        workload: of the same sizes.
        machine: the machine that the sides run on.

    Raises:
        ValueError: a graph is of another size.
    """

    def __init__(self, folder: Path, workload: Workload, machine: Machine) -> None:
        self._files = {part: folder / f"{workload.name}.{part}.onnx" for part in _GRAPHS}
        self._workload, self._machine = workload, machine
        self._step = self._load("step")
        shapes = {v.name: tuple(d.dim_value for d in v.type.tensor_type.shape.dim) for v in self._step.graph.input}
        wanted = workload.model.shapes() | {name: array.shape for name, array in workload.batches()[0].items()}
        for name, shape in wanted.items():
            if shapes[name] != shape:
                path = self._files["step"]
                raise ValueError(f"{path}: {name} is {shapes[name]}, the workload's {shape}; export the graphs again")
        self._state = workload.weights()
        for name, shape in shapes.items():
            if name.endswith((".exp_avg", ".exp_avg_sq")) or name == "step":
                self._state[name] = np.zeros(shape, np.float32)
        self._rate = "learning_rate" in shapes

    def batches(self) -> list[dict[str, Any]]:
        """Return the batches, on the device."""
        rate = {"learning_rate": np.array(RATES[self._workload.optimizer], np.float32)} if self._rate else {}
        found = [batch | rate for batch in self._workload.batches()]
        return [{name: self._machine.value(array) for name, array in batch.items()} for batch in found]

    def side(self, name: str, made: Callable[[], ort.SessionOptions]) -> Any:
        """One of `NAMES`; `made` gives options for each session of ONNX Runtime."""
        low = name.startswith(FLOAT16)
        way = name.removeprefix(FLOAT16).removeprefix("-") or PLAIN
        if way == PLAIN:
            return Loop(self._loop(self._cast(self._step) if low else self._step, self._carried, made()))
        if way == HOST:
            gradients, update = self._load("gradients"), self._load("update")
            loop = self._loop(update, self._carried, made())
            fed = frozenset(value.name for value in update.graph.input)
            return OnHost(self._cast(gradients) if low else gradients, loop, fed, made(), self._machine)
        scaled = self.scaled(low=low, target="onnx" if way == PORTABLE else self._machine.target if low else "ort-cuda")
        if way == SESSION:
            return InSession(gs.Session(scaled, self._machine.providers, made(), self._state))
        carried = {s.input: s.output for s in scaled.report.state if s.output is not None}
        return Loop(self._loop(scaled.model, carried, made(), first_values(scaled, self._state)))

    def scaled(self, *, low: bool, target: str) -> gs.ScaledModel:
        """The step with a dynamic loss scale in it, for a target of graphscale.

        Raises:
            ValueError: some contraction of the backward pass computes on unscaled values.
        """
        policy = gs.DynamicLossScale(INITIAL_LOSS_SCALE, INCREMENT_PERIOD)
        cast = FLOAT16 if low else None
        made = gs.scale(self._step, policy, target=target, autocast=cast)
        if made.report.coverage != 1.0 or not made.report.proved:
            raise ValueError(f"coverage is {made.report.coverage}, proved: {made.report.proved}")
        return made

    @functools.cached_property
    def _carried(self) -> dict[str, str]:
        return {s.input: s.output for s in gs.inspect(self._step).state if s.output is not None}

    def _cast(self, model: onnx.ModelProto) -> onnx.ModelProto:
        made: Any = gs.autocast(model, FLOAT16, target=self._machine.target).model
        return made

    def _loop(self, model: Any, carried: Mapping[str, str], made: Any, first: Arrays | None = None) -> ByBinding:
        machine = self._machine
        return ByBinding(model, carried, first or self._state, made, machine.providers, machine.device)

    def _load(self, part: str) -> onnx.ModelProto:
        return onnx.load(self._files[part])


def facts_of(folder: Path, workload: Workload, machine: Machine, name: str) -> Facts:
    """Run some steps of a side with the profiler, and look at what ONNX Runtime made of its graphs.

    Device memory is what is free before the side is made, less what is free afterwards: right in a process that has
    made no other side, and where nothing else takes memory meanwhile.
    """
    gpu = Gpu() if machine.device == "cuda" else None
    graphs = Graphs(folder, workload, machine)
    with tempfile.TemporaryDirectory() as temporary:
        made: list[Path] = []

        def profiled() -> ort.SessionOptions:
            made.append(Path(temporary) / str(len(made)))
            found = machine.session_options()
            found.enable_profiling, found.profile_file_prefix = True, f"{made[-1]}.profile"
            found.optimized_model_filepath = f"{made[-1]}.onnx"
            return found

        free = gpu.free_memory() if gpu else 0
        batches, side = graphs.batches(), graphs.side(name, profiled)
        for number in range(_PROFILED_STEPS):
            side.step(batches[number % len(batches)], fetch=False)
        if gpu:
            gpu.synchronize()
        memory = free - gpu.free_memory() if gpu else None
        side.close()
        gc.collect()  # a session writes its profile when it ends
        executed = [onnx.load(f"{path}.onnx", load_external_data=False) for path in made]
        memcpy = [memcpy_nodes(model) for model in executed]
        ran = [node for path in made for node in nodes_of_a_run(profile_in(path.parent, f"{path.name}.profile"))]
    copies = side.copies + sum(node.op_type == TO_HOST for node in ran)
    on_host = [node for node in ran if node.on_host]
    return Facts(
        memcpy_nodes=sum(number for number, _ in memcpy),
        memcpy_in_branches=sum(number for _, number in memcpy),
        host_nodes=dict(Counter(node.op_type for node in on_host)),
        inserted_on_host=sum(node.inserted for node in on_host),
        copies=copies if gpu else None,
        syncs=copies + side.runs if gpu else None,
        memory=memory,
        # A session lowers the check for the CPU.
        launches=launches(executed[-1]) if gpu or name.startswith(LOOP) else None,
    )


def check_room(found: Mapping[str, Facts], free: int) -> None:
    """See whether the sides can be on a GPU together.

    Raises:
        ValueError: they take more memory than is free there.
    """
    needed = sum(facts.memory or 0 for facts in found.values())
    if needed > free:
        each = ", ".join(f"{name} {(facts.memory or 0) / 1e9:.1f}" for name, facts in found.items())
        raise ValueError(
            f"the ways of ONNX Runtime take {needed / 1e9:.1f} GB of the GPU ({each}), and {free / 1e9:.1f} are free: "
            "choose some with --ways, or a smaller --batch"
        )


def opener(folder: Path, machine: Machine) -> Callable[[Workload], Ways]:
    """Return the function that opens a workload from the graphs that `export_graphs.py` wrote to a folder."""

    def facts(workload: Workload, names: Sequence[str]) -> dict[str, Facts]:
        # ONNX Runtime keeps device memory of closed sessions, and does not say how much: to each side a new process.
        fresh = 1 if machine.device == "cuda" else None
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, mp_context=spawn, max_tasks_per_child=fresh) as pool:
            results = pool.map(functools.partial(facts_of, folder, workload, machine), names)
            found = dict(zip(names, results, strict=True))
        if machine.device == "cuda":
            check_room(found, Gpu().free_memory())
        return found

    def open_workload(workload: Workload) -> Ways:
        graphs = Graphs(folder, workload, machine)
        makers: dict[str, Callable[[], DeviceSide]] = {
            name: functools.partial(graphs.side, name, machine.session_options) for name in NAMES
        }
        synchronize = Gpu().synchronize if machine.device == "cuda" else lambda: None
        return Ways(makers, graphs.batches(), functools.partial(facts, workload), synchronize)

    return open_workload
