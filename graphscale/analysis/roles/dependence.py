"""The dependence of values on inputs, as evidence for roles."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

import onnx_ir as ir

from graphscale.analysis.topology import Topology
from graphscale.analysis.updates import (
    ByType,
    Type,
    type_of,
)
from graphscale.graph.values import is_scalar

__all__ = ["Dependence"]


class Dependence:
    """Evidence by dependence: the inputs that each value depends on, on paths without gradients and the loss.

    A number, without axes, counts only on a path of values of one element, since a learning rate is part of each next
    weight, and so reaches the norm of all weights.

    Args:
        topology: the topology of the graph.
        inputs: the inputs in question.
        cut: the values that end paths: gradients, and the loss.
    """

    def __init__(self, topology: Topology, inputs: Iterable[ir.Value], cut: Collection[ir.Value]) -> None:
        self._inputs = tuple(inputs)
        self._by_type, self._masks = ByType(self._inputs), dict[Type, int]()
        bits = {value: 1 << i for i, value in enumerate(self._inputs)}
        self._bits, self._all, self._plain = bits, bits.copy(), bits.copy()
        singles = sum(bit for value, bit in bits.items() if is_scalar(value) and not value.shape)
        numbers: set[ir.Value] = set()  # of unknown shape, but computed from one-element values alone
        for node, results, reads in topology.parts if bits else ():
            untyped = [value for value in results if value.shape is None]
            if untyped and all(is_scalar(value) or value in numbers for value in reads):
                numbers.update(untyped)
            anywhere = plain = 0
            for value in reads:
                if value in self._all and value not in cut:
                    anywhere |= self._all[value]
                    plain |= self._plain.get(value, 0)
            if not anywhere:
                continue
            if node in topology.contractions:
                plain = 0
            for value in results:
                kept = ~0 if is_scalar(value) or value in numbers else ~singles
                self._all[value] = anywhere & kept
                self._plain[value] = plain & kept

    def of(self, value: ir.Value) -> Iterator[ir.Value]:
        """Return the inputs that a value depends on."""
        return self._chosen(self._all.get(value, 0))

    def alike(self, value: ir.Value) -> Iterator[tuple[ir.Value, bool]]:
        """Yield the inputs of its type that a value depends on, and whether by a path without a contraction."""
        kind = type_of(value)
        if kind not in self._masks:
            self._masks[kind] = sum(self._bits[each] for each in self._by_type.like(value))
        for each in self._chosen(self._all.get(value, 0) & self._masks[kind]):
            yield each, self.count_ways(value, each) > 1

    def count_ways(self, value: ir.Value, source: ir.Value) -> int:
        """Return 0 for a value that does not depend on an input, 2 for a path without a contraction, else 1."""
        bit = self._bits.get(source, 0)
        return bool(self._all.get(value, 0) & bit) + bool(self._plain.get(value, 0) & bit)

    def _chosen(self, mask: int) -> Iterator[ir.Value]:
        while mask:
            yield self._inputs[(mask & -mask).bit_length() - 1]
            mask &= mask - 1
