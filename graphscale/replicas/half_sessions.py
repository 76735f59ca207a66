"""The halves of a step in sessions of a replica, with gradients in one memory for writing, reduction and reading."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from graphscale.errors import SessionError, reporting
from graphscale.files.tensor_files import Arrays
from graphscale.replicas.buckets import Arena, lay_out
from graphscale.replicas.collectives import Replicas
from graphscale.replicas.reduction import Reduction
from graphscale.replicas.splitting import Halves
from graphscale.session.interface import InputSpec, bindable, read_specs
from graphscale.session.loading import create
from graphscale.session.result import StepResult
from graphscale.session.session import Session

__all__ = ["REDUCING", "SHARING", "FirstHalf", "ReplicaSetup", "WholeUpdate", "run_bound", "sizes_of"]

REDUCING = "the reduction of gradients"
SHARING = "the broadcast of the state"


@dataclasses.dataclass(frozen=True)
class ReplicaSetup:
    """The step of a replica, and the settings of its sessions.

    Attributes:
        replicas: the processes.
        halves: the step.
        nbytes: the largest size of a message in bytes.
        providers, options: as for `Session`.
        state: first values, on rank 0.
    """

    replicas: Replicas
    halves: Halves
    nbytes: int
    providers: Sequence[Any] | None
    options: Any
    state: Mapping[str, Any] | None

    def first_state(self) -> Mapping[str, Any]:
        """Return the first state: the given one on rank 0; elsewhere zeros, until rank 0 has sent the state."""
        if self.replicas.is_first or self.state is not None:
            return self.state or {}
        graph, carried, found = self.halves.update.graph, self.halves.stamp.carried, {}
        for value in graph.inputs:
            if value.name not in carried or value.name in graph.initializers:
                continue
            if value.shape is None or not value.shape.is_static() or value.dtype is None:
                raise SessionError(
                    f"the shape of the state {value.name!r} is not in the step: give its first value here, too"
                )
            found[value.name or ""] = np.zeros(value.shape.numpy(), value.dtype.numpy())
        return found


class WholeUpdate:
    """An update of all state on every replica, from the mean of all gradients: the next state is the same on all.

    Attributes:
        arena: the memory of the gradients.
        reduction: the reduction to the gradients of this replica.
        session: the session of the second half, or of this replica's share.
        inputs: the inputs of the second half, by name.
        output_names: names of the outputs of the second half.
        specs: all carried state, by name.
    """

    def __init__(self, setup: ReplicaSetup) -> None:
        self._replicas, halves = setup.replicas, setup.halves
        buckets = lay_out(halves.groups, setup.nbytes)
        self.arena = Arena(halves.gradients, buckets)
        memory = self.arena.buckets
        self.reduction = Reduction(
            setup.replicas, buckets, lambda i: setup.replicas.sum_in_place(memory[i], REDUCING), memory
        )
        self.session = Session(halves.update, setup.providers, setup.options, setup.first_state())
        self.inputs, self.output_names = self.session.inputs, self.session.output_names
        self.specs = self.session._carried.specs

    def buffer(self, name: str) -> Any:
        """Return the value of ONNX Runtime with carried state; None for a name that is not carried here."""
        carried = self.session._carried
        return carried.buffer(name) if name in carried.specs else None

    def apply(self, values: Mapping[str, Any], fetch: Sequence[str]) -> StepResult:
        """Run the second half."""
        return self.session.step({**values, **self.arena.gradients}, fetch=fetch)

    def initial(self) -> Arrays:
        """Return the first state."""
        return self.session.state_dict()

    def read(self) -> Arrays:
        """Return all state."""
        return self.session.state_dict()

    def write(self, state: Arrays) -> None:
        """Send the state of rank 0 to all."""
        self.session.load_state_dict(dict(self._broadcast(state)))

    def _broadcast(self, state: Arrays) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
        """Yield the state of rank 0, each name with its array."""
        for name, spec in sorted(self.specs.items()):
            is_given = self._replicas.is_first and name in state
            array = np.array(state[name], order="C") if is_given else np.empty(sizes_of(spec), spec.dtype)
            if self._replicas.size > 1:
                self._replicas.broadcast(array, SHARING)
            yield name, array


class FirstHalf:
    """The sessions of ONNX Runtime that compute the gradients, one for each stage.

    Args:
        setup: the step of this replica.
        update: its second half, with the memory of gradients and the carried state.

    Attributes:
        inputs: its inputs.
    """

    def __init__(self, setup: ReplicaSetup, update: WholeUpdate) -> None:
        halves = setup.halves
        self._arena, self._buffer = update.arena, update.buffer
        self._sessions = [create(model, None, (), {}, setup.providers, setup.options) for model in halves.stages]
        reads = [read_specs(each.get_inputs(), each.get_overridable_initializers()) for each in self._sessions]
        self._reads = [list(specs) for specs in reads]
        self._gives = [[output.name for output in each.get_outputs()] for each in self._sessions]
        made = {*update.specs, *itertools.chain(*self._gives)}
        self.inputs = {name: spec for specs in reads for name, spec in specs.items() if name not in made}
        handed_on = {*halves.cut.average, *halves.cut.local}
        self._needed = [handed_on.union(*self._reads[stage + 1 :]) for stage in range(len(self._sessions))]

    def check(self, feeds: Mapping[str, Any]) -> dict[str, Any]:
        """Return the feeds of the first half in a form that ONNX Runtime accepts.

        Raises:
            SessionError: a feed does not fit.
        """
        return {name: bindable(name, feeds[name], spec) for name, spec in self.inputs.items() if name in feeds}

    def run(self, stage: int, values: dict[str, Any], fetch: Sequence[str]) -> None:
        """Run a stage, which writes its gradients into the arena.

        Args:
            stage: its number, from 0.
            values: the feeds, and the results of earlier stages; results of this stage are added, as values of ONNX
                Runtime.
            fetch: the names of outputs to return.

        Raises:
            SessionError: the run failed.
        """
        read = {name: self._buffer(name) or values.get(name) for name in self._reads[stage]}
        gradients, needed = self._arena.gradients, self._needed[stage]
        names = [name for name in self._gives[stage] if name in gradients or name in needed or name in fetch]
        outputs = {name: gradients.get(name) for name in names}
        values.update(run_bound(self._sessions[stage], read, outputs, "step"))


def run_bound(session: Any, values: Mapping[str, Any], outputs: Mapping[str, Any], subject: str) -> dict[str, Any]:
    """Run a session of ONNX Runtime, and return its outputs as values of ONNX Runtime.

    Args:
        session: the session.
        values: the inputs: arrays, or values of ONNX Runtime; None for an input without a feed.
        outputs: the outputs to compute, by name: a value to write to, or None for a new one.
        subject: a name of the run for messages.

    Raises:
        SessionError: the run failed.
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


def sizes_of(spec: InputSpec) -> list[int]:
    """Return the known shape of a value."""
    return [axis for axis in spec.shape if isinstance(axis, int)]
