"""Training loops on ONNX Runtime as an expert writes them by hand, which the benchmarks compare with."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort

import graphscale as gs

Arrays = dict[str, np.ndarray]


def options(threads: int = 1, *, spinning: bool = True) -> ort.SessionOptions:
    """ONNX Runtime's defaults on so many threads, which may spin while they wait, as is its default."""
    made = ort.SessionOptions()
    made.log_severity_level = 4
    made.intra_op_num_threads = threads
    if not spinning:
        made.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return made


def first_values(result: gs.ScaledModel, state: Arrays) -> Arrays:
    """All carried state: what is given, and the initial values of the loss scale's own."""
    initial = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in result.model.graph.initializer}
    return {s.input: state[s.input] if s.input in state else initial[s.input] for s in result.report.state}


def states_in_place(model: onnx.ModelProto) -> list[str]:
    """Return the states of a lowered model whose next value may be written over the present one."""
    metadata = {entry.key: entry.value for entry in model.metadata_props}
    found: list[str] = json.loads(metadata.get("graphscale.in_place", "[]"))
    return found


def opened(model: onnx.ModelProto, made: ort.SessionOptions, providers: Sequence[Any] | None) -> ort.InferenceSession:
    """A session on these providers; None for ONNX Runtime's default.

    Raises:
        RuntimeError: a provider did not start.
    """
    if providers is None:
        return ort.InferenceSession(model.SerializeToString(), made)
    session = ort.InferenceSession(model.SerializeToString(), made, providers=list(providers), enable_fallback=0)
    for provider in providers:
        name = provider if isinstance(provider, str) else provider[0]
        if name not in session.get_providers():
            raise RuntimeError(f"{name} did not start; the session would run on {', '.join(session.get_providers())}")
    return session


class ByBinding:
    """A loop on run_with_iobinding, by hand; all that it does in a step is what it must.

    Args:
        model: a step, scaled or not.
        carried: `{input name: output name}` of the state that is carried.
        first: the first value of each such input.
        made: options of the session; None for `options()`.
        providers: of the session; each must start; None for ONNX Runtime's default.
        device: place of the state: `cpu`, or `cuda` for the first GPU.
        shared: the states with one buffer for the present and the next value. Every other state has two.

    Raises:
        RuntimeError: a provider did not start.
    """

    def __init__(
        self,
        model: onnx.ModelProto,
        carried: Mapping[str, str],
        first: Arrays,
        made: ort.SessionOptions | None = None,
        providers: Sequence[Any] | None = None,
        device: str = "cpu",
        shared: Collection[str] = (),
    ) -> None:
        self._session = opened(model, made or options(), providers)
        self._device = device
        self._carried = dict(carried)
        self._returned = [o.name for o in self._session.get_outputs() if o.name not in self._carried.values()]
        self._buffers = [
            {name: ort.OrtValue.ortvalue_from_numpy(first[name].copy(), device, 0) for name in carried}
            for _ in range(2)
        ]
        self._buffers[1] |= {name: self._buffers[0][name] for name in shared}
        self._bindings = [self._bound(now, then) for now, then in (self._buffers, self._buffers[::-1])]
        self._turn = 0

    def _bound(self, now: dict[str, Any], then: dict[str, Any]) -> Any:
        binding = self._session.io_binding()
        for name, output in self._carried.items():
            binding.bind_ortvalue_input(name, now[name])
            binding.bind_ortvalue_output(output, then[name])
        return binding

    def step(self, feeds: Mapping[str, Any], fetch: Sequence[str] | None = None) -> Arrays:
        """Run a step.

        Args:
            feeds: arrays, or values of ONNX Runtime that are on the device already.
            fetch: the outputs that come to the host; None for all but the state. The others stay on the device.
        """
        binding = self._bindings[self._turn]
        for name, value in feeds.items():
            if isinstance(value, np.ndarray):
                binding.bind_cpu_input(name, value)
            else:
                binding.bind_ortvalue_input(name, value)
        wanted = self._returned if fetch is None else fetch
        for name in self._returned:
            binding.bind_output(name, "cpu" if name in wanted else self._device)
        self._session.run_with_iobinding(binding)
        self._turn = 1 - self._turn
        values = binding.get_outputs_as_ortvaluevector()
        first = len(self._carried)
        return {name: values[first + i].numpy() for i, name in enumerate(self._returned) if name in wanted}

    def present(self) -> dict[str, Any]:
        """The carried state as values of ONNX Runtime, in the memory of the next step."""
        return self._buffers[self._turn]

    def state_dict(self) -> Arrays:
        return {name: value.numpy() for name, value in self.present().items()}
