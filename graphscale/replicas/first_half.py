"""Running the first half of a step: the gradients are written where they will be reduced, and read, without a copy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import ml_dtypes
import numpy as np

from graphscale.errors import SessionError, SplitError, one_line
from graphscale.replicas.buckets import Bucket
from graphscale.replicas.splitting import Halves
from graphscale.session.interface import InputSpec, convert_feed, read_specs, to_ort_value
from graphscale.session.loading import create

__all__ = ["Arena", "FirstHalf", "Held"]

Array = np.ndarray[Any, Any]


class Held(Protocol):
    """Where the first half finds the carried state: what it is, and its present buffers."""

    specs: dict[str, InputSpec]

    def buffer(self, name: str) -> Any:
        """Return the value of ONNX Runtime that holds the present value."""


class Arena:
    """The memory of all gradients, in the order of the buckets.

    Args:
        halves: the step.
        buckets: its buckets.

    Attributes:
        buckets: the memory of each bucket.
        gradients: for each gradient a value of ONNX Runtime in that memory.

    Raises:
        SplitError: a gradient has a dtype that MPI does not add up.
    """

    def __init__(self, halves: Halves, buckets: Sequence[Bucket]) -> None:
        import onnxruntime as ort

        self.buckets: list[Array] = []
        self.gradients: dict[str, Any] = {}
        for gradient in halves.gradients:
            if gradient.dtype.name not in ("FLOAT", "DOUBLE"):
                raise SplitError(
                    f"the gradient {gradient.name!r} is of {gradient.dtype.name}, which MPI does not add up; let the "
                    "step unscale in float32"
                )
        parts: dict[str, Array] = {}
        for stage in range(len(halves.stages)):
            for dtype in dict.fromkeys(bucket.dtype for bucket in buckets if bucket.stage == stage):
                own = [bucket for bucket in buckets if (bucket.stage, bucket.dtype) == (stage, dtype)]
                memory = np.zeros(sum(bucket.elements for bucket in own), dtype.numpy())
                begin = 0
                for bucket in own:
                    self.buckets.append(memory[begin : begin + bucket.elements])
                    for segment in bucket.segments:
                        if segment.begin == 0:
                            parts[segment.gradient] = memory[begin:]
                        begin += segment.end - segment.begin
        for gradient in halves.gradients:
            memory = parts.get(gradient.name, np.zeros(0, gradient.dtype.numpy()))[: gradient.elements]
            self.gradients[gradient.name] = ort.OrtValue.ortvalue_from_numpy(memory.reshape(gradient.shape))


class FirstHalf:
    """The sessions of ONNX Runtime that compute the gradients, one for each stage.

    Args:
        halves: the step.
        arena: where the gradients go.
        carried: the carried state, which is read from its own buffers.
        providers: execution providers.
        options: options of ONNX Runtime.

    Attributes:
        inputs: what it is fed.
    """

    def __init__(
        self, halves: Halves, arena: Arena, carried: Held, providers: Sequence[Any] | None, options: Any
    ) -> None:
        self._halves, self._arena, self._carried = halves, arena, carried
        self._sessions = [create(model, None, (), {}, providers, options) for model in halves.stages]
        self.inputs: dict[str, InputSpec] = {}
        self._reads: list[tuple[str, ...]] = []
        given: set[str] = set()
        for session in self._sessions:
            specs = read_specs(session.get_inputs(), session.get_overridable_initializers())
            self._reads.append(tuple(specs))
            fed = {name: spec for name, spec in specs.items() if name not in carried.specs and name not in given}
            self.inputs.update(fed)
            given.update(output.name for output in session.get_outputs())
        later = [set().union(*self._reads[stage + 1 :]) for stage in range(len(self._sessions))]
        names = [[output.name for output in session.get_outputs()] for session in self._sessions]
        self._bound = [[name for name in own if name in arena.gradients] for own in names]
        self._gives = [[name for name in own if name not in arena.gradients] for own in names]
        self._needed = [
            [name for name in names if name in later[stage] or name in (*halves.cut.average, *halves.cut.local)]
            for stage, names in enumerate(self._gives)
        ]

    def check(self, feeds: Mapping[str, Any]) -> dict[str, Any]:
        """Return the feeds of the first half in a form that ONNX Runtime accepts.

        Raises:
            SessionError: one does not fit.
        """
        checked = {}
        for name, spec in self.inputs.items():
            if name in feeds:
                value = convert_feed(name, feeds[name], spec)
                if (spec.optional or spec.dtype == ml_dtypes.bfloat16) and isinstance(value, np.ndarray):
                    value = to_ort_value(name, value)
                checked[name] = value
        return checked

    def run(self, stage: int, values: dict[str, Any], fetch: Sequence[str]) -> None:
        """Run a stage: its gradients are in the arena then.

        Args:
            stage: its number, from 0.
            values: feeds, and what the stages before gave; what this one gives is added, as values of ONNX Runtime.
            fetch: outputs that are wanted for their own sake.

        Raises:
            SessionError: it could not run.
        """
        session = self._sessions[stage]
        binding = session.io_binding()
        for name in self._reads[stage]:
            if name in self._carried.specs:
                binding.bind_ortvalue_input(name, self._carried.buffer(name))
            elif isinstance(value := values.get(name), np.ndarray):
                binding.bind_cpu_input(name, value)
            elif value is not None:
                binding.bind_ortvalue_input(name, value)
        bound = self._bound[stage]
        for name in bound:
            binding.bind_ortvalue_output(name, self._arena.gradients[name])
        wanted = [name for name in self._gives[stage] if name in self._needed[stage] or name in fetch]
        for name in wanted:
            binding.bind_output(name, "cpu")
        try:
            session.run_with_iobinding(binding)
        except Exception as error:  # ORT's exceptions share no public base class
            raise SessionError(f"the step could not run: {one_line(error)}") from error
        results = binding.get_outputs()
        values.update(zip([*bound, *wanted], results, strict=True))
