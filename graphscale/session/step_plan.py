"""Plans of steps with the same names of feeds and outputs: bindings of ONNX Runtime, made once."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import ml_dtypes
import numpy as np

from graphscale.errors import SessionError, one_line
from graphscale.files.tensor_files import Arrays
from graphscale.session.carried import CarriedState
from graphscale.session.interface import InputSpec, bindable, check_names, read_specs, to_ort_value

__all__ = ["StepError", "StepPlan", "allocate_numbers"]

_SMALL = 2**16  # bytes


class StepError(SessionError):
    """ONNX Runtime could not run a step."""


class StepPlan:
    """A plan to run steps with the same feeds and outputs, by name.

    Where a state has two buffers that take turns, two bindings do so, too.

    Of all inputs and outputs, `feeds` are fed, and `fetch` are fetched. The result reads the outputs of the status,
    `{role: name}`, on demand: from the memory of `allocate_numbers` if they have some, else from the device.

    Raises:
        SessionError: a name is unknown, or a feed is missing.
    """

    def __init__(
        self,
        session: Any,
        carried: CarriedState,
        inputs: Mapping[str, InputSpec],
        outputs: tuple[str, ...],
        status: Mapping[str, str],
        numbers: Mapping[str, tuple[np.ndarray[Any, Any], Any]],
        feeds: tuple[str, ...],
        fetch: tuple[str, ...],
    ) -> None:
        for name in feeds:
            if name in carried.specs:
                raise SessionError(f"{name!r} is carried from step to step by the session; do not feed it")
        check_names(inputs, feeds, outputs, fetch)
        self._session, self._carried = session, carried
        self._feeds = [(name, inputs[name]) for name in feeds]
        self._fetch, self._status = tuple(dict.fromkeys(fetch)), dict(status)
        device, wanted = carried.device, dict.fromkeys((*fetch, *status.values()))
        self._numbers = dict(numbers)
        # At least one output is bound anew, to show whether a run has ended.
        if self._numbers and len(self._numbers) == len(wanted):
            del self._numbers[next(iter(wanted))]
        anew = [name for name in wanted if name not in self._numbers] or list(outputs[:1])
        self._anew = [(name, *(("cpu", 0) if name in fetch else (device.name, device.index))) for name in anew]
        self._places = {name: len(carried.outputs) + len(self._numbers) + i for i, name in enumerate(anew)}
        self._bindings: dict[int, Any] = {}
        self._running: Any = None

    def run(self, feeds: Mapping[str, Any]) -> tuple[Arrays, dict[str, Any]]:
        """Run one step.

        Returns:
            the fetched outputs, and the status by role: numbers on a CPU, values of ONNX Runtime elsewhere.

        Raises:
            StepError: the step could not run.
            SessionError: a feed does not fit.
        """
        self._running = None
        checked = [(name, bindable(name, feeds[name], spec)) for name, spec in self._feeds]
        binding = self._binding()
        try:
            for name, value in checked:
                if isinstance(value, np.ndarray):
                    binding.bind_cpu_input(name, value)
                else:
                    binding.bind_ortvalue_input(name, value)
        except Exception as error:  # ORT's exceptions share no public base class
            raise SessionError(f"the feed {name!r} cannot be bound: {one_line(error)}") from error
        # A bound output keeps the buffer of the last run, which the caller may still hold: bind the output anew.
        for name, kind, index in self._anew:
            binding.bind_output(name, kind, index)
        self._running = binding
        try:
            self._session.run_with_iobinding(binding)
        except Exception as error:  # ORT's exceptions share no public base class
            if self.has_run():
                raise  # an exception of a signal handler after the run
            self._bindings.clear()
            raise StepError(f"the step could not run: {one_line(error)}") from error
        values = binding.get_outputs_as_ortvaluevector()
        arrays = {name: self._array(name, values) for name in self._fetch}
        return arrays, {role: self._number(name, values) for role, name in self._status.items()}

    def _array(self, name: str, values: Any) -> np.ndarray[Any, Any]:
        """Return a fetched output, a copy if it is small: a view keeps all memory of the session."""
        is_number = name in self._numbers
        array: np.ndarray[Any, Any] = self._numbers[name][0] if is_number else values[self._places[name]].numpy()
        return array.copy() if array.nbytes <= _SMALL else array

    def _number(self, name: str, values: Any) -> Any:
        """Return a status."""
        if name in self._numbers:
            return self._numbers[name][0].item()
        value = values[self._places[name]]
        return value.numpy().item() if self._carried.device.name == "cpu" else value

    def has_run(self) -> bool:
        """Return whether the last run has ended: then its outputs, bound without values, have some."""
        if self._running is None:
            return False
        return bool(self._running.get_outputs_as_ortvaluevector()[min(self._places.values())].has_value())

    def _binding(self) -> Any:
        which = self._carried.buffers[2]
        binding = self._bindings.get(which)
        if binding is None:
            binding = self._session.io_binding()
            self._carried.bind(binding)
            for name, (_, value) in self._numbers.items():
                binding.bind_ortvalue_output(name, value)
            self._bindings[which] = binding
        return binding


def allocate_numbers(session: Any, names: Collection[str]) -> dict[str, tuple[np.ndarray[Any, Any], Any]]:
    """Allocate memory for the outputs of a session that are scalars of numpy's dtypes: an array and its OrtValue.

    The memory is read right after each run, so that it can serve all runs.
    """
    specs = read_specs((output for output in session.get_outputs() if output.name in names), ())
    plain = {name: spec.dtype for name, spec in specs.items() if spec.shape == () and spec.dtype != ml_dtypes.bfloat16}
    arrays = {name: np.zeros((), dtype) for name, dtype in plain.items()}
    return {name: (array, to_ort_value(name, array)) for name, array in arrays.items()}
