"""Weights that every replica reads and one of them updates: gathered after each step, in few messages."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from graphscale.replicas.collectives import Replicas
from graphscale.replicas.whole import sizes_of
from graphscale.session.carried import CarriedState
from graphscale.session.interface import InputSpec

__all__ = ["Beside", "GatheredState"]

Array = np.ndarray[Any, Any]

_ALIGNED = 64  # bytes


class GatheredState:
    """State that its owners update and all replicas read.

    Args:
        replicas: the processes.
        specs: what it is; the shapes are known.
        owners: the owner of each.
        nbytes: what a message holds at most, where the tensors allow it.
    """

    def __init__(
        self, replicas: Replicas, specs: Mapping[str, InputSpec], owners: Mapping[str, int], nbytes: int
    ) -> None:
        import onnxruntime as ort

        self._replicas, self.specs = replicas, dict(specs)
        self._own = [name for name in specs if owners[name] == replicas.rank]
        self._views: dict[str, Array] = {}
        self._messages: list[tuple[Array, list[int]]] = []
        waiting = [[name for name in sorted(specs) if owners[name] == rank] for rank in range(replicas.size)]
        while any(waiting):
            counts: list[int] = []
            taken: list[tuple[str, int]] = []
            for queue in waiting:
                begin = sum(counts)
                room = at = 0
                while queue and (not room or room + _size(specs[queue[0]]) <= nbytes // replicas.size):
                    taken.append((queue[0], begin + at))
                    room += _size(specs[queue[0]])
                    at += _size(specs[queue.pop(0)])
                counts.append(at)
            memory = np.zeros(sum(counts), np.uint8)
            self._messages.append((memory, counts))
            for name, begin in taken:
                self._views[name] = _view(memory, begin, specs[name])
        self._values = {name: ort.OrtValue.ortvalue_from_numpy(view) for name, view in self._views.items()}

    def beside(self, carried: CarriedState) -> Beside:
        """Return this state together with a session's carried state."""
        return Beside(self.specs, self._values, carried)

    def set(self, name: str, array: Array) -> None:
        """Put a value in its place, if this holds it."""
        if name in self._views:
            self._views[name][...] = array

    def gather(self, carried: CarriedState) -> None:
        """Take over what this replica has updated, and give it to all."""
        for name in self._own:
            self._views[name][...] = carried.buffer(name).numpy()
        what = "the gathering of the weights"
        requests = [self._replicas.gather_shares(memory, counts, what) for memory, counts in self._messages]
        for request in requests:
            request.wait()


class Beside:
    """Gathered state, and what a session carries."""

    def __init__(self, specs: Mapping[str, InputSpec], values: Mapping[str, Any], carried: CarriedState) -> None:
        self._values, self._carried = values, carried
        self.specs = {**carried.specs, **specs}

    def buffer(self, name: str) -> Any:
        """Return the value of ONNX Runtime that holds the present value."""
        return self._values[name] if name in self._values else self._carried.buffer(name)


def _size(spec: InputSpec) -> int:
    nbytes = math.prod(sizes_of(spec)) * spec.dtype.itemsize
    return -(-nbytes // _ALIGNED) * _ALIGNED


def _view(memory: Array, begin: int, spec: InputSpec) -> Array:
    nbytes = math.prod(sizes_of(spec)) * spec.dtype.itemsize
    return memory[begin : begin + nbytes].view(spec.dtype).reshape(sizes_of(spec))
