"""Running steps that are fed and fetched alike: bindings of ONNX Runtime, made once and used again and again."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from graphscale.errors import SessionError, one_line
from graphscale.session.carried import CarriedState, Device
from graphscale.session.interface import InputSpec, as_feed, as_ort_value

__all__ = ["StepError", "StepPlan"]

_SMALL = 2**16  # bytes


class StepError(SessionError):
    """ONNX Runtime could not run a step."""


class StepPlan:
    """How to run a step with these feeds and these outputs.

    Where some state has two buffers that take turns, there are two bindings that do so, too.

    Args:
        session: the session of ONNX Runtime.
        carried: the carried state.
        inputs: what can be fed.
        feeds: the names of what is fed.
        outputs: what can be fetched.
        fetch: the names of what is fetched.
        status: outputs that the result reads when it is asked, on the device.
        device: where those stay.

    Raises:
        SessionError: a name is unknown, or a feed is missing.
    """

    def __init__(
        self,
        session: Any,
        carried: CarriedState,
        inputs: Mapping[str, InputSpec],
        feeds: tuple[str, ...],
        outputs: tuple[str, ...],
        fetch: tuple[str, ...],
        status: tuple[str, ...],
        device: Device,
    ) -> None:
        _check_names(inputs, feeds, outputs, fetch)
        self._session, self._carried = session, carried
        self._specs = [(name, inputs[name]) for name in feeds]
        self._fetch = {name: name for name in fetch}
        self._status = [name for name in status if name not in self._fetch]
        self._device = device
        if not self._fetch and not self._status:
            self._status = list(outputs[:1])  # by some output it shows whether a run has ended
        self._bindings: dict[int, Any] = {}
        self._running: Any = None
        self._first = len(carried.outputs)

    def check(self, feeds: Mapping[str, Any]) -> list[tuple[str, Any]]:
        """The feeds as ONNX Runtime takes them.

        Raises:
            SessionError: one does not fit.
        """
        checked = []
        for name, spec in self._specs:
            value = as_feed(name, feeds[name], spec)
            # A binding takes arrays of numpy for inputs that must be fed, and of the dtypes that numpy has itself.
            if (spec.optional or spec.dtype == ml_dtypes.bfloat16) and isinstance(value, np.ndarray):
                value = as_ort_value(name, value)
            checked.append((name, value))
        return checked

    def run(
        self, session: Any, feeds: Sequence[tuple[str, Any]]
    ) -> tuple[dict[str, np.ndarray[Any, Any]], dict[str, Any]]:
        """Run one step.

        Returns:
            the outputs that are fetched, and all that were bound as values of ONNX Runtime, by name.

        Raises:
            StepError: the step could not run.
        """
        self._running = None
        binding = self._binding()
        try:
            for name, value in feeds:
                if isinstance(value, np.ndarray):
                    binding.bind_cpu_input(name, value)
                else:
                    binding.bind_ortvalue_input(name, value)
        except Exception as error:  # ORT's exceptions share no public base class
            raise SessionError(f"the feed {name!r} cannot be bound: {one_line(error)}") from error
        # A bound output keeps the buffer of the run before, which the caller may still hold: bind it anew.
        for name in self._fetch:
            binding.bind_output(name, "cpu")
        for name in self._status:
            binding.bind_output(name, self._device.name, self._device.index)
        self._running = binding
        try:
            session.run_with_iobinding(binding)
        except Exception as error:  # ORT's exceptions share no public base class
            if self.has_run():
                raise  # what a signal handler raised when the run was over
            self._bindings.clear()
            raise StepError(f"the step could not run: {one_line(error)}") from error
        found = binding.get_outputs_as_ortvaluevector()
        first = self._first
        values = {name: found[first + i] for i, name in enumerate((*self._fetch, *self._status))}
        return {name: _fetched(values[name].numpy()) for name in self._fetch}, values

    def has_run(self) -> bool:
        """Whether the run that was begun last has ended: then its outputs have values, which were bound without."""
        if self._running is None:
            return False
        return bool(self._running.get_outputs_as_ortvaluevector()[self._first].has_value())

    def _binding(self) -> Any:
        turn = self._carried.turns
        binding = self._bindings.get(turn)
        if binding is None:
            binding = self._session.io_binding()
            self._carried.bind(binding)
            self._bindings[turn] = binding
        return binding


def _fetched(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """A copy of a small output: a view, however small, keeps all memory that the session has used."""
    return np.array(array) if array.nbytes <= _SMALL else array


def _check_names(
    inputs: Mapping[str, InputSpec], feeds: tuple[str, ...], outputs: tuple[str, ...], fetch: tuple[str, ...]
) -> None:
    for name in feeds:
        if name not in inputs:
            if not isinstance(name, str):
                raise SessionError(f"feeds are named by the step's inputs; got {name!r}")
            raise SessionError(f"the step has no input {name!r}{_nearest(name, tuple(inputs), 'inputs')}")
    missing = [name for name, spec in inputs.items() if name not in feeds and not spec.optional]
    if missing:
        raise SessionError(f"the step needs a feed for {', '.join(map(repr, missing))}")
    for name in fetch:
        if name not in outputs:
            raise SessionError(
                f"the step has no output {name!r} to fetch{_nearest(name, outputs, 'outputs')}; carried state is in "
                "state_dict()"
            )


def _nearest(name: str, names: tuple[str, ...], what: str) -> str:
    close = difflib.get_close_matches(name, names, 1)
    return f"; did you mean {close[0]!r}?" if close else f"; its {what} are {', '.join(names)}"
