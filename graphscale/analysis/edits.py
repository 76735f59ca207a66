"""A plan of edits: the places where the scale enters and comes out, and the resulting degrees."""

from __future__ import annotations

import dataclasses

import onnx_ir as ir

from graphscale.analysis.degrees import Conflict, Degree, Degrees
from graphscale.graph.values import Use, node_name

__all__ = ["Place", "Plan", "Unscaling"]


@dataclasses.dataclass(frozen=True)
class Place:
    """A place where the loss scale enters.

    Attributes:
        value: the value that is multiplied by the loss scale.
        edge: None if all readers get the product; else the only `(node, input index)` with the product.
    """

    value: ir.Value
    edge: Use | None = None

    def __str__(self) -> str:
        if self.edge is None:
            return f"value {self.value.name!r}"
        return f"{self.value.name!r} at {node_name(self.edge.node)}:{self.edge.idx}"


@dataclasses.dataclass
class Unscaling:
    """A place where the loss scale comes out: a value that is divided by it.

    Attributes:
        value: the scaled value, a gradient times the loss scale.
        everywhere: whether all readers, and the graph output if it is one, get the quotient.
        edges: otherwise, the readers of the quotient.
        output: otherwise, whether the graph output is the quotient.
        reason: the conflict that made the unscaling necessary, for messages.
        wholes: gradients with the value as a part: sums with weight decay, for example.
    """

    value: ir.Value
    everywhere: bool = False
    edges: set[Use] = dataclasses.field(default_factory=set)
    output: bool = False
    reason: Conflict | None = None
    wholes: set[ir.Value] = dataclasses.field(default_factory=set)

    def covers(self, use: tuple[ir.Node, int]) -> bool:
        """Return whether this reader gets the quotient."""
        return self.everywhere or use in self.edges

    def merge(self, other: Unscaling) -> None:
        """Give this unscaling the readers of another unscaling of the value."""
        self.everywhere, self.output = self.everywhere or other.everywhere, self.output or other.output
        self.edges |= other.edges
        self.wholes |= other.wholes
        self.reason = self.reason or other.reason


class Plan(Degrees):
    """The edits found so far, and every value's degree under them.

    `values` holds the degree of each value at its producer, with a scale that enters at the value; `edge` also knows
    the edits of single edges.
    """

    def __init__(self) -> None:
        super().__init__()
        self.scaled_values: set[ir.Value] = set()
        self.scaled_edges: dict[Use, ir.Value] = {}
        self.unscaled: dict[ir.Value, Unscaling] = {}

    @property
    def places(self) -> list[Place]:
        """The places where the scale enters."""
        values = [Place(value) for value in self.scaled_values]
        return values + [Place(value, edge) for edge, value in self.scaled_edges.items()]

    def add(self, place: Place) -> None:
        """Add a place where the scale enters."""
        if place.edge is None:
            self.scaled_values.add(place.value)
        else:
            self.scaled_edges[place.edge] = place.value

    def unscale(self, value: ir.Value) -> Unscaling:
        """Return the unscaling of a value, created if it is new."""
        return self.unscaled.setdefault(value, Unscaling(value))

    def adopt(self, value: ir.Value, degree: Degree) -> None:
        """Record the degree of a value inside a subgraph, with the scale if it enters there."""
        self.values[value] = degree + 1 if degree is not None and value in self.scaled_values else degree

    def edge(self, node: ir.Node, index: int) -> Degree:
        """Return the degree with which a node reads its input, with the plan's edits of that edge."""
        value = node.inputs[index]
        if value is None:
            return 0
        degree = self.values.get(value, 0)
        if (node, index) in self.scaled_edges:
            return None if degree is None else degree + 1
        unscaled = self.unscaled.get(value)
        if unscaled is not None and degree is not None and unscaled.covers((node, index)):
            return 0
        return degree

    def edges(self, node: ir.Node) -> dict[int, Degree]:
        """Return the degrees with which a node reads its inputs, with the plan's edits of these edges."""
        values, unscaled, scaled = self.values, self.unscaled, self.scaled_edges
        degrees: dict[int, Degree] = {}
        for i, value in enumerate(node.inputs):
            if value is not None:
                touched = value in unscaled or (scaled and (node, i) in scaled)
                degrees[i] = self.edge(node, i) if touched else values.get(value, 0)
        return degrees

    def output(self, value: ir.Value) -> Degree:
        """Return the degree with which a value leaves the graph."""
        unscaled = self.unscaled.get(value)
        if unscaled is not None and (unscaled.everywhere or unscaled.output):
            return 0
        return self.values.get(value, 0)
