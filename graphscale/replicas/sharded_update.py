"""The second half in shares: each replica keeps and updates its part of the state (ZeRO, stage 1).

Gradients are reduced to their owners (MPI_Reduce_scatter), each updates its part, and the weights are gathered
(MPI_Allgatherv). Moments are nowhere but at their owner.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from graphscale.errors import SessionError, SplitError, one_line
from graphscale.replicas.buckets import lay_out_shares
from graphscale.replicas.collectives import Replicas
from graphscale.replicas.first_half import Arena, Held
from graphscale.replicas.gathered import GatheredState
from graphscale.replicas.parts import cut_parts, specs_of
from graphscale.replicas.reduction import Reduction
from graphscale.replicas.shares import share_out, trust_replicas
from graphscale.replicas.splitting import Halves
from graphscale.replicas.whole import sizes_of
from graphscale.replicas.whole_update import REDUCING, SHARING
from graphscale.session.carried import check_state, first_values
from graphscale.session.loading import create
from graphscale.session.result import StepResult
from graphscale.session.session import Session

__all__ = ["ShardedUpdate"]

Arrays = dict[str, np.ndarray[Any, Any]]


class ShardedUpdate:
    """Every replica updates its share of the state; the arguments are those of `WholeUpdate`.

    Raises:
        SplitError: the update cannot be divided.
    """

    def __init__(
        self,
        replicas: Replicas,
        halves: Halves,
        nbytes: int,
        providers: Sequence[Any] | None,
        options: Any,
        state: Mapping[str, Any] | None,
    ) -> None:
        self._replicas = replicas
        graph, name, rank = halves.update.graph, "the step", replicas.rank
        if halves.stamp.telemetry:
            raise SplitError(f"{name} cannot be sharded: its telemetry looks at all gradients; scale it without")
        if (decision := halves.stamp.names.get("all_finite")) is not None:
            trust_replicas(graph, decision, name)
        gradients = {gradient.name: gradient for gradient in halves.gradients}
        self._shares = share_out(graph, gradients, halves.stamp.state, replicas.size, name)
        owners = self._shares.owners
        self.specs = specs_of(graph, halves.states, carried=True)
        by_gradient = {gradient: owners.get(gradient, 0) for gradient in gradients}
        buckets = lay_out_shares(halves.groups, by_gradient, replicas.size, nbytes)
        self.arena = Arena(halves, buckets)
        self._takes: dict[str, Any] = {}
        counts, results = [], []
        for bucket in buckets:
            sizes = [0] * replicas.size
            for segment in bucket.segments:
                sizes[by_gradient[segment.gradient]] += segment.end
            counts.append(sizes)
            results.append(np.zeros(sizes[rank], bucket.dtype.numpy()))
            self._view(halves, [s.gradient for s in bucket.segments if by_gradient[s.gradient] == rank], results[-1])
        memory = self.arena.buckets
        self.reduction = Reduction(
            replicas, buckets, lambda i: replicas.scatter_sums(memory[i], results[i], counts[i], REDUCING), results
        )
        read = sorted({value.name or "" for stage in halves.stages for value in stage.graph.inputs} & set(owners))
        self._gathered = GatheredState(replicas, {n: self.specs[n] for n in read if n in self.specs}, owners, nbytes)
        own = [n for n in self.specs if owners.get(n, rank) == rank]
        self._parts = cut_parts(halves, self._shares, rank, own)
        self._before = [create(part, None, (), {}, providers, options) for part in self._parts.before]
        bare = [n for n in own if n not in graph.initializers]
        zeros = {n: np.zeros(sizes_of(self.specs[n]), self.specs[n].dtype) for n in bare}
        self.session = Session(self._parts.last, providers, options, zeros)
        self.inputs = specs_of(graph, halves.states, carried=False)
        self.output_names = tuple(value.name or "" for value in graph.outputs)
        self._first = first_values(self.specs, graph.initializers, state or {}) if replicas.is_first else {}

    @property
    def held(self) -> Held:
        """Gathered weights, and the numbers that every replica has in its session."""
        return self._gathered.beside(self.session._carried)

    def apply(self, values: Mapping[str, Any], fetch: Sequence[str]) -> StepResult:
        """Exchange what other owners need, run this replica's share of the second half, and gather the weights."""
        known = {**values, **self._takes}
        for part, names in zip(self._before, self._shares.rounds, strict=True):
            known.update(self._run(part, known))
            known.update(self._exchange(names, known))
        known.update({source: known[name] for name, source in self._parts.given.items()})
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
        for name in sorted(self.specs):
            spec = self.specs[name]
            array = own[name] if name in own else np.empty(sizes_of(spec), spec.dtype)
            if name in self._shares.owners:
                self._replicas.broadcast(array, SHARING, self._shares.owners[name])
            found[name] = array
        return found

    def check(self, state: Mapping[str, Any], source: str) -> Arrays:
        """Return all state as arrays that fit.

        Raises:
            SessionError: one is missing, unknown, or does not fit.
        """
        return check_state(self.specs, state, source)

    def write(self, state: Arrays) -> None:
        """Give the state of rank 0 to all; each keeps its share and the weights."""
        self._first, own = {}, {}
        for name in sorted(self.specs):
            spec = self.specs[name]
            array = state.get(name)
            array = np.empty(sizes_of(spec), spec.dtype) if array is None else np.array(array, order="C")
            self._replicas.broadcast(array, SHARING)
            if name in self.session._carried.specs:
                own[name] = array
            self._gathered.set(name, array)
        self.session.load_state_dict(own)

    def _view(self, halves: Halves, names: Sequence[str], memory: np.ndarray[Any, Any]) -> None:
        """Let the gradients of this replica be read where their sums arrive."""
        import onnxruntime as ort

        gradients, begin = {gradient.name: gradient for gradient in halves.gradients}, 0
        for name in names:
            gradient = gradients[name]
            part = memory[begin : begin + gradient.elements].reshape(gradient.shape)
            self._takes[name] = ort.OrtValue.ortvalue_from_numpy(part)
            begin += gradient.elements

    def _run(self, part: Any, known: Mapping[str, Any]) -> dict[str, Any]:
        binding, carried = part.io_binding(), self.session._carried
        for value in (*part.get_inputs(), *part.get_overridable_initializers()):
            found = carried.buffer(value.name) if value.name in carried.specs else known.get(value.name)
            if isinstance(found, np.ndarray | np.generic):
                binding.bind_cpu_input(value.name, np.asarray(found))
            elif found is not None:
                binding.bind_ortvalue_input(value.name, found)
        names = [output.name for output in part.get_outputs()]
        for name in names:
            binding.bind_output(name, "cpu")
        try:
            part.run_with_iobinding(binding)
        except Exception as error:  # ORT's exceptions share no public base class
            raise SessionError(f"the update could not run: {one_line(error)}") from error
        return dict(zip(names, binding.get_outputs(), strict=True))

    def _exchange(self, names: Mapping[str, int], known: Mapping[str, Any]) -> Arrays:
        """Return the numbers of a round, each from its owner: the others add zero."""
        numbers = np.zeros(len(names), np.float64)
        for i, (name, rank) in enumerate(names.items()):
            if rank == self._replicas.rank:
                numbers[i] = known[name].numpy().item()
        numbers = self._replicas.sums(numbers, "the exchange of what the shares of an update have in common")
        specs = self._parts.numbers
        return {
            name: np.full(sizes_of(specs[name]), number).astype(specs[name].dtype)
            for name, number in zip(names, numbers, strict=True)
        }
