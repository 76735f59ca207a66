"""Candidates for the loss scale of a graph: scalars that multiply and divide data, and the bookkeeping of one."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Container, Iterator, Mapping, Sequence

import onnx_ir as ir

from graphscale.analysis.loss import LEAST_SCALE
from graphscale.flow.degree import ZERO, Conflict, Degree, DegreeDomain, Element, Mixed, degree_of, is_small_zero
from graphscale.flow.interpreter import Flow
from graphscale.flow.scale_effects import Numbers, is_flag
from graphscale.flow.support import reach
from graphscale.graph.values import (
    all_nodes,
    constant_number,
    constant_tensor,
    is_float,
    is_scalar,
    subgraphs,
)
from graphscale.graph.walks import ancestors
from graphscale.operators import Kind, Rule, Trait, has_trait, rule_of

__all__ = ["Bookkeeping", "Candidate", "find_candidates", "find_supposed", "find_write", "sources_of"]


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A number with its products and quotients: a leaf, or a number computed from it alone, such as a power of two.

    Attributes:
        leaf: the input, the initializer or the constant.
        powers: the number, and other values that are powers of it, with the power of each.
        products: the values that are products with it.
        divisions: the nodes that divide by it.
    """

    leaf: ir.Value
    powers: Mapping[ir.Value, Degree]
    products: list[ir.Value] = dataclasses.field(default_factory=list)
    divisions: list[ir.Node] = dataclasses.field(default_factory=list)

    @property
    def symbol(self) -> ir.Value:
        """The number."""
        return next(iter(self.powers))


def find_supposed(graph: ir.Graph, numbers: Numbers) -> Iterator[Candidate]:
    """Yield candidates for the loss scale of a graph: its fed and carried scalars, then its constants.

    The scale itself may be computed, such as from its exponent.

    Args:
        graph: the main graph.
        numbers: the values computed from single numbers alone.
    """
    for value, powers in (*_states(graph, numbers), *_constants(graph)):
        yield from find_candidates(value, powers, numbers)


def _states(graph: ir.Graph, numbers: Numbers) -> Iterator[tuple[ir.Value, dict[ir.Value, Degree]]]:
    read = ancestors([v for v in graph.outputs if is_float(v) and v in numbers], stop=is_flag)
    for value in sources_of(graph):
        is_carried = value.is_graph_input() or value in read or find_write(value) is not None
        if is_float(value) and is_scalar(value) and is_carried:
            yield value, {value: 1}


def _constants(graph: ir.Graph) -> Iterator[tuple[ir.Value, dict[ir.Value, Degree]]]:
    """Yield the first constant of each number, with all constants of the number and its reciprocal."""
    made = (value for node in all_nodes(graph) if node.op_type == "Constant" for value in node.outputs)
    values: dict[float, list[ir.Value]] = {}
    for value in (*sources_of(graph), *made):
        number = constant_number(value) if is_float(value) else None
        if number is not None and 0 < number < math.inf and value.uses():
            values.setdefault(number, []).append(value)
    for number, same in values.items():
        if number >= LEAST_SCALE:
            yield same[0], {**dict.fromkeys(same, 1), **dict.fromkeys(values.get(1 / number, ()), -1)}


def find_write(value: ir.Value) -> ir.Value | None:
    """Find the output of the node that writes a state in place."""
    writers = (node for node, index in value.uses() if index == 0 and has_trait(node, Trait.EFFECT))
    return next((node.outputs[0] for node in writers if node.outputs), None)


def sources_of(graph: ir.Graph) -> list[ir.Value]:
    """Return the inputs, and the initializers that are no inputs."""
    return list(dict.fromkeys((*graph.inputs, *graph.initializers.values())))


def find_candidates(
    leaf: ir.Value, powers: Mapping[ir.Value, Degree], numbers: Container[ir.Value]
) -> Iterator[Candidate]:
    """Yield a scalar with some powers of it, then the numbers that are computed from it, but are no powers of it."""
    pending: list[Mapping[ir.Value, Degree]] = [powers]
    seen = {leaf}
    for symbols in pending:
        candidate = Candidate(leaf, symbols)
        bent = _follow(candidate, numbers)
        yield candidate
        if constant_tensor(leaf) is None:
            pending += [{value: 1} for value in bent if value not in seen and value.uses()]
            seen.update(bent)


def _follow(candidate: Candidate, numbers: Container[ir.Value]) -> list[ir.Value]:
    """Collect the uses of a candidate by data, and return the numbers that it determines otherwise."""
    domain = DegreeDomain(is_small_zero)
    flow = Flow[Element](domain, candidate.powers)
    bent: dict[ir.Value, None] = {}
    pending = list(candidate.powers)
    for value in pending:
        for node, index in value.uses():
            rule = rule_of(node)
            if rule is None or not (rule.bends or rule.kind in (Kind.PRODUCT, Kind.QUOTIENT, Kind.LINEAR)):
                continue
            # An index or a shape is no data.
            data = {*rule.operands(len(node.inputs)), *rule.addends}
            if index not in data:
                continue
            others = [v for i, v in enumerate(node.inputs) if v is not None and i != index and i in data]
            known = (constant_tensor(v) is not None or v in flow.elements or v in numbers for v in others)
            if node.domain == "" and all(known):
                results = dict(zip(node.outputs, flow.evaluate(node), strict=True))
                if node in domain.conflicts:
                    bent.update(dict.fromkeys(results))
                    continue
                new = {v: power for v, power in results.items() if power and v not in flow.elements}
                flow.elements |= new
                pending += new
            elif rule.gradient or rule.kind in (Kind.PRODUCT, Kind.QUOTIENT):
                divides = rule.kind is Kind.QUOTIENT and index == 1
                if ((degree_of(flow.of(value)) or 0) < 0) is divides:
                    candidate.products.extend(node.outputs)
                else:
                    candidate.divisions.append(node)
    return list(bent)


# --- bookkeeping ------------------------------------------------------------------------------------------------------

# The power of a further leaf counts as so many of the one before: one number has the powers of all, as digits.
_NEXT = 2.0**8


class Bookkeeping:
    """The values computed from the state of a loss scale, constants and flags alone.

    Args:
        numbers: the values computed from the state, with those of constants.
        leaves: the state of the loss scale, scalars.
        symbol: the loss scale: a leaf, or a value computed from leaves.

    Attributes:
        symbol: the loss scale.
        leaves: its state.
        values: the bookkeeping, bodies and leaves included.
        degrees: the power of the scale in the values that are constants times a power of it.
        multiples: the values of a degree other than 0.
        bent: the values that depend on the state of the loss scale otherwise, such as the next scale.
    """

    def __init__(self, numbers: Numbers, leaves: Collection[ir.Value], symbol: ir.Value) -> None:
        self.symbol = symbol
        self.leaves = {*leaves, *([symbol] if symbol.producer() is None else [])}
        self._numbers = numbers
        values = reach(numbers.nodes, (*self.leaves, symbol)) | numbers.counts
        self.values = {value for value in values if value in numbers}
        others = (leaf for leaf in self.leaves if leaf is not symbol)
        seeds = {symbol: 1.0, **{leaf: _NEXT**i for i, leaf in enumerate(others, 1)}}
        flow = Flow[Element](_Choices(seeds, self.values), seeds)
        flow.visit_all(numbers.nodes)
        powers = {value: element for value in self.values if (element := flow.of(value))}
        plain = ((value, power) for value, power in powers.items() if not isinstance(power, Mixed))
        self.degrees = {value: degree for value, degree in plain if degree is not ZERO and abs(degree) < _NEXT / 2}
        self.multiples = {*self.degrees}
        self.bent = powers.keys() - self.multiples

    def is_constant(self, value: ir.Value) -> bool:
        """Return whether a value depends on no input and on no state."""
        return self._numbers.is_constant(value) and value not in self.values


class _Choices(DegreeDomain):
    """Degrees in bookkeeping: a value chosen among several of the state is no power of the scale."""

    def __init__(self, symbols: Mapping[ir.Value, Element], values: set[ir.Value]) -> None:
        super().__init__(is_small_zero)
        self._symbols = symbols
        self._values = values

    def transfer(self, node: ir.Node, operands: Sequence[Element]) -> Sequence[Element]:
        mixed = next((element for element in operands if isinstance(element, Mixed)), None)
        return super().transfer(node, operands) if mixed is None else [mixed] * len(node.outputs)

    def result(self, node: ir.Node, rule: Rule | None, degrees: Mapping[int, Degree]) -> Degree | Conflict:
        # An update rule selects one of two scales; a gradient, one of two tensors that begin with the scale.
        is_choice = node.op_type == "Where" and all(degrees.get(i) and _may_be_scalar(node.inputs[i]) for i in (1, 2))
        return Conflict(node, (1, 2)) if is_choice else super().result(node, rule, degrees)

    def join(self, node: ir.Node, elements: Sequence[Element]) -> Element:
        is_choice = len(subgraphs(node)) > 1 and any(elements)
        return Mixed(Conflict(node, ()), 0) if is_choice else super().join(node, elements)

    def write(self, value: ir.Value, element: Element) -> Element:
        return self._symbols.get(value, element) if value in self._values else 0


def _may_be_scalar(value: ir.Value | None) -> bool:
    """Return whether a value may be one number, by its shape, else by its constant operands."""
    if value is None or value.shape is not None:
        return value is not None and is_scalar(value)
    node = value.producer()
    constants = (constant_tensor(operand) for operand in (() if node is None else node.inputs))
    return all(constant is None or constant.size == 1 for constant in constants)
