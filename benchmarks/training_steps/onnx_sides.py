"""The sides of ONNX Runtime: unscaled, scaled by graphscale in three ways, and scaled by a rule on the host."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from loops import ByBinding, first_values, options, states_in_place

import graphscale as gs
from training_steps.sides import PLAIN, Side, Sides
from training_steps.workloads import INCREMENT_PERIOD, INITIAL_LOSS_SCALE, RATES, Arrays, Workload

__all__ = ["FILE", "HOST", "LOOP", "ONE_BUFFER", "SESSION", "maker"]

FILE, ONE_BUFFER, SESSION, LOOP, HOST = "file", "one buffer", "session", "loop", "host"


class Loop:
    """A step in the loop by hand, on I/O binding."""

    def __init__(self, loop: ByBinding) -> None:
        self._loop = loop

    def step(self, batch: Mapping[str, np.ndarray]) -> float:
        return float(self._loop.step(batch)["loss"])

    def weights(self) -> Arrays:
        return self._loop.state_dict()

    def loss_scale(self) -> tuple[float, int] | None:
        state = self._loop.state_dict()
        if "current_loss_scale" not in state:
            return None
        return float(state["current_loss_scale"]), int(state["good_steps"])


class InSession:
    """A scaled step in a `gs.Session`."""

    def __init__(self, session: gs.Session) -> None:
        self._session = session

    def step(self, batch: Mapping[str, np.ndarray]) -> float:
        return float(self._session.step(batch)["loss"])

    def weights(self) -> Arrays:
        return self._session.state_dict()

    def loss_scale(self) -> tuple[float, int]:
        return self._session.loss_scale, self._session.good_steps


class OnHost:
    """Loss scaling without graphscale: a graph of gradients, numpy and Python, a graph of the optimizer.

    The gradients of the scaled loss come to numpy, `np.isfinite` goes over them, the rule is Python, and what is finite
    is fed to the optimizer, which unscales it. State stays in buffers of ONNX Runtime all the time.

    Args:
        gradients: the graph from weights, batch and `loss_scale` to `loss` and `grad.WEIGHT`.
        update: the graph from state, `grad.WEIGHT` and `loss_scale` to the next state.
        carried: `{input name: output name}` of the state.
        first: the first value of each state.
        made: options of both sessions.
    """

    def __init__(
        self,
        gradients: onnx.ModelProto,
        update: onnx.ModelProto,
        carried: Mapping[str, str],
        first: Arrays,
        made: ort.SessionOptions,
    ) -> None:
        self._update = ByBinding(update, carried, first, made)
        self._session = ort.InferenceSession(gradients.SerializeToString(), made)
        self._outputs = [output.name for output in self._session.get_outputs()]
        self._fed = {value.name for value in self._session.get_inputs()}
        self._rest = {value.name for value in update.graph.input}
        self._read = [value.name for value in self._session.get_inputs() if value.name in carried]
        self._bindings: dict[int, Any] = {}  # one for each of the two buffers of the state
        self._scale, self._good_steps = np.array(INITIAL_LOSS_SCALE, np.float32), 0

    def _binding(self) -> Any:
        state = self._update.present()
        binding = self._bindings.get(id(state))
        if binding is None:
            binding = self._bindings[id(state)] = self._session.io_binding()
            for name in self._read:
                binding.bind_ortvalue_input(name, state[name])
        return binding

    def step(self, batch: Mapping[str, np.ndarray]) -> float:
        binding, scale = self._binding(), {"loss_scale": self._scale}
        for name, value in {**batch, **scale}.items():
            if name in self._fed:
                binding.bind_cpu_input(name, value)
        for name in self._outputs:
            binding.bind_output(name, "cpu")
        self._session.run_with_iobinding(binding)
        outputs = dict(zip(self._outputs, binding.copy_outputs_to_cpu(), strict=True))
        loss = float(outputs.pop("loss"))
        if all(np.isfinite(gradient).all() for gradient in outputs.values()):
            rest = {name: value for name, value in batch.items() if name in self._rest}  # the learning rate
            self._update.step(outputs | scale | rest)
            self._good_steps += 1
            if self._good_steps >= INCREMENT_PERIOD:
                self._scale, self._good_steps = np.asarray(self._scale * np.float32(2)), 0
        else:
            self._scale, self._good_steps = np.asarray(np.maximum(self._scale / np.float32(2), np.float32(1))), 0
        return loss

    def weights(self) -> Arrays:
        return self._update.state_dict()

    def loss_scale(self) -> tuple[float, int]:
        return float(self._scale), self._good_steps


def _load(path: Path, workload: Workload) -> onnx.ModelProto:
    model = onnx.load(path)
    shapes = {v.name: tuple(d.dim_value for d in v.type.tensor_type.shape.dim) for v in model.graph.input}
    for name, shape in workload.model.shapes().items():
        if shapes.get(name, shape) != shape:
            raise ValueError(f"{path}: {name} is {shapes[name]}, the workload's {shape}; export the graphs again")
    return model


def maker(folder: Path, threads: int, *, spinning: bool) -> Callable[[Workload], Sides]:
    """Return the function that makes the sides of a workload from the graphs of `export_graphs.py` in a folder."""

    def make(workload: Workload) -> Sides:
        models = {
            part: _load(folder / f"{workload.name}.{part}.onnx", workload) for part in ("step", "gradients", "update")
        }
        policy = gs.DynamicLossScale(INITIAL_LOSS_SCALE, INCREMENT_PERIOD)
        scaled = gs.scale(models["step"], policy)
        lowered = gs.scale(models["step"], policy, target="ort-cpu")
        if scaled.report.coverage != 1.0:
            raise ValueError(f"{workload.name}: coverage is {scaled.report.coverage}")
        state = workload.weights()
        for value in models["step"].graph.input:
            if value.name.endswith((".exp_avg", ".exp_avg_sq")) or value.name == "step":
                state[value.name] = np.zeros([d.dim_value for d in value.type.tensor_type.shape.dim], np.float32)
        carried = {s.input: s.output for s in scaled.report.state}
        bare = {name: output for name, output in carried.items() if name in state}
        first = first_values(scaled, state)

        def made() -> ort.SessionOptions:
            return options(threads, spinning=spinning)

        sides: dict[str, Side] = {
            PLAIN: Loop(ByBinding(models["step"], bare, state, made())),
            FILE: Loop(ByBinding(lowered.model, carried, first, made())),
            ONE_BUFFER: Loop(ByBinding(lowered.model, carried, first, made(), shared=states_in_place(lowered.model))),
            SESSION: InSession(gs.Session(scaled, state=state, session_options=made())),
            LOOP: Loop(ByBinding(scaled.model, carried, first, made())),
            HOST: OnHost(models["gradients"], models["update"], bare, state, made()),
        }
        rate = {"learning_rate": np.array(RATES[workload.optimizer], np.float32)}
        fed = rate if "learning_rate" in {value.name for value in models["step"].graph.input} else {}
        return Sides(sides, [batch | fed for batch in workload.batches()])

    return make
