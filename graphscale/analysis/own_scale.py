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
from collections.abc import Iterator, Mapping, Sequence

import onnx_ir as ir

from graphscale.analysis.loss import find_loss_candidates
from graphscale.analysis.scales import find_candidates
from graphscale.analysis.supposed_scale import SupposedScale
from graphscale.analysis.updates import same_type
from graphscale.errors import AlreadyScaledError
from graphscale.flow.degree import Degree
from graphscale.flow.scale import DATA, NUMBER, find_origins
from graphscale.graph.values import (
    constant_number,
    constant_tensor,
    is_float,
    is_scalar,
    own_dtype,
    values_by_name,
)
from graphscale.graph.walks import ancestors
from graphscale.operators import Trait, has_trait

__all__ = ["OwnScale", "find_own_scale", "refuse_own_scale"]

# A smaller constant may be a factor of a derivative.
_LEAST = 8
# The number of numbers tried.
_MOST = 8


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
    origins = _find_origins(graph)
    supposed = [*itertools.islice(_suppose(graph, origins), _MOST)]
    if not supposed:
        return None
    values = values_by_name(graph) if losses else {}
    candidates = [values[name] for name in losses if name in values] or find_loss_candidates(graph, set())
    for value, powers in supposed:
        scale = SupposedScale(graph, origins, powers)
        loss = scale.find_loss(candidates)
        if loss is not None:
            unscaled = [v for v in scale.unscaled if not is_scalar(v)] or scale.unscaled
            return OwnScale(value, loss, tuple(unscaled), _find_next(graph, value, scale), scale.tested)
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


def _suppose(graph: ir.Graph, origins: Mapping[ir.Value, int]) -> Iterator[tuple[ir.Value, Mapping[ir.Value, Degree]]]:
    """Yield each input, initializer and constant of a possible loss scale, with powers of the scale.

    The scale itself may be computed, such as from its exponent.
    """
    for value, powers in (*_states(graph, origins), *_constants(graph)):
        for candidate in find_candidates(value, powers):
            if candidate.products and candidate.divisions:
                yield value, candidate.powers


def _states(graph: ir.Graph, origins: Mapping[ir.Value, int]) -> Iterator[tuple[ir.Value, dict[ir.Value, Degree]]]:
    """Yield the fed and carried scalars."""
    numbers = [v for v in graph.outputs if is_float(v) and not origins.get(v, 0) & DATA]
    read = ancestors(numbers, stop=_is_flag)
    for value in _sources(graph):
        is_carried = value.is_graph_input() or value in read or _find_write(value) is not None
        if is_float(value) and is_scalar(value) and is_carried:
            yield value, {value: 1}


def _constants(graph: ir.Graph) -> Iterator[tuple[ir.Value, dict[ir.Value, Degree]]]:
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


def _find_write(value: ir.Value) -> ir.Value | None:
    """Find the output of the node that writes a state in place."""
    writers = (node for node, index in value.uses() if index == 0 and has_trait(node, Trait.EFFECT))
    return next((node.outputs[0] for node in writers if node.outputs), None)


def _find_next(graph: ir.Graph, value: ir.Value, scale: SupposedScale) -> ir.Value | None:
    """Find the next value of a loss scale: an output that depends on scale and gradients, or a write in place."""
    if (written := _find_write(value)) is not None:
        return written
    for output in graph.outputs:
        if scale.is_number(output) and same_type(output, value):
            above = ancestors([output], stop=_is_flag)
            if value in above and any(_is_flag(v) and scale.depends(v) for v in above):
                return output
    return None


def _find_origins(graph: ir.Graph) -> Mapping[ir.Value, int]:
    """Find the values of a graph and its bodies that are computed from single numbers, constants and flags alone."""
    sources = (v for v in _sources(graph) if constant_tensor(v) is None)
    return find_origins(graph, {v: NUMBER if is_scalar(v) else DATA for v in sources}, _is_single_flag)


def _is_flag(value: ir.Value) -> bool:
    return own_dtype(value) is ir.DataType.BOOL


def _is_single_flag(value: ir.Value) -> bool:
    return _is_flag(value) and (value.shape is None or is_scalar(value))
