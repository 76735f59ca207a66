"""Casts at the borders between float32 and float16, and, to emulate float16, at every value."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable

import onnx_ir as ir

from graphscale.graph.builder import Editor, behind, replace_outputs, replace_reads
from graphscale.graph.marks import AUTOCAST, PASS_KEY, WAS_FLOAT
from graphscale.graph.values import Use, constant_tensor, uses_of
from graphscale.operators import Colour
from graphscale.passes.casting.precision_plan import PrecisionPlan, takes_any_type
from graphscale.passes.casting.settings import default_rules

__all__ = ["CastInserter"]

# Operators that move numbers without changing them, on any list of a user.
_MOVES = frozenset(operator for operator, rule in default_rules().items() if rule.colour is Colour.CLEAR)
_MOST = 2**12  # limit of elements for rounding a constant at once: larger ones are cast in the graph


@dataclasses.dataclass
class CastInserter:
    """The execution of a plan.

    Attributes:
        graph: the main graph.
        plan: the nodes that run in the small type.
        dtype: the small type.
        emulate: True to leave all nodes in float32, and round the values of the small type.
        weights: the shapes of gradients: a constant of such a shape may be a weight, which stays float32. None if some
            are unknown.
        casts: number of inserted casts, to the small type and back.
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
        around = [(*own.operands, *own.outputs) for node, own in sides.items() if node in low]
        for value in dict.fromkeys(value for values in around for value in values):
            node = value.producer()
            if node is None or node not in low or value not in sides[node].outputs:
                self._to_low(value)
            elif not self.emulate:
                self._to_wide(value)
            elif (node.domain, node.op_type) not in _MOVES:  # otherwise, its numbers are already rounded
                uses = uses_of(value)
                self._replace(value, self._round(value), uses)

    def _to_low(self, value: ir.Value) -> None:
        """Cast a float32 value once for all chosen nodes that read it."""
        readers, producer = uses_of(value), value.producer()
        uses = [use for use in readers if self.plan.reads_low(*use)]
        if self.emulate:
            replace_reads(value, self._round(value), uses)
        elif len(uses) == len(readers) and producer is not None and _may_cast_lower(producer, value):
            producer.attributes["to"] = ir.AttrInt64("to", self.dtype)
            producer.metadata_props[WAS_FLOAT] = AUTOCAST
            value.type = ir.TensorType(self.dtype)
        elif len(uses) < len(readers) or not self._make_constant_low(value):
            low = self._cast(value, self.dtype, f"{value.name}.{self.dtype.name.lower()}")
            replace_reads(value, low, uses)

    def _make_constant_low(self, value: ir.Value) -> bool:
        """Round a constant at once; return whether the value is one."""
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

    def _to_wide(self, value: ir.Value) -> None:
        """Give a chosen node's result its type, and cast it back once for all other readers."""
        reads_low = self.plan.reads_low
        others = [use for use in uses_of(value) if not (reads_low(*use) or takes_any_type(use.node))]
        wide_type, is_output = value.type, value.is_graph_output()
        value.type = ir.TensorType(self.dtype)
        if others or is_output:
            wide = self._cast(value, ir.DataType.FLOAT, f"{value.name}.float")
            self._replace(value, wide, others)
            if is_output:
                wide.type = wide_type

    def _round(self, value: ir.Value) -> ir.Value:
        """Cast a value to the small type and back, and return the result."""
        low = self._cast(value, self.dtype, f"{value.name}.{self.dtype.name.lower()}")
        return self._cast(low, ir.DataType.FLOAT, f"{value.name}.rounded")

    def _replace(self, old: ir.Value, new: ir.Value, uses: Iterable[Use]) -> None:
        """Redirect readers of a result, and replace it as an output of the graph or a body."""
        if not isinstance(old.graph, ir.Graph) or old.graph is self.graph:
            self._editor.replace(old, new, uses, "low")
            return
        replace_reads(old, new, uses)
        replace_outputs(old, new)

    def _cast(self, value: ir.Value, to: ir.DataType, name: str) -> ir.Value:
        owner = value.graph if isinstance(value.graph, ir.Graph) else self.graph
        self.casts += 1
        return self._build.cast(value, to, name=name, at=behind(value) or ("before", owner[0]))


def _may_cast_lower(producer: ir.Node, value: ir.Value) -> bool:
    """Return whether a value is the result of an original cast that can give the small type at once."""
    return producer.op_type == "Cast" and PASS_KEY not in producer.metadata_props and not value.is_graph_output()
