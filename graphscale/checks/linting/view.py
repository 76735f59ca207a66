"""A view of a graph: its nodes in order, their operands, types and flags; weights are never read."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Mapping

import onnx_ir as ir

from graphscale.analysis.scales import sources_of
from graphscale.flow.scale_effects import Numbers
from graphscale.flow.support import reach
from graphscale.graph.order import check_order
from graphscale.graph.types import dtypes_of
from graphscale.graph.values import operands_of, own_dtype, values_by_name
from graphscale.graph.walks import ancestors

__all__ = ["View"]


class View:
    """The main graph of a model.

    Attributes:
        graph: the main graph.
        nodes: its nodes in order.
        positions: the index of each node.
        operands: returns a node's inputs, and the values that its subgraphs capture.
        numbers: finds the values computed from some numbers.
        dtypes: the known dtypes of values.
        flags: the bool values.

    Raises:
        ModelFileError: an operand of a node is never computed, or later.
    """

    def __init__(self, model: ir.Model, name: str) -> None:
        self.graph, self.nodes = model.graph, tuple(model.graph)
        self.positions = {node: i for i, node in enumerate(self.nodes)}
        self.operands = functools.cache(operands_of)
        check_order(self.graph, name, self.operands)
        self.values = values_by_name(self.graph)
        known = (*dtypes_of(self.nodes).items(), *((value, own_dtype(value)) for value in sources_of(self.graph)))
        self.dtypes: dict[ir.Value | None, ir.DataType] = {v: dtype for v, dtype in known if dtype is not None}
        self.flags = frozenset(v for v, dtype in self.dtypes.items() if v is not None and dtype is ir.DataType.BOOL)
        self.numbers = functools.cache(lambda numbers: Numbers(self.graph, numbers, self.flags.__contains__))

    def is_logic(self, value: ir.Value) -> bool:
        """Return whether a value is a flag, or a number computed from flags alone."""
        return value in self.flags or value in self.counts

    def exempt(self, nexts: Mapping[ir.Value, ir.Value]) -> set[ir.Value]:
        """Return the outputs that may carry the scale: its next values, and one with the name of the scaled loss."""
        return {v for v in self.graph.outputs if v.name and v.name.startswith("scaled_loss")} | {*nexts.values()}

    @functools.cached_property
    def counts(self) -> set[ir.Value]:
        """The numbers computed from flags and constants alone."""
        return self.numbers(frozenset()).counts - self.flags

    def descendants(self, values: Iterable[ir.Value], stop: Collection[ir.Value] = ()) -> set[ir.Value]:
        """Return some values, and those that depend on them; without `stop`, and the paths through it."""
        return reach(self.nodes, values, stop)

    def ancestors(self, values: Iterable[ir.Value], stop: Callable[[ir.Value], bool] | None = None) -> set[ir.Value]:
        """Return some values and their ancestors, up to values where to `stop`."""
        return ancestors(values, stop=stop, operands=self.operands)
