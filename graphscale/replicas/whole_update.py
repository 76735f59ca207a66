"""The second half on each replica as a whole: reduced gradients in, the same next state everywhere."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from graphscale.errors import SessionError
from graphscale.files.tensor_files import Arrays
from graphscale.replicas.buckets import Arena, lay_out
from graphscale.replicas.collectives import Replicas
from graphscale.replicas.reduction import Reduction
from graphscale.replicas.splitting import Halves
from graphscale.session.interface import InputSpec
from graphscale.session.result import StepResult
from graphscale.session.session import Session

__all__ = ["REDUCING", "SHARING", "ReplicaSetup", "WholeUpdate", "sizes_of"]

REDUCING = "the reduction of gradients"
SHARING = "the broadcast of the state"


@dataclasses.dataclass(frozen=True)
class ReplicaSetup:
    """The step of a replica, and how its sessions run it.

    Attributes:
        replicas: the processes.
        halves: the step.
        nbytes: what a message holds at most.
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
        """Return the first state: on rank 0 the one given; elsewhere zeros, until rank 0 has sent it."""
        if self.replicas.is_first or self.state is not None:
            return self.state or {}
        graph, found = self.halves.update.graph, {}
        for value in graph.inputs:
            if value.name not in self.halves.stamp.carried or value.name in graph.initializers:
                continue
            if value.shape is None or not value.shape.is_static() or value.dtype is None:
                raise SessionError(
                    f"the shape of the state {value.name!r} is not in the step: give its first value here, too"
                )
            found[value.name or ""] = np.zeros(value.shape.numpy(), value.dtype.numpy())
        return found


class WholeUpdate:
    """Every replica updates all state, from the mean of all gradients.

    Attributes:
        arena: the memory of the gradients.
        reduction: of the gradients to those that this replica takes.
        session: runs the second half, or this replica's share of it.
        inputs: what the second half takes, by name.
        output_names: what the second half gives.
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
        """Return the value of ONNX Runtime that holds carried state; None for what is not carried here."""
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
        """Give the state of rank 0 to all."""
        self.session.load_state_dict(dict(self._broadcast(state)))

    def _broadcast(self, state: Arrays) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
        """Yield the state that rank 0 gives, each name with its array."""
        for name, spec in sorted(self.specs.items()):
            is_given = self._replicas.is_first and name in state
            array = np.array(state[name], order="C") if is_given else np.empty(sizes_of(spec), spec.dtype)
            if self._replicas.size > 1:
                self._replicas.broadcast(array, SHARING)
            yield name, array


def sizes_of(spec: InputSpec) -> list[int]:
    """Return the shape of a value whose shape is known."""
    return [axis for axis in spec.shape if isinstance(axis, int)]
