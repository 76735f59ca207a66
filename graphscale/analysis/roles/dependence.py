"""Evidence by dependence: the inputs that a value depends on by other ways than the gradients and the loss."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import onnx_ir as ir

from graphscale.analysis.topology import Topology
from graphscale.graph.values import is_scalar

__all__ = ["Dependence"]


class Dependence:
    """The inputs that each value depends on.

    A number, which has no axes, counts where a path of values of one element leads to the value, since a learning rate
    is spread over each next weight, and so reaches the norm of all weights.

    Args:
        topology: of the graph.
        inputs: the inputs to look for.
        cut: the values that no path may go through: gradients, and the loss.
    """

    def __init__(self, topology: Topology, inputs: Iterable[ir.Value], cut: Collection[ir.Value]) -> None:
        self._inputs = tuple(inputs)
        bits = {value: 1 << i for i, value in enumerate(self._inputs)}
        self._all = bits.copy()
        self._plain = bits.copy()
        singles = sum(bit for value, bit in bits.items() if is_scalar(value) and not value.shape)
        numbers: set[ir.Value] = set()  # of unknown shape, but computed from one-element values alone
        for node in topology.nodes if bits else ():
            reads = topology.reads[node]
            untyped = [value for value in node.outputs if value.shape is None]
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
            for value in node.outputs:
                kept = ~0 if is_scalar(value) or value in numbers else ~singles
                self._all[value] = anywhere & kept
                self._plain[value] = plain & kept

    def of(self, value: ir.Value) -> list[ir.Value]:
        """Return the inputs that a value depends on."""
        return self._chosen(self._all.get(value, 0))

    def plain(self, value: ir.Value) -> list[ir.Value]:
        """Return the inputs that a value depends on by a path without a contraction."""
        return self._chosen(self._plain.get(value, 0))

    def contracted(self, value: ir.Value) -> list[ir.Value]:
        """Return the inputs that a value depends on by contractions alone."""
        return self._chosen(self._all.get(value, 0) & ~self._plain.get(value, 0))

    def _chosen(self, mask: int) -> list[ir.Value]:
        return [value for i, value in enumerate(self._inputs) if mask >> i & 1]
