"""Training loops on ONNX Runtime as an expert writes them by hand, which the benchmarks compare with."""

from __future__ import annotations

from collections.abc import Mapping
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


class ByBinding:
    """A loop on run_with_iobinding, by hand; all that it does in a step is what it must.

    Args:
        model: a step, scaled or not.
        carried: `{input name: output name}` of the state that is carried.
        first: the first value of each such input.
        made: options of the session; None for `options()`.
    """

    def __init__(
        self,
        model: onnx.ModelProto,
        carried: Mapping[str, str],
        first: Arrays,
        made: ort.SessionOptions | None = None,
    ) -> None:
        self._session = ort.InferenceSession(model.SerializeToString(), made or options())
        self._carried = dict(carried)
        self._returned = [o.name for o in self._session.get_outputs() if o.name not in self._carried.values()]
        self._buffers = [
            {name: ort.OrtValue.ortvalue_from_numpy(first[name].copy()) for name in carried} for _ in range(2)
        ]
        self._bindings = [self._bound(now, then) for now, then in (self._buffers, self._buffers[::-1])]
        self._turn = 0

    def _bound(self, now: dict[str, Any], then: dict[str, Any]) -> Any:
        binding = self._session.io_binding()
        for name, output in self._carried.items():
            binding.bind_ortvalue_input(name, now[name])
            binding.bind_ortvalue_output(output, then[name])
        return binding

    def step(self, feeds: Mapping[str, np.ndarray]) -> Arrays:
        binding = self._bindings[self._turn]
        for name, value in feeds.items():
            binding.bind_cpu_input(name, value)
        for name in self._returned:
            binding.bind_output(name, "cpu")
        self._session.run_with_iobinding(binding)
        self._turn = 1 - self._turn
        values = binding.get_outputs_as_ortvaluevector()
        first = len(self._carried)
        return {name: values[first + i].numpy() for i, name in enumerate(self._returned)}

    def present(self) -> dict[str, Any]:
        """The carried state as values of ONNX Runtime, in the memory of the next step."""
        return self._buffers[self._turn]

    def state_dict(self) -> Arrays:
        return {name: value.numpy() for name, value in self.present().items()}
