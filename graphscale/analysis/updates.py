"""Carried state: outputs that are the next values of inputs, separated from gradients.

The next value of a weight, a moment or a counter depends on its own previous value directly, with a coefficient near
one: `w - lr*g`, `0.9*m + 0.1*g`, `step + 1`. A gradient with weight decay, `g + 0.002*w`, also depends on the weight,
but with a small coefficient.
"""

from __future__ import annotations

import contextlib
import dataclasses
import heapq
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from graphscale.flow.flat_graph import find_origins
from graphscale.graph.values import constant_tensor, inputs_of, is_known_zero, is_scalar, subgraphs
from graphscale.graph.walks import ancestors, source_by_trait
from graphscale.operators import Trait, has_trait, optimizer_of, rule_of

__all__ = [
    "DIRECT",
    "LEAST_SHARE",
    "NEXT_STATE",
    "ByType",
    "Factors",
    "Type",
    "Update",
    "average_factors",
    "find_coefficients",
    "find_fused_updates",
    "find_held",
    "find_held_initializers",
    "find_holders",
    "find_terms",
    "is_constant_view",
    "is_stored",
    "known_factors",
    "possible_factors",
    "promote_zeros",
    "same_type",
    "shares",
    "type_of",
    "zeros_as_inputs",
]

if TYPE_CHECKING:
    from graphscale.analysis.windows import Window

# The dtype and the shape of a value.
Type = tuple[ir.DataType | None, tuple[int | ir.SymbolicDim, ...] | None]

# The least coefficient of the previous value in a next state, above that in a gradient with decay.
NEXT_STATE = 0.5
# The largest coefficient in a gradient with decay.
LEAST_SHARE = 0.05
# The least coefficient that is followed: a product with a large number may come later, as in floor(1024 * w) / 1024.
_FOLLOWED = 1e-4
_STORED = "graphscale.stored"  # in the `meta` of a value
_ARITHMETIC = frozenset(("Add", "Sum", "Sub", "Neg", "Mul", "Pow", "Div"))
_VIEWS = Trait.VIEW | Trait.REPEAT
DIRECT = _VIEWS | Trait.PERMUTE | Trait.BOUND


@dataclasses.dataclass(frozen=True)
class Update:
    """A piece of carried state.

    Attributes:
        output: the graph output that is its next value.
        input: the graph input, or initializer, that is its present value.
        how: the evidence for the pair.
        kept: True if the state advances on skipped steps, too.
    """

    output: ir.Value
    input: ir.Value
    how: str
    kept: bool = False


def find_coefficients(
    output: ir.Value,
    states: Collection[ir.Value],
    factors: Factors | None = None,
    through: Trait = DIRECT,
    least: float = LEAST_SHARE,
) -> dict[ir.Value, float]:
    """Find the states on which a value depends directly, each with its coefficient (the largest, over all paths).

    Direct means through sums, through products with numbers, and through selects; other scalars, such as a learning
    rate, count as 0 beside a constant, and so do products with them.

    Args:
        output: the value.
        states: the values that may be a state.
        factors: the known factors, shared by many outputs of one graph.
        through: the trait of operators that pass their operands on.
        least: the largest coefficient to leave out, as that of a gradient with decay.
    """
    factors = Factors() if factors is None else factors
    coefficients: dict[ir.Value, float] = {}
    seen: set[ir.Value | tuple[ir.Value, Window]] = set()
    followed = min(least, _FOLLOWED)
    # The largest coefficient first, so that each value is visited only once.
    order = itertools.count()
    pending: list[tuple[float, int, float, ir.Value, Window]] = [(-1.0, next(order), 1.0, output, None)]
    while pending:
        size, _, coefficient, value, window = heapq.heappop(pending)
        place = value if window is None else (value, window)
        if place in seen:
            continue
        seen.add(place)
        if value in states and value is not output:
            if -size > least:
                coefficients[value] = coefficient
            continue
        node = value.producer()
        if node is None:
            if value in factors.origins:
                heapq.heappush(pending, (size, next(order), coefficient, factors.origins[value], None))
            continue
        terms = find_terms(node, value, factors, through)
        if factors.uncertain and not factors.uncertain.isdisjoint(node.inputs):
            factors.is_certain = False
        is_placed = window is not None or (node.op_type not in _ARITHMETIC and has_trait(node, Trait.WINDOW))
        above = window
        for operand, factor in terms:
            c = coefficient * factor
            if abs(c) > followed:
                if is_placed:
                    from graphscale.analysis.windows import window_above  # few optimizers stack tensors

                    is_read, above = window_above(node, value, operand, window)
                    if not is_read:
                        continue
                heapq.heappush(pending, (-abs(c), next(order), c, operand, above))
    return coefficients


def find_terms(node: ir.Node, value: ir.Value, factors: Factors, through: Trait) -> list[tuple[ir.Value, float]]:
    """Return the terms of a node's sum, with their coefficients; empty for other nodes."""
    op_type = node.op_type
    if op_type in _ARITHMETIC and not node.domain:
        return _arithmetic_terms(op_type, inputs_of(node), factors)
    optimizer = optimizer_of(node)
    if optimizer is not None:
        source = optimizer.source(value.index() or 0)
        state = None if source is None or source >= len(node.inputs) else node.inputs[source]
        return [] if state is None else [(state, 1.0)]
    if node.domain and op_type != "BatchNormInternal":
        return []
    if op_type in ("If", "Loop", "Scan"):
        position = (value.index() or 0) + (op_type == "Loop")  # behind the condition of a Loop
        return [(body.outputs[position], 1.0) for body in subgraphs(node)]
    rule = rule_of(node)
    if rule is not None and (has_trait(node, through) or op_type == "Where"):
        data = (node.inputs[i] for i in rule.operands(len(node.inputs)))
        return [(operand, 1.0) for operand in data if operand is not None]
    inputs = inputs_of(node)
    if op_type in ("ScatterND", "ScatterElements") and through & Trait.MOVE:
        return [] if is_known_zero(inputs[0]) else [(inputs[0], 1.0)]
    if op_type == "Gemm":
        return [(addend, node.attributes.get_float("beta", 1.0)) for addend in inputs[2:]]
    if op_type in ("Floor", "Ceil", "Round", "Relu") and through & Trait.MOVE:
        return [(inputs[0], 1.0)]
    if op_type in ("BatchNormalization", "BatchNormInternal") and value.index() in (1, 2):
        return [(inputs[2 + (value.index() or 0)], node.attributes.get_float("momentum", 0.9))]
    return []


def _arithmetic_terms(op_type: str, inputs: Sequence[ir.Value], factors: Factors) -> list[tuple[ir.Value, float]]:
    if op_type == "Mul":
        return [(inputs[0], factors[inputs[1]]), (inputs[1], factors[inputs[0]])]
    if op_type in ("Add", "Sum"):
        return [(operand, 1.0) for operand in inputs]
    if op_type == "Sub":
        return [(inputs[0], 1.0), (inputs[1], -1.0)]
    if op_type == "Div":
        divisor = factors[inputs[1]]
        return [(inputs[0], 1.0 / divisor)] if divisor else []
    if op_type == "Neg":
        return [(inputs[0], -1.0)]
    return [(inputs[0], 1.0)] if op_type == "Pow" and factors[inputs[1]] == 1 else []


class Factors(dict[ir.Value, float]):
    """The values of scalar factors, each found once.

    Args:
        find: returns the factor of a value, 0 for an unknown one; None for its value as a constant.
        origins: for inputs of bodies, the operands that they are.

    Attributes:
        uncertain: the values whose factors are not those of `known_factors`.
        is_certain: True if no sum was read beside such a value since this was last set.
    """

    def __init__(
        self,
        find: Callable[[ir.Value], float] | None = None,
        origins: Mapping[ir.Value, ir.Value] = MappingProxyType({}),
    ) -> None:
        super().__init__()
        self._find = _number if find is None else find
        self.origins = origins
        self.uncertain: set[ir.Value] = set()
        self.is_certain = True

    def __missing__(self, value: ir.Value) -> float:
        origin = self.origins.get(value, value)
        self[value] = number = self._find(origin)
        if self._find is _number and number and number != _known_number(origin):
            self.uncertain.add(value)
        return number


def possible_factors(factors: Factors) -> Factors:
    """Return a copy of some factors, with 1 for all unknown ones."""
    return Factors(lambda value: factors[value] or 1.0, factors.origins)


def shares(factors: Factors) -> Factors:
    """Return a copy of some factors, with 1 for unknown numbers, such as a decay that is an input."""
    return Factors(lambda value: factors[value] or float(is_scalar(value)), factors.origins)


def known_factors(origins: Mapping[ir.Value, ir.Value] = MappingProxyType({})) -> Factors:
    """Return factors with 0 for sums of constants and unknown numbers, and for filled tensors, which may be states."""
    return Factors(_known_number, origins)


def average_factors() -> Factors:
    """Return known factors, with 1 for unknown ones computed from numbers alone, such as those of an average."""
    return Factors(lambda value: _known_number(value) or float(_follows_from_numbers(value)))


def _known_number(value: ir.Value) -> float:
    number = math.nan if value.is_initializer() and not is_scalar(value) else _number(value, unknown=math.nan)
    return 0.0 if math.isnan(number) else number


def _follows_from_numbers(value: ir.Value) -> bool:
    def is_number(each: ir.Value) -> bool:
        return is_scalar(each) or (each.shape is None and each.producer() is not None)

    return all(map(is_number, ancestors([value], stop=lambda each: not is_number(each))))


def _number(value: ir.Value, depth: int = 8, unknown: float = 0.0) -> float:
    """Return the value of a scalar factor, with a special number for all factors but constants."""
    tensor = constant_tensor(value)
    if tensor is not None:
        return float(np.ravel(tensor.numpy())[0]) if 0 < tensor.size <= 1 else _uniform(tensor)
    node = value.producer()
    if node is None or depth == 0 or node.domain:
        return unknown
    inputs = inputs_of(node)
    if has_trait(node, _VIEWS):
        return _number(inputs[0], depth - 1, unknown)
    if node.op_type in ("Add", "Sub", "Mul"):
        left = _number(inputs[0], depth - 1, unknown)
        if math.isnan(left) or (left == 0 and node.op_type == "Mul"):
            return left
        right = _number(inputs[1], depth - 1, unknown)
        return left * right if node.op_type == "Mul" else left + right if node.op_type == "Add" else left - right
    return unknown


def _uniform(tensor: ir.TensorProtocol) -> float:
    """Return the repeated number of a constant, by its first elements; 0 if they differ."""
    first = np.ravel(tensor.numpy())[:64]
    return float(first[0]) if first.size and (first == first[0]).all() else 0.0


def find_held(outputs: Iterable[ir.Value], values: Collection[ir.Value], factors: Factors) -> set[ir.Value]:
    """Find the values in an output with a coefficient near one: weights, moments, constants."""
    found = (find_coefficients(output, values, factors) for output in outputs) if values else ()
    return {v for coefficients in found for v, c in coefficients.items() if c >= NEXT_STATE}


def find_held_initializers(graph: ir.Graph, holders: Iterable[ir.Node]) -> set[ir.Value]:
    """Find the initializers that an output of their type holds; the `holders` are the nodes with bodies."""
    values = {v for v in graph.initializers.values() if not v.is_graph_input() and not is_scalar(v)}
    kinds = {type_of(value) for value in values}
    is_any = any(None in kind for kind in kinds)
    outputs = (v for v in graph.outputs if is_any or (kind := type_of(v)) in kinds or None in kind)
    return find_held(outputs, values, Factors(origins=find_origins(holders))) if values else values


def find_holders(states: Iterable[ir.Value], nodes: Iterable[ir.Node], factors: Factors) -> set[ir.Value]:
    """Find the values with a state among their terms, but for sums that broadcast it, in one pass over the nodes.

    A walk for coefficients can begin at these values.

    Args:
        states: the states.
        nodes: the nodes of the main graph, in execution order.
        factors: the known factors of the graph.
    """
    holders = set(states)
    for node in nodes:
        if subgraphs(node):
            holders.update(node.outputs)
        elif not holders.isdisjoint(node.inputs):
            holders.update(value for value in node.outputs if _holds(node, value, holders, factors))
    return holders


def _holds(node: ir.Node, value: ir.Value, holders: set[ir.Value], factors: Factors) -> bool:
    terms = [operand for operand, factor in find_terms(node, value, factors, DIRECT) if factor and operand in holders]
    if node.op_type not in ("Add", "Sub", "Sum"):
        return bool(terms)
    return any(None in type_of(operand) or type_of(operand) == type_of(value) for operand in terms)


def find_fused_updates(graph: ir.Graph) -> list[ir.Node]:
    """Find the Gemm nodes whose addend holds a matrix that is fed or stored: perhaps a weight or a moment."""
    sums = [node for node in graph if node.op_type == "Gemm" and not node.domain and len(node.inputs) > 2]
    values = (*graph.inputs, *graph.initializers.values()) if sums else ()
    matrices = {v for v in values if v.shape is None or (len(v.shape) == 2 and 1 not in v.shape.dims)}
    factors, addends = Factors(), [(node, node.inputs[2]) for node in sums]
    return [n for n, v in addends if v is not None and (v in matrices or find_coefficients(v, matrices, factors))]


def is_stored(value: ir.Value) -> bool:
    """Return whether an initializer's value is stored, and cannot be fed."""
    return value.is_initializer() and (not value.is_graph_input() or bool(value.meta.get(_STORED)))


def promote_zeros(graph: ir.Graph, updates: Iterable[Update]) -> list[ir.Value]:
    """Make inputs of moments and weights that begin with zeros, since constants have no degree; return these."""
    empty = [update.input for update in updates if is_known_zero(update.input)]
    for value in empty:
        value.meta[_STORED] = is_stored(value)
    graph.inputs.extend(empty)
    return empty


@contextlib.contextmanager
def zeros_as_inputs(graph: ir.Graph, updates: Iterable[Update]) -> Iterator[list[ir.Value]]:
    """Let a block read moments and weights that begin with zeros as inputs; the graph is the same afterwards."""
    empty = promote_zeros(graph, updates)
    try:
        yield empty
    finally:
        for value in empty:
            graph.inputs.remove(value)
            del value.meta[_STORED]


def is_constant_view(output: ir.Value) -> bool:
    """Return whether an output is a constant or a view of one, which changes no state."""
    source = source_by_trait(output, Trait.SHARES_BUFFER)
    return source is not output and constant_tensor(source) is not None


def type_of(value: ir.Value) -> Type:
    """Return the dtype and the shape of a value, None for unknown ones."""
    shape = value.shape
    return value.dtype, None if shape is None else shape.dims


def same_type(output: ir.Value, value: ir.Value) -> bool:
    """Return whether two values have the same dtype and shape, as far as both are known."""
    (dtype, dims), (other, others) = type_of(output), type_of(value)
    if dtype is not None and other is not None and dtype is not other:
        return False
    return dims is None or others is None or dims == others


class ByType:
    """Values by type.

    Args:
        values: the values, each once.
    """

    def __init__(self, values: Iterable[ir.Value]) -> None:
        self._groups: dict[Type, list[ir.Value]] = {}
        for value in values:
            self._groups.setdefault(type_of(value), []).append(value)
        self._like: dict[Type, dict[ir.Value, None]] = {}

    def like(self, value: ir.Value) -> Set[ir.Value]:
        """Return the values of another one's type, as far as both are known, in order."""
        kind = type_of(value)
        if kind not in self._like:
            first = [] if None in kind else self._groups.get(kind, [])
            others = (kinds for kinds in self._groups if None in kind or (None in kinds and kinds != kind))
            alike = (each for kinds in others for each in self._groups[kinds] if same_type(value, each))
            self._like[kind] = dict.fromkeys((*first, *alike))
        return self._like[kind].keys()
