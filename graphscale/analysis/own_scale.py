"""A training step's own loss scale: its exporter multiplied the gradients, and divides them again.

Only certain evidence counts. A scalar S, fed, carried or stored, multiplies the seed of the backward pass, the loss
does not depend on S, and the exact inverse of S, not another gradient, divides every gradient again before an output.
This excludes others: a loss weight remains in the gradients, gradients of norm 1 meet no inverse of S, and the results
are not homogeneous in a temperature.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence

import onnx_ir as ir

from graphscale.analysis.loss import find_loss_candidates
from graphscale.analysis.supposed_scale import SupposedScale
from graphscale.analysis.updates import same_type
from graphscale.errors import AlreadyScaledError
from graphscale.flow.degree import Conflict, Degree, degrees_through
from graphscale.graph.values import (
    constant_number,
    constant_tensor,
    inputs_of,
    is_float,
    is_scalar,
    own_dtype,
    reads_shape,
    subgraphs,
    values_by_name,
)
from graphscale.graph.walks import ancestors
from graphscale.operators import Kind, Trait, has_trait, rule_of

__all__ = ["OwnScale", "find_own_scale", "refuse_own_scale"]

# A smaller constant may be a factor of a derivative.
_LEAST = 8
# The number of numbers tried, and the average number of visits to a reader of one.
_MOST = 8
_PATIENCE = 64


@dataclasses.dataclass(frozen=True)
class OwnScale:
    """The own loss scale of a step.

    Attributes:
        value: the input, the initializer or the constant that holds it.
        loss: the loss that the scale multiplies.
        unscaled: the gradients after their division by the scale.
        next: its next value; None where the step does not adjust it.
        tested: whether values that carry the scale are tested for finiteness.
    """

    value: ir.Value
    loss: ir.Value
    unscaled: tuple[ir.Value, ...]
    next: ir.Value | None
    tested: bool

    @property
    def is_constant(self) -> bool:
        """True if the scale can never change."""
        return constant_tensor(self.value) is not None and self.next is None

    def describe(self) -> str:
        """Return the evidence as a sentence."""
        number = constant_number(self.value, initial=True)
        held = "" if number is None else f" = {number:g}"
        kind = "input" if self.value.is_graph_input() else "constant" if self.is_constant else "initializer"
        first, count = self.unscaled[0].name, len(self.unscaled)
        parts = [
            f"{kind} {self.value.name!r}{held} multiplies the gradients of loss {self.loss.name!r}",
            f"divides {count} of them again, {first!r} first" if count > 1 else f"divides {first!r} again",
        ]
        parts += ["they are tested for finiteness"] if self.tested else []
        parts += [f"{self.next.name!r} is its next value"] if self.next is not None else []
        return ", ".join(parts)

    def warn(self) -> str:
        """Return the warning for a report."""
        if self.is_constant:
            return (
                f"the step has a constant loss scale of its own, and the new one multiplies it: {self.describe()}; "
                "export the step without it"
            )
        return f"the step has a loss scale of its own, and scale refuses it: {self.describe()}"


def find_own_scale(graph: ir.Graph, losses: Sequence[str] = ()) -> OwnScale | None:
    """Find a step's own loss scale.

    Args:
        graph: the main graph, with no calls of model-local functions in it.
        losses: the names of the losses, where known.
    """
    numbers: set[ir.Value] = set()
    _find_numbers(graph, numbers)
    supposed = [*itertools.islice(_suppose(graph, numbers), _MOST)]
    if not supposed:
        return None
    values = values_by_name(graph) if losses else {}
    candidates = [values[name] for name in losses if name in values] or find_loss_candidates(graph, set())
    for value, powers in supposed:
        supposed_scale = SupposedScale(graph, numbers, powers)
        loss = supposed_scale.find_loss(candidates)
        if loss is not None:
            following = _find_next(graph, value, numbers, supposed_scale.touched)
            unscaled = [*supposed_scale.unscaled]
            tensors = [each for each in unscaled if each.shape is None or not is_scalar(each)]
            return OwnScale(value, loss, tuple(tensors or unscaled), following, supposed_scale.tested)
    return None


def refuse_own_scale(own: OwnScale | None, name: str) -> list[str]:
    """Refuse a step whose own loss scale changes; return a warning for a constant one.

    Args:
        own: the step's own loss scale, if any.
        name: the name of the model, for the message.

    Raises:
        AlreadyScaledError: the step, or its caller, adjusts a loss scale.
    """
    if own is not None and not own.is_constant:
        raise AlreadyScaledError(
            f"{name} already carries a loss scale of its own: {own.describe()}; train it without "
            "graphscale, or export the step "
            "without loss scaling"
        )
    return [] if own is None else [own.warn()]


def _sources(graph: ir.Graph) -> list[ir.Value]:
    return list(dict.fromkeys((*graph.inputs, *graph.initializers.values())))


_Powers = dict[ir.Value, Degree]


def _suppose(graph: ir.Graph, numbers: set[ir.Value]) -> Iterator[tuple[ir.Value, _Powers]]:
    """Yield each input, initializer and constant of a possible loss scale, with powers of the scale.

    The scale itself may be computed, such as from its exponent.
    """
    left, seen = _PATIENCE * sum(1 for _ in graph.all_nodes()), set[ir.Value]()
    for value, powers in (*_states(graph, numbers), *_constants(graph)):
        pending = [powers]
        for symbols in pending:
            uses = _Uses(symbols, numbers)
            left -= uses.count
            if left < 0:
                return
            if uses.multiplies and uses.divides:
                yield value, symbols
            if constant_tensor(value) is None:
                pending += ({other: 1} for other in uses.others if other not in seen)
                seen.update(uses.others)


def _states(graph: ir.Graph, numbers: set[ir.Value]) -> Iterator[tuple[ir.Value, _Powers]]:
    """Yield the fed and carried scalars."""
    read = ancestors([v for v in graph.outputs if v in numbers and is_float(v)], stop=_is_flag)
    for value in _sources(graph):
        is_carried = value.is_graph_input() or value in read or _find_write(value) is not None
        if is_float(value) and is_scalar(value) and is_carried:
            yield value, {value: 1}


def _constants(graph: ir.Graph) -> Iterator[tuple[ir.Value, _Powers]]:
    """Yield the first constant of each number, with all constants of the number and its reciprocal."""
    made = (value for node in graph.all_nodes() if node.op_type == "Constant" for value in node.outputs)
    values: dict[float, list[ir.Value]] = {}
    for value in (*_sources(graph), *made):
        number = constant_number(value) if is_float(value) else None
        if number is not None and 0 < number < math.inf and value.uses():
            values.setdefault(number, []).append(value)
    for number, same in values.items():
        if number >= _LEAST:
            yield same[0], {**dict.fromkeys(same, 1), **dict.fromkeys(values.get(1 / number, ()), -1)}


class _Uses:
    """The uses of powers of a number by other values than numbers.

    Attributes:
        multiplies: True if a value is a product with the number, or computed from the number.
        divides: True if the number is a divisor.
        others: the numbers computed from the number by other operators than powers.
        count: number of uses.
    """

    def __init__(self, powers: _Powers, numbers: set[ir.Value]) -> None:
        self.multiplies = self.divides = False
        self.others: dict[ir.Value, None] = {}
        self.count = 0
        known = dict(powers)
        pending = list(known)
        for value in pending:
            for node, index in value.uses():
                self.count += 1
                if numbers.isdisjoint(node.outputs):
                    rule = rule_of(node)
                    is_divisor = rule is not None and rule.kind is Kind.QUOTIENT and index == 1
                    divides = ((known[value] or 0) < 0) is not is_divisor
                    self.divides |= divides
                    self.multiplies |= not divides
                    continue
                result = degrees_through(node, [0 if v is None else known.get(v, 0) for v in node.inputs])
                if isinstance(result, Conflict):
                    self.others.update((each, None) for each in node.outputs if is_float(each))
                    continue
                new = {v: degree for v, degree in zip(node.outputs, result, strict=True) if degree and v not in known}
                known |= new
                pending += new


def _find_write(value: ir.Value) -> ir.Value | None:
    """Find the output of the node that writes a state in place."""
    writers = (node for node, index in value.uses() if index == 0 and has_trait(node, Trait.EFFECT))
    return next((node.outputs[0] for node in writers if node.outputs), None)


def _find_next(graph: ir.Graph, value: ir.Value, numbers: set[ir.Value], touched: set[ir.Value]) -> ir.Value | None:
    """Find the next value of a loss scale: an output that depends on scale and gradients, or a write in place."""
    if (written := _find_write(value)) is not None:
        return written
    for output in graph.outputs:
        if output in numbers and same_type(output, value):
            above = ancestors([output], stop=_is_flag)
            if value in above and any(_is_flag(v) and v in touched for v in above):
                return output
    return None


def _find_numbers(graph: ir.Graph, numbers: set[ir.Value]) -> None:
    """Find the values of a graph and its bodies that are computed from single numbers, constants and flags alone."""
    numbers.update(v for v in _sources(graph) if constant_tensor(v) is not None or is_scalar(v))
    for node in graph:
        bodies = subgraphs(node)
        for body in bodies:
            _find_numbers(body, numbers)
            numbers.difference_update(body.inputs)
        if reads_shape(node) or (numbers.issuperset(inputs_of(node)) and not bodies):
            numbers.update(node.outputs)
            continue
        if node.op_type == "If" and numbers.issuperset(inputs_of(node)):
            leaving = zip(node.outputs, *(body.outputs for body in bodies), strict=False)
            numbers.update(value for value, *chosen in leaving if numbers.issuperset(chosen))
        numbers.update(v for v in node.outputs if _is_flag(v) and _may_hold_one(v))


def _is_flag(value: ir.Value) -> bool:
    return own_dtype(value) is ir.DataType.BOOL


def _may_hold_one(value: ir.Value) -> bool:
    return value.shape is None or is_scalar(value)
