"""A view of a graph: its nodes in order, their operands, small tensors; weights are never read."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Collection, Iterable

import onnx_ir as ir

from graphscale.analysis.scales import sources_of
from graphscale.flow.interpreter import Flow
from graphscale.flow.scale_effects import Numbers
from graphscale.flow.support import reach as depend
from graphscale.flow.survival import Effect, SurvivalDomain
from graphscale.graph.order import check_order
from graphscale.graph.types import dtypes_of
from graphscale.graph.values import inputs_of, operands_of, reads_shape, values_by_name
from graphscale.graph.walks import ancestors, reach

__all__ = ["View", "nearest_above"]

# Values from a condition up to the number that decides it.
_NEAR = 50


class View:
    """The main graph of a model.

    Attributes:
        graph: the main graph.
        nodes: its nodes in order.
        numbers: finds the values computed from some numbers.
        nearest_above: see the function of this name.

    Raises:
        ModelFileError: an operand of a node is never computed, or later.
    """

    def __init__(self, model: ir.Model, name: str) -> None:
        self.graph = model.graph
        self.nodes = tuple(self.graph)
        self.numbers = functools.cache(self._find_numbers)
        self.nearest_above = functools.cache(nearest_above)
        self._operands = {node: operands_of(node) for node in self.nodes}
        check_order(self.graph, name, self.operands)

    def operands(self, node: ir.Node) -> tuple[ir.Value, ...]:
        """Return a node's inputs, and the values that its subgraphs capture."""
        return self._operands[node]

    @functools.cached_property
    def positions(self) -> dict[ir.Node, int]:
        """The index of each node."""
        return {node: i for i, node in enumerate(self.nodes)}

    @functools.cached_property
    def survival(self) -> Flow[Effect]:
        """An interpretation of single nodes, which knows the layout of their bodies."""
        return Flow(SurvivalDomain())

    @functools.cached_property
    def flags(self) -> frozenset[ir.Value]:
        """The bool values."""
        return frozenset(value for value, dtype in self.dtypes.items() if dtype is ir.DataType.BOOL)

    @functools.cached_property
    def counts(self) -> set[ir.Value]:
        """The numbers computed from flags and constants alone."""
        return self.numbers(frozenset()).counts - self.flags

    @functools.cached_property
    def logic(self) -> frozenset[ir.Value]:
        """The flags, and the numbers computed from flags alone."""
        return self.flags | self.counts

    def _find_numbers(self, numbers: frozenset[ir.Value]) -> Numbers:
        return Numbers(self.graph, numbers, self.flags.__contains__)

    @functools.cached_property
    def values(self) -> dict[str, ir.Value]:
        """The values by name."""
        return values_by_name(self.graph)

    def descendants(self, values: Iterable[ir.Value], stop: Collection[ir.Value] = ()) -> set[ir.Value]:
        """Return some values, and those that depend on them; without `stop`, and the paths through it."""
        return depend(self.nodes, values, stop)

    def ancestors(self, values: Iterable[ir.Value], stop: Callable[[ir.Value], bool] | None = None) -> set[ir.Value]:
        """Return some values and their ancestors, up to values where to `stop`."""
        return ancestors(values, stop=stop, operands=self.operands)

    @functools.cached_property
    def dtypes(self) -> dict[ir.Value, ir.DataType]:
        """The known dtypes of values."""
        found = dtypes_of(self.nodes)
        for value in sources_of(self.graph):
            dtype = value.dtype or (None if value.const_value is None else value.const_value.dtype)
            if dtype is not None:
                found[value] = dtype
        return found


def nearest_above(value: ir.Value) -> frozenset[ir.Value]:
    """Return a value, and the nearest values above it: those that may decide a condition."""

    def operands(each: ir.Value) -> Iterable[ir.Value]:
        node = each.producer()
        return () if node is None or reads_shape(node) else inputs_of(node)

    return frozenset(itertools.islice(reach([value], operands), _NEAR))
