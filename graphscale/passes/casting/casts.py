"""Casts at the borders between float32 and float16, and, to emulate float16, at every value."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

import onnx_ir as ir

from graphscale.graph.builder import Editor, behind, replace_reads
from graphscale.graph.marks import AUTOCAST, PASS_KEY, WAS_FLOAT
from graphscale.graph.values import constant_tensor, uses_of
from graphscale.operators import Colour
from graphscale.passes.casting.precision_plan import PrecisionPlan, takes_any_type
from graphscale.passes.casting.settings import default_rules

__all__ = ["CastInserter"]

# Operators that give the numbers that they get, elsewhere: whatever list a user puts them on.
_MOVES = frozenset(operator for operator, rule in default_rules().items() if rule.colour is Colour.CLEAR)
_MOST = 2**12  # elements of a constant that is rounded at once: larger ones are cast in the graph


@dataclasses.dataclass
class CastInserter:
    """Puts a plan into effect.

    Attributes:
        graph: the main graph.
        plan: the nodes that run in the small type.
        dtype: the small type.
        emulate: leave all in float32, and round every value that would be of the small type.
        weights: the shapes of gradients: a constant of such a shape may be a weight, which stays float32. None if
            some are not known.
        casts: how many casts were inserted, to the small type and back.
    """

    graph: ir.Graph
    plan: PrecisionPlan
    dtype: ir.DataType
    emulate: bool
    weights: Collection[tuple[int | str | None, ...]] | None = ()
    casts: int = 0

    def __post_init__(self) -> None:
        self._editor = Editor(self.graph)
        self._build = self._editor.builder(AUTOCAST)

    def insert(self) -> None:
        """Insert all casts, and give the values of chosen nodes their type."""
        low, sides = self.plan.low, self.plan.sides
        for value in self._read_values():
            node = value.producer()
            if node is None or node not in low or value not in sides[node].outputs:
                self._to_low(value)
            elif self.emulate:
                self._round(value, node)
            else:
                self._to_wide(value)

    def _read_values(self) -> list[ir.Value]:
        """Return the values on either side of a border, each once, in order."""
        low = self.plan.low
        sides = [sides for node, sides in self.plan.sides.items() if node in low]
        return list(dict.fromkeys(value for around in sides for value in (*around.operands, *around.outputs)))

    def _low_uses(self, value: ir.Value) -> list[ir.usage.Usage]:  # type: ignore[name-defined]
        low, sides = self.plan.low, self.plan.sides
        return [use for use in uses_of(value) if use.node in low and use.idx in sides[use.node].inputs]

    def _to_low(self, value: ir.Value) -> None:
        """Cast a float32 value once for all chosen nodes that read it."""
        uses = self._low_uses(value)
        producer = value.producer()
        if producer is not None and self._may_cast_lower(producer, value, len(uses)):
            producer.attributes["to"] = ir.AttrInt64("to", self.dtype)
            producer.metadata_props[WAS_FLOAT] = AUTOCAST
            value.type = ir.TensorType(self.dtype)
            return
        if not self.emulate and len(uses) == len(uses_of(value)) and self._make_constant_low(value):
            return
        low = self._cast(value, self.dtype, f"{value.name}.{self.dtype.name.lower()}")
        if self.emulate:
            low = self._cast(low, ir.DataType.FLOAT, f"{value.name}.rounded")
        replace_reads(value, low, uses)

    def _make_constant_low(self, value: ir.Value) -> bool:
        """Round a constant at once; return whether it was one."""
        tensor = None if value.is_graph_output() else constant_tensor(value)
        if tensor is None or self.weights is None or tensor.size > _MOST or tuple(tensor.shape) in self.weights:
            return False
        array, name, node = tensor.numpy(), value.name or "", value.producer()
        if node is not None and list(node.attributes) != ["value"]:
            return False
        low = ir.tensor(array.astype(self.dtype.numpy()), name=name)
        if node is None:
            value.const_value = low
        else:
            node.attributes["value"] = ir.AttrTensor("value", low)
        value.type = ir.TensorType(self.dtype)
        return True

    def _may_cast_lower(self, producer: ir.Node, value: ir.Value, low_uses: int) -> bool:
        """Return whether a value comes from a cast of the original that can give the small type at once."""
        if self.emulate or producer.op_type != "Cast" or PASS_KEY in producer.metadata_props:
            return False
        return low_uses == len(uses_of(value)) and not value.is_graph_output()

    def _to_wide(self, value: ir.Value) -> None:
        """Give a chosen node's result its type, and cast it back once for all other readers."""
        low, sides = self.plan.low, self.plan.sides
        others = [
            use
            for use in uses_of(value)
            if not ((use.node in low and use.idx in sides[use.node].inputs) or takes_any_type(use.node))
        ]
        is_output = value.is_graph_output()
        wide_type = value.type
        value.type = ir.TensorType(self.dtype)
        if others or is_output:
            wide = self._cast(value, ir.DataType.FLOAT, f"{value.name}.float")
            replace_reads(value, wide, others)
            if is_output:
                self._take_over(value, wide)
                wide.type = wide_type

    def _round(self, value: ir.Value, node: ir.Node) -> None:
        """Round a result, unless the operator only moves numbers that are rounded already."""
        if (node.domain, node.op_type) in _MOVES:
            return
        uses, is_output = uses_of(value), value.is_graph_output()
        low = self._cast(value, self.dtype, f"{value.name}.{self.dtype.name.lower()}")
        wide = self._cast(low, ir.DataType.FLOAT, f"{value.name}.rounded")
        replace_reads(value, wide, uses)
        if is_output:
            self._take_over(value, wide)

    def _take_over(self, old: ir.Value, new: ir.Value) -> None:
        node = old.producer()
        graph = self.graph if node is None or node.graph is None else node.graph
        if graph is self.graph:
            self._editor.take_over_output(old, new, "low")
            return
        for i, output in enumerate(graph.outputs):
            if output is old:
                graph.outputs[i] = new

    def _cast(self, value: ir.Value, to: ir.DataType, name: str) -> ir.Value:
        owner = value.graph if isinstance(value.graph, ir.Graph) else self.graph
        self.casts += 1
        return self._build.cast(value, to, name=name, at=behind(value) or ("before", owner[0]))
