"""The second half in shares: each replica keeps and updates its part of the state (ZeRO, stage 1).

Gradients are reduced to their owners (MPI_Reduce_scatter), each updates its part, and the weights are gathered
(MPI_Allgatherv) in few messages. Only the owner of a moment has it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from graphscale.errors import SplitError
from graphscale.files.tensor_files import Arrays
from graphscale.policy.names import ScaledValue
from graphscale.replicas.buckets import Arena, fill_messages, lay_out_shares
from graphscale.replicas.collectives import Replicas
from graphscale.replicas.half_sessions import REDUCING, SHARING, ReplicaSetup, WholeUpdate, run_bound, sizes_of
from graphscale.replicas.reduction import Reduction
from graphscale.replicas.shares import cut_parts, share_out, specs_of, trust_replicas
from graphscale.session.carried import CarriedState, first_values
from graphscale.session.interface import InputSpec
from graphscale.session.loading import create
from graphscale.session.result import StepResult
from graphscale.session.session import Session

__all__ = ["ShardedUpdate"]

_ALIGNED = 64  # bytes


class ShardedUpdate(WholeUpdate):
    """An update of each replica's share of the state.

    Raises:
        SplitError: the update cannot be divided.
    """

    def __init__(self, setup: ReplicaSetup) -> None:
        replicas, halves, state = setup.replicas, setup.halves, setup.state
        self._replicas = replicas
        graph, name, rank = halves.update.graph, "the step", replicas.rank
        if halves.stamp.telemetry:
            raise SplitError(f"{name} cannot be sharded: its telemetry reads all gradients; scale it without")
        if (decision := halves.stamp.names.get(ScaledValue.ALL_FINITE)) is not None:
            trust_replicas(graph, decision, name)
        gradients = {gradient.name: gradient for gradient in halves.gradients}
        self._shares = share_out(graph, gradients, halves.stamp.state, replicas.size, name)
        owners = self._shares.owners
        self.specs = specs_of(graph, halves.stamp.carried, carried=True)
        by_gradient = {gradient: owners.get(gradient, 0) for gradient in gradients}
        buckets = lay_out_shares(halves.groups, by_gradient, replicas.size, setup.nbytes)
        self.arena = Arena(halves.gradients, buckets)
        self._takes: dict[str, Any] = {}
        counts: list[list[int]] = []
        results = []
        for bucket in buckets:
            sizes = [0] * replicas.size
            for segment in bucket.segments:
                sizes[by_gradient[segment.gradient]] += segment.end
            counts.append(sizes)
            rest = np.zeros(sizes[rank], bucket.dtype.numpy())
            results.append(rest)
            for segment in bucket.segments:
                if by_gradient[segment.gradient] == rank:
                    # The update reads this replica's gradients in the memory of their sums.
                    self._takes[segment.gradient] = gradients[segment.gradient].place(rest)
                    rest = rest[segment.end :]
        memory = self.arena.buckets
        self.reduction = Reduction(
            replicas, buckets, lambda i: replicas.scatter_sums(memory[i], results[i], counts[i], REDUCING), results
        )
        read = {value.name or "" for stage in halves.stages for value in stage.graph.inputs} & set(owners)
        gathered = {n: self.specs[n] for n in sorted(read & set(self.specs))}
        self._gathered = GatheredState(replicas, gathered, owners, setup.nbytes)
        own = [n for n in self.specs if owners.get(n, rank) == rank]
        (*before, last), self._given, self._numbers = cut_parts(halves, self._shares, rank, own)
        self._before = [create(part, None, (), {}, setup.providers, setup.options) for part in before]
        bare = [n for n in own if n not in graph.initializers]
        zeros = {n: np.zeros(sizes_of(self.specs[n]), self.specs[n].dtype) for n in bare}
        self.session = Session(last, setup.providers, setup.options, zeros)
        self.inputs = specs_of(graph, halves.stamp.carried, carried=False)
        self.output_names = tuple(value.name or "" for value in graph.outputs)
        self._first = (
            first_values(self.specs, graph.initializers, state or {}, halves.stamp) if replicas.is_first else {}
        )

    def buffer(self, name: str) -> Any:
        """Return the value of ONNX Runtime with a state: a gathered one, or one of this replica's session."""
        return self._gathered.values.get(name) or super().buffer(name)

    def apply(self, values: Mapping[str, Any], fetch: Sequence[str]) -> StepResult:
        """Exchange numbers for other owners, run this replica's share of the second half, and gather the weights."""
        known = {**values, **self._takes}
        for part, names in zip(self._before, self._shares.rounds, strict=True):
            known.update(self._run(part, known))
            known.update(self._exchange(names, known))
        known.update({source: known[name] for name, source in self._given.items()})
        feeds = {name: known[name] for name in self.session.inputs if name in known}
        outputs = self.session.output_names
        result = self.session.step(feeds, fetch=[name for name in fetch if name in outputs])
        result.update({name: np.asarray(known[name]) for name in fetch if name not in result})
        if result.applied:
            self._gathered.gather(self.session._carried)
        return result

    def initial(self) -> Arrays:
        """Return the first state, on rank 0."""
        return self._first

    def read(self) -> Arrays:
        """Return all state, each from its owner."""
        own, found = self.session.state_dict(), {}
        for name, spec in sorted(self.specs.items()):
            array = own[name] if name in own else np.empty(sizes_of(spec), spec.dtype)
            if name in self._shares.owners:
                self._replicas.broadcast(array, SHARING, self._shares.owners[name])
            found[name] = array
        return found

    def write(self, state: Arrays) -> None:
        """Send the state of rank 0 to all; each keeps its share and the weights."""
        self._first, own = {}, {}
        for name, array in self._broadcast(state):
            if name in self.session._carried.specs:
                own[name] = array
            self._gathered.set(name, array)
        self.session.load_state_dict(own)

    def _run(self, part: Any, known: Mapping[str, Any]) -> dict[str, Any]:
        names = [value.name for value in (*part.get_inputs(), *part.get_overridable_initializers())]
        held = super().buffer
        values = {name: held(name) or known.get(name) for name in names}
        return run_bound(part, values, dict.fromkeys(output.name for output in part.get_outputs()), "update")

    def _exchange(self, names: Mapping[str, int], known: Mapping[str, Any]) -> Arrays:
        """Return the numbers of a round, each from its owner, to which the others add zero."""
        own = [known[name].numpy().item() if rank == self._replicas.rank else 0.0 for name, rank in names.items()]
        what = "the exchange of what the shares of an update have in common"
        numbers = self._replicas.sums(np.asarray(own, np.float64), what)
        specs = (self._numbers[name] for name in names)
        return {
            name: np.full(sizes_of(spec), number).astype(spec.dtype)
            for name, spec, number in zip(names, specs, numbers, strict=True)
        }


class GatheredState:
    """State that owners update and all replicas read. All shapes are known.

    A message has at most `nbytes`, if the tensors allow it.

    Attributes:
        values: the values of ONNX Runtime with the state, by name.
    """

    def __init__(
        self, replicas: Replicas, specs: Mapping[str, InputSpec], owners: Mapping[str, int], nbytes: int
    ) -> None:
        import onnxruntime as ort

        self._replicas = replicas
        self._own = [name for name in specs if owners[name] == replicas.rank]
        self._views: Arrays = {}
        self._messages: list[tuple[np.ndarray[Any, Any], list[int]]] = []
        sizes = {name: _aligned_size(spec) for name, spec in specs.items()}
        waiting = [[name for name in sorted(specs) if owners[name] == rank] for rank in range(replicas.size)]
        for message in fill_messages(waiting, sizes.__getitem__, nbytes):
            counts = [sum(map(sizes.__getitem__, names)) for names in message]
            memory, begin = np.zeros(sum(counts), np.uint8), 0
            self._messages.append((memory, counts))
            for name in itertools.chain(*message):
                self._views[name] = np.ndarray(sizes_of(specs[name]), specs[name].dtype, memory, begin)
                begin += sizes[name]
        self.values = {name: ort.OrtValue.ortvalue_from_numpy(view) for name, view in self._views.items()}

    def set(self, name: str, array: np.ndarray[Any, Any]) -> None:
        """Store a value, if it is gathered here."""
        if name in self._views:
            self._views[name][...] = array

    def gather(self, carried: CarriedState) -> None:
        """Copy the state that this replica has updated, and send it to all."""
        for name in self._own:
            self._views[name][...] = carried.buffer(name).numpy()
        what = "the gathering of the weights"
        for wait in [self._replicas.gather_shares(memory, counts, what) for memory, counts in self._messages]:
            wait()


def _aligned_size(spec: InputSpec) -> int:
    nbytes = math.prod(sizes_of(spec)) * spec.dtype.itemsize
    return -(-nbytes // _ALIGNED) * _ALIGNED
