"""Train a lowered step in a loop of your own, with one buffer for each state that allows it."""

import json
from collections.abc import Collection, Mapping

import numpy as np
import onnxruntime as ort

Arrays = Mapping[str, np.ndarray]


class Loop:
    """A training loop on I/O binding.

    Args:
        path: the lowered step.
        state: the first value of each carried input without an initializer.
        shared: the carried inputs that share one buffer with their next values; None: those of `graphscale.in_place`.
    """

    def __init__(self, path: str, state: Arrays, shared: Collection[str] | None = None) -> None:
        options = ort.SessionOptions()
        options.log_severity_level = 3  # ONNX Runtime warns of each initializer that is an input, too
        self.session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        metadata = self.session.get_modelmeta().custom_metadata_map
        self.next: dict[str, str] = json.loads(metadata["graphscale.state"])
        self.shared = set(json.loads(metadata.get("graphscale.in_place", "[]")) if shared is None else shared)
        # An OrtValue on the CPU is the memory of its array: copy what the loop overwrites.
        self.now = {name: ort.OrtValue.ortvalue_from_numpy(value.copy()) for name, value in state.items()}
        self.spare: dict[str, ort.OrtValue] = {}
        carried = set(self.next.values())
        self.returned = [output.name for output in self.session.get_outputs() if output.name not in carried]

    def step(self, batch: Arrays) -> dict[str, np.ndarray]:
        """Run a step; return its outputs without the carried state."""
        binding = self.session.io_binding()
        for name, value in batch.items():
            binding.bind_cpu_input(name, value)
        for name, output in self.next.items():
            if name in self.now:  # else the first step starts from the initializer
                binding.bind_ortvalue_input(name, self.now[name])
            target = (self.now if name in self.shared else self.spare).get(name)
            if target is None:
                binding.bind_output(output, "cpu")  # ONNX Runtime allocates a buffer
            else:
                binding.bind_ortvalue_output(output, target)
        for name in self.returned:
            binding.bind_output(name, "cpu")
        self.session.run_with_iobinding(binding)
        values = dict(zip([*self.next.values(), *self.returned], binding.get_outputs(), strict=True))
        for name, output in self.next.items():
            if name not in self.now:
                self.now[name] = values[output]
            elif name not in self.shared:
                # Keep the objects that were bound: they own the memory, and those that `get_outputs` makes do not.
                self.now[name], self.spare[name] = self.spare.get(name, values[output]), self.now[name]
        return {name: values[name].numpy() for name in self.returned}

    def state(self) -> dict[str, np.ndarray]:
        """Return a copy of the carried state."""
        return {name: value.numpy().copy() for name, value in self.now.items()}
