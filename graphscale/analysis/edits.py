"""A plan of edits: the places where the scale enters and comes out, and the resulting degrees."""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Iterable, Mapping, Sequence, Set

import onnx_ir as ir

from graphscale.analysis.loss import is_number
from graphscale.analysis.topology import Topology
from graphscale.errors import UnsupportedModelError
from graphscale.flow.degree import ZERO, Conflict, Degree, DegreeDomain, Element, degree_of
from graphscale.flow.interpreter import Flow
from graphscale.graph.values import Use, constant_number, is_float, is_scalar, is_tensor, node_name, operand_at
from graphscale.operators import Kind, Rule, Trait, has_trait, may_bend, rule_of

__all__ = ["Place", "Plan", "Unscaling", "find_end", "find_explained", "find_tensor"]


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


class Plan(DegreeDomain):
    """The edits found so far, and every value's degree under them.

    A plan allows the degrees 0 and 1 alone. A sign or a comparison of gradients has degree 0, but its effects depend on
    finite gradients; so they are unscaled, and checked, as for a non-linear use.

    Attributes:
        flow: the degree of each value at its producer, with a scale that enters at the value.
        scaled_values: the values where the scale enters.
        scaled_edges: the edges where it enters, each with its value.
        unscaled: the values that are divided by the scale.
    """

    def __init__(self) -> None:
        super().__init__()
        self.flow: Flow[Element] = Flow(self)
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

    def evaluate(self, node: ir.Node) -> Sequence[Degree] | Conflict:
        """Return the degrees of a node's outputs under the edits, or the first conflict in the node or its bodies."""
        self.conflicts.clear()
        result = self.flow.evaluate(node)
        conflict = next(iter(self.conflicts.values()), None)
        if conflict is None:
            return [degree_of(element) for element in result]
        if conflict.operands:
            return conflict
        # Branches or rounds that disagree: the scaled operands of the node around them.
        inner = conflict.node
        scaled = tuple(i for i in range(len(inner.inputs)) if self.edge(inner, i) not in (0, ZERO))
        return dataclasses.replace(conflict, operands=scaled)

    def degree(self, value: ir.Value) -> Degree:
        """Return the degree of a value at its producer."""
        return degree_of(self.flow.of(value))

    def degrees(self) -> dict[ir.Value, Degree]:
        """Return the degrees other than 0."""
        degrees = ((value, degree_of(element)) for value, element in self.flow.elements.items())
        return {value: degree for value, degree in degrees if degree != 0}

    def edge(self, node: ir.Node, index: int) -> Degree:
        """Return the degree with which a node reads its input, with the edits of that edge."""
        value = node.inputs[index]
        return 0 if value is None else degree_of(self.read(node, index, self.flow.of(value)))

    def output(self, value: ir.Value) -> Degree:
        """Return the degree with which a value leaves the graph."""
        unscaled = self.unscaled.get(value)
        if unscaled is not None and (unscaled.everywhere or unscaled.output):
            return 0
        return self.degree(value)

    def missed(self, contractions: Iterable[ir.Node]) -> Set[ir.Node]:
        """Return the contractions without a scaled operand."""
        return {node for node in contractions if not any(self.edge(node, i) for i in range(len(node.inputs)))}

    # --- the domain -------------------------------------------------------------------------------------------------

    def read(self, node: ir.Node, index: int, element: Element) -> Element:
        """Apply the edits of an edge."""
        if self.scaled_edges and (node, index) in self.scaled_edges:
            degree = degree_of(element)
            return None if degree is None else degree + 1
        value = node.inputs[index]
        unscaled = None if value is None else self.unscaled.get(value)
        return 0 if unscaled is not None and element is not ZERO and unscaled.covers((node, index)) else element

    def write(self, value: ir.Value, element: Element) -> Element:
        """Apply a scale that enters at a value."""
        if value not in self.scaled_values or element is ZERO:
            return element
        return (degree_of(element) or 0) + 1

    def result(self, node: ir.Node, rule: Rule | None, degrees: Mapping[int, Degree]) -> Degree | Conflict:
        """Refuse the degrees that a plan does not allow."""
        carrying = tuple([i for i, degree in degrees.items() if degree])
        if carrying and rule is not None and (rule.unscaled_first or rule.kind in _UNSCALED_FIRST):
            return Conflict(node, carrying)
        result = super().result(node, rule, degrees)
        if rule is None or not carrying:
            return result
        degree = result.degree if isinstance(result, Conflict) else result
        if rule.kind is Kind.PRODUCT and degree is not None and abs(degree) > 1:
            return Conflict(node, tuple(i for i in rule.operands(len(node.inputs)) if degrees.get(i)))
        if isinstance(result, Conflict):
            return result
        if rule.kind is Kind.LINEAR and may_bend(node):
            return Conflict(node, carrying)  # an overflow would become a finite number before the check
        is_integer = result and any(rule.has_degree(i) and not is_float(v) for i, v in enumerate(node.outputs))
        if is_integer or rule.kind is Kind.COMPARE or (rule.kind is Kind.QUOTIENT and degrees.get(1)):
            return Conflict(node, carrying)
        return result


_VIEWS = Trait.VIEW | Trait.PERMUTE
_SIGNED = _VIEWS | Trait.SIGN
_UNSCALED_FIRST = (Kind.NONLINEAR, Kind.POWER, Kind.DEGREE_0)


def find_end(
    topology: Topology, plan: Plan, live: Container[ir.Value], value: ir.Value, numbers: Container[ir.Value] = ()
) -> ir.Value:
    """Find the end of the backward pass: up from a use of a gradient, past factors such as the learning rate.

    Views of a gradient without other readers belong to it: the last view has its name.

    Args:
        topology: the graph.
        plan: the edits so far.
        live: the ancestors of cotangents.
        value: the used value.
        numbers: the values above gradients that are numbers: a sum over the batch may be such a gradient.
    """
    path = [value if value in live else topology.origin(value)]
    while path[-1] not in live:
        node = path[-1].producer()
        rule = None if node is None else rule_of(node)
        if node is None or rule is None or rule.kind not in (Kind.LINEAR, Kind.PRODUCT, Kind.QUOTIENT):
            break
        uses = [Use(node, i) for i, v in enumerate(node.inputs) if v is not None and plan.edge(node, i) == 1]
        if len(uses) != 1 or uses[0] in plan.scaled_edges or not _is_factor_or_view(*uses[0], numbers):
            break
        above = topology.origin(operand_at(uses[0]))
        if above in live or not is_tensor(above):
            break
        path.append(above)
    while len(path) > 1:
        reader = path[-2].producer()
        shared = len(path[-1].uses()) > 1 or path[-1].is_graph_output()
        if reader is None or not has_trait(reader, _VIEWS) or shared:
            break
        path.pop()
    return path[-1]


def _is_factor_or_view(node: ir.Node, index: int, numbers: Container[ir.Value]) -> bool:
    """Return whether a node views, measures or multiplies a gradient by a number."""
    if node.op_type in ("Mul", "Div"):
        return all(is_scalar(v) for i, v in enumerate(node.inputs) if i != index and v is not None)
    result = node.outputs[0]
    return has_trait(node, _SIGNED) or (is_scalar(result) and result not in numbers)


def find_tensor(value: ir.Value) -> Use:
    """Find the tensor in a sequence of gradients, and its reader, since a sequence cannot be divided.

    Raises:
        UnsupportedModelError: the sequence is made in a body.
    """
    above = value
    while (node := above.producer()) is not None and (rule := rule_of(node)) is not None:
        operands = rule.operands(len(node.inputs)) if rule.kind is Kind.LINEAR else ()
        if len(operands) != 1:
            break
        use = Use(node, operands[0])
        above = operand_at(use)
        if is_tensor(above):
            return use
    raise UnsupportedModelError(
        f"{value.name!r} is a sequence of gradients, which cannot be divided by the loss scale; let its members "
        "leave the body as tensors"
    )


def find_explained(topology: Topology, gradients: Iterable[ir.Value]) -> Set[ir.Value]:
    """Find the values that depend on gradients by more than a measure of them, such as a norm."""
    explained, measures = set(gradients), set[ir.Value]()
    for node, results, operands in topology.parts:
        if explained.isdisjoint(operands):
            continue
        if _is_measure(node) or (measures and measures.issuperset([v for v in operands if v in explained])):
            results = [v for v in results if not is_number(v)]
            measures.update(results)
        explained.update(results)
    return explained


def _is_measure(node: ir.Node) -> bool:
    """Return whether a node is a function of a gradient that does not move a weight: a square, a norm, a root."""
    op_type = node.op_type
    if op_type in ("Mul", "Pow"):
        base, other = node.inputs
        return base is other or (op_type == "Pow" and constant_number(other) != 1)
    if has_trait(node, Trait.REDUCTION):
        return op_type not in ("ReduceSum", "ReduceMean")
    rule = rule_of(node)
    return rule is not None and rule.kind in (Kind.NONLINEAR, Kind.POWER)
