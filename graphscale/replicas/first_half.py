"""Running the first half of a step: the gradients are written where they will be reduced, and read, without a copy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from graphscale.errors import SessionError, reporting
from graphscale.replicas.whole_update import ReplicaSetup, WholeUpdate
from graphscale.session.interface import InputSpec, bindable, read_specs
from graphscale.session.loading import create

__all__ = ["FirstHalf", "run_bound"]


class FirstHalf:
    """The sessions of ONNX Runtime that compute the gradients, one for each stage.

    Args:
        setup: the step of this replica.
        update: its second half, where the gradients go and the carried state is.

    Attributes:
        inputs: what it is fed.
    """

    def __init__(self, setup: ReplicaSetup, update: WholeUpdate) -> None:
        halves = setup.halves
        self._arena, self._buffer = update.arena, update.buffer
        self._sessions = [create(model, None, (), {}, setup.providers, setup.options) for model in halves.stages]
        self.inputs: dict[str, InputSpec] = {}
        self._reads: list[list[str]] = []
        self._gives: list[list[str]] = []
        given: set[str] = set()
        for session in self._sessions:
            specs = read_specs(session.get_inputs(), session.get_overridable_initializers())
            self.inputs.update((n, spec) for n, spec in specs.items() if n not in update.specs and n not in given)
            self._reads.append(list(specs))
            self._gives.append([output.name for output in session.get_outputs()])
            given.update(self._gives[-1])
        handed_on = {*halves.cut.average, *halves.cut.local}
        self._needed = [handed_on.union(*self._reads[stage + 1 :]) for stage in range(len(self._sessions))]

    def check(self, feeds: Mapping[str, Any]) -> dict[str, Any]:
        """Return the feeds of the first half in a form that ONNX Runtime accepts.

        Raises:
            SessionError: one does not fit.
        """
        return {name: bindable(name, feeds[name], spec) for name, spec in self.inputs.items() if name in feeds}

    def run(self, stage: int, values: dict[str, Any], fetch: Sequence[str]) -> None:
        """Run a stage: its gradients are in the arena then.

        Args:
            stage: its number, from 0.
            values: feeds, and what the stages before gave; what this one gives is added, as values of ONNX Runtime.
            fetch: outputs that are wanted for their own sake.

        Raises:
            SessionError: it could not run.
        """
        read = {name: self._buffer(name) or values.get(name) for name in self._reads[stage]}
        gradients, needed = self._arena.gradients, self._needed[stage]
        names = [name for name in self._gives[stage] if name in gradients or name in needed or name in fetch]
        outputs = {name: gradients.get(name) for name in names}
        values.update(run_bound(self._sessions[stage], read, outputs, "step"))


def run_bound(session: Any, values: Mapping[str, Any], outputs: Mapping[str, Any], subject: str) -> dict[str, Any]:
    """Run a session of ONNX Runtime, and return its outputs, as values of ONNX Runtime.

    Args:
        session: the session.
        values: the inputs: arrays, or values of ONNX Runtime; None for one that is not fed.
        outputs: the outputs to compute, by name: the value to write one to, or None for a new one.
        subject: a name for what is run, for messages.

    Raises:
        SessionError: it could not run.
    """
    binding = session.io_binding()
    for name, value in values.items():
        if isinstance(value, np.ndarray | np.generic):
            binding.bind_cpu_input(name, np.asarray(value))
        elif value is not None:
            binding.bind_ortvalue_input(name, value)
    for name, value in outputs.items():
        if value is None:
            binding.bind_output(name, "cpu")
        else:
            binding.bind_ortvalue_output(name, value)
    with reporting(SessionError, f"the {subject} could not run", Exception):
        session.run_with_iobinding(binding)
    return dict(zip(outputs, binding.get_outputs(), strict=True))
