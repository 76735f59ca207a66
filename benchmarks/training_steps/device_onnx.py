"""The ways of ONNX Runtime to run a step on a device: a loop by hand, a gs.Session, and the loss scale on the host."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from loops import ByBinding, opened, options

import graphscale as gs
from training_steps.device_bench import State, next_state
from training_steps.workloads import INITIAL_LOSS_SCALE, Arrays

__all__ = ["InSession", "Loop", "Machine", "OnHost"]

Batch = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Machine:
    """A device of ONNX Runtime.

    Attributes:
        device: `cuda` for the first GPU, or `cpu`.
        threads: of a session, on the CPU.
        tf32: whether float32 products may be rounded to TF32.
    """

    device: str
    threads: int
    tf32: bool

    @property
    def providers(self) -> list[Any]:
        """The execution providers that must start."""
        if self.device == "cpu":
            return ["CPUExecutionProvider"]
        # Each side holds memory of its own: no more than it needs, instead of the next power of two.
        memory = {"arena_extend_strategy": "kSameAsRequested"}
        return [("CUDAExecutionProvider", {"device_id": "0", "use_tf32": str(int(self.tf32)), **memory})]

    @property
    def target(self) -> str:
        """The target of graphscale's casts: its graphs run on onnxruntime-gpu and on onnxruntime-training alike."""
        return "onnx" if self.device == "cpu" else "ort-cuda"

    def value(self, array: np.ndarray) -> Any:
        """An array on the device."""
        return ort.OrtValue.ortvalue_from_numpy(array, self.device, 0)

    def session_options(self) -> ort.SessionOptions:
        """Options of a session whose steps are timed."""
        return options(self.threads, spinning=False)


class Loop:
    """A step in the loop by hand, on I/O binding."""

    copies, runs = 0, 1  # of a step whose loss is not fetched: tensors to the host, and runs of a session

    def __init__(self, loop: ByBinding) -> None:
        self._loop: Any = loop

    def step(self, batch: Batch, *, fetch: bool) -> float | None:
        found = self._loop.step(batch, ["loss"] if fetch else [])
        return float(found["loss"]) if fetch else None

    def weights(self) -> Arrays:
        return {name: np.array(value) for name, value in self._loop.state_dict().items()}

    def loss_scale(self) -> State | None:
        state = self._loop.present()
        if "current_loss_scale" not in state:
            return None
        return float(state["current_loss_scale"].numpy()), int(state["good_steps"].numpy())

    def close(self) -> None:
        self._loop = None


class InSession:
    """A scaled step in a `gs.Session`."""

    copies, runs = 0, 1

    def __init__(self, session: gs.Session) -> None:
        self._session = session

    def step(self, batch: Batch, *, fetch: bool) -> float | None:
        found = self._session.step(batch, fetch=["loss"] if fetch else [])
        return float(found["loss"]) if fetch else None

    def weights(self) -> Arrays:
        return self._session.state_dict()

    def loss_scale(self) -> State:
        return self._session.loss_scale, self._session.good_steps

    def close(self) -> None:
        self._session.close()


class OnHost:
    """Loss scaling without graphscale: a graph of gradients, numpy and Python, a graph of the optimizer.

    The gradients of the scaled loss are copied to numpy, `np.isfinite` goes over them, and the rule is Python. They and
    the state stay on the device for the graph of the optimizer, which unscales them.

    Args:
        gradients: the graph from weights, batch and `loss_scale` to `loss` and `grad.WEIGHT`.
        update: the loop of the graph from state, `grad.WEIGHT` and `loss_scale` to the next state.
        update_inputs: names of the inputs of that graph.
        made: options of the session of `gradients`.
        machine: the machine that both run on.
    """

    runs = 2

    def __init__(
        self,
        gradients: onnx.ModelProto,
        update: ByBinding,
        update_inputs: frozenset[str],
        made: ort.SessionOptions,
        machine: Machine,
    ) -> None:
        self._update: Any = update
        self._session: Any = opened(gradients, made, machine.providers)
        self._machine, self._rest = machine, update_inputs
        self._outputs = [output.name for output in self._session.get_outputs()]
        self._fed = {value.name for value in self._session.get_inputs()}
        self._bindings: dict[int, Any] = {}  # one for each of the two buffers of the state
        self._state: State = (INITIAL_LOSS_SCALE, 0)
        self._scale = machine.value(np.array(INITIAL_LOSS_SCALE, np.float32))
        self.copies = len(self._outputs) - 1  # all but the loss

    def step(self, batch: Batch, *, fetch: bool) -> float | None:
        values = {**batch, "loss_scale": self._scale}
        binding = self._binding()
        for name, value in values.items():
            if name in self._fed:
                binding.bind_ortvalue_input(name, value)
        for name in self._outputs:
            binding.bind_output(name, self._machine.device)
        self._session.run_with_iobinding(binding)
        gradients = dict(zip(self._outputs, binding.get_outputs(), strict=True))
        loss = gradients.pop("loss")
        finite = all(np.isfinite(gradient.numpy()).all() for gradient in gradients.values())
        if finite:
            self._update.step(gradients | {name: values[name] for name in values if name in self._rest}, [])
        before, self._state = self._state, next_state(self._state, finite=finite)
        if self._state[0] != before[0]:
            self._scale = self._machine.value(np.array(self._state[0], np.float32))
        return float(loss.numpy()) if fetch else None

    def weights(self) -> Arrays:
        return {name: np.array(value) for name, value in self._update.state_dict().items()}

    def loss_scale(self) -> State:
        return self._state

    def close(self) -> None:
        self._bindings.clear()
        self._session = self._update = None

    def _binding(self) -> Any:
        state = self._update.present()
        binding = self._bindings.get(id(state))
        if binding is None:
            binding = self._bindings[id(state)] = self._session.io_binding()
            for name in self._fed & state.keys():
                binding.bind_ortvalue_input(name, state[name])
        return binding
