"""A training step's own loss scale: its exporter multiplied the gradients, and divides them again.

Only certain evidence counts. A scalar S, fed, carried or stored, multiplies the seed of the backward pass, the loss
does not depend on S, and the exact inverse of S, not another gradient, divides every gradient again before an output.
This excludes others: a loss weight remains in the gradients, gradients of norm 1 meet no inverse of S, and the results
are not homogeneous in a temperature.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence

import onnx_ir as ir

from graphscale.analysis.loss import find_loss_candidates
from graphscale.analysis.scales import find_supposed, find_write, sources_of
from graphscale.analysis.updates import same_type
from graphscale.errors import AlreadyScaledError
from graphscale.flow.degree import Conflict, Degree, DegreeDomain, is_small_zero
from graphscale.flow.interpreter import Flow
from graphscale.flow.scale_effects import (
    BENT,
    FREED,
    KEPT,
    TOUCHED,
    Numbers,
    ScaleDomain,
    ScaleEffect,
    is_flag,
    is_large,
    is_single_flag,
    tests_finiteness,
)
from graphscale.flow.support import reach
from graphscale.graph.values import (
    constant_number,
    constant_tensor,
    inputs_of,
    is_scalar,
    reads_shape,
    values_by_name,
)
from graphscale.graph.walks import ancestors
from graphscale.operators import Rule, Trait, has_trait, rule_of

__all__ = ["OwnScale", "find_own_scale"]

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

    def refuse(self, name: str) -> list[str]:
        """Refuse a scale that changes; return a warning for a constant one.

        Args:
            name: the name of the model, for the message.

        Raises:
            AlreadyScaledError: the step, or its caller, adjusts the scale.
        """
        if not self.is_constant:
            raise AlreadyScaledError(
                f"{name} already carries a loss scale of its own: {self.describe()}; train it without "
                "graphscale, or export the step "
                "without loss scaling"
            )
        return [self.warn()]


def find_own_scale(graph: ir.Graph, losses: Sequence[str] = ()) -> OwnScale | None:
    """Find a step's own loss scale.

    Args:
        graph: the main graph, with no calls of model-local functions in it.
        losses: the names of the losses, where known.
    """
    numbers = Numbers(graph, {*filter(is_scalar, sources_of(graph))}, is_single_flag)
    found = (each for each in find_supposed(graph, numbers) if each.products and each.divisions)
    supposed = [*itertools.islice(found, _MOST)]
    if not supposed:
        return None
    values = values_by_name(graph) if losses else {}
    candidates = [values[name] for name in losses if name in values] or find_loss_candidates(graph, set())
    nodes, is_zero = [*graph.all_nodes()], functools.cache(_has_every_degree)
    for each in supposed:
        scale = _SupposedScale(graph, nodes, _Degrees(numbers, is_zero), each.powers)
        loss = scale.find_loss(candidates)
        if loss is not None:
            unscaled = [v for v in scale.unscaled if not is_scalar(v)] or scale.unscaled
            return OwnScale(each.leaf, loss, tuple(unscaled), _find_next(graph, each.leaf, scale), scale.tested)
    return None


def _find_next(graph: ir.Graph, value: ir.Value, scale: _SupposedScale) -> ir.Value | None:
    """Find the next value of a loss scale: an output that depends on scale and gradients, or a write in place."""
    if (written := find_write(value)) is not None:
        return written
    for output in graph.outputs:
        if output in scale.numbers and same_type(output, value):
            above = ancestors([output], stop=is_flag)
            if value in above and any(is_flag(v) and v in scale.touched for v in above):
                return output
    return None


# --- the judgement ----------------------------------------------------------------------------------------------------


def _has_every_degree(value: ir.Value | None) -> bool:
    return is_large(value) or is_small_zero(value)


def _multiplies(node: ir.Node) -> bool:
    """Return whether a node certainly belongs to a network: a contraction, or a gradient operator."""
    rule = rule_of(node)
    return rule is not None and (rule.contraction or rule.gradient)


class _Degrees(DegreeDomain):
    """The degrees of a supposed scale, which every number that stands for infinity has."""

    def __init__(self, numbers: Numbers, is_zero: Callable[[ir.Value | None], bool]) -> None:
        super().__init__(is_zero)
        self.numbers = numbers

    def result(self, node: ir.Node, rule: Rule | None, degrees: Mapping[int, Degree]) -> Degree | Conflict:
        if rule is not None and (rule.contraction or rule.gradient):
            # An inverse of the number in a contraction normalizes features, and the result undoes it.
            is_wrong = any(not 0 <= (degree or 0) <= 1 for degree in degrees.values())
            if is_wrong and any(v not in self.numbers for v in inputs_of(node)):
                return Conflict(node, tuple(degrees))
        return super().result(node, rule, degrees)


class _SupposedScale:
    """A number that may be a loss scale, with its effect on each value of a graph.

    Args:
        graph: the main graph.
        nodes: its nodes, bodies included.
        degrees: the domain of the scale's degrees.
        powers: the values that are powers of the supposed scale, with the power of each.

    Attributes:
        unscaled: the gradients that an exact inverse of the scale multiplies.
        touched: the values that depend on the scale.
        numbers: the values computed from single numbers, constants and flags alone.
        tested: whether values that depend on the scale are tested for finiteness.
    """

    def __init__(
        self, graph: ir.Graph, nodes: Sequence[ir.Node], degrees: _Degrees, powers: Mapping[ir.Value, Degree]
    ) -> None:
        self._graph = graph
        self.numbers = degrees.numbers
        self._powers = powers
        effects = {value: ScaleEffect(power, TOUCHED | KEPT) for value, power in powers.items()}
        domain = ScaleDomain(degrees, effects, self.numbers)
        self._flow = Flow[ScaleEffect](domain, effects)
        self._flow.visit_all(graph)
        marks = {value: effect.marks for value, effect in self._flow.elements.items()}
        self.touched, self._bent, self._kept, self._freed = (
            {value for value, own in marks.items() if own & mark} for mark in (TOUCHED, BENT, KEPT, FREED)
        )
        self.unscaled = [value for value in domain.unscaled if value not in self._bent]
        nodes = [node for node in nodes if not self.touched.isdisjoint(node.inputs)]
        self._written = {v for node in nodes if has_trait(node, Trait.EFFECT) for v in inputs_of(node)}
        nodes = [node for node in nodes if self._bent.isdisjoint(node.inputs) and not reads_shape(node)]
        nodes = [node for node in nodes if any(v not in self.numbers for v in inputs_of(node))]
        self.tested = any(map(tests_finiteness, nodes))
        # The contractions and gradient operators that compute on multiples of the scale.
        self._carrying = [node for node in nodes if _multiplies(node) and any(map(self._degree, inputs_of(node)))]

    def _degree(self, value: ir.Value) -> Degree:
        """Return the power of the scale in a value, 0 where no power describes it."""
        return 0 if value in self._bent else self._flow.of(value).degree

    def find_loss(self, candidates: Sequence[ir.Value]) -> ir.Value | None:
        """Return the first loss that the number certainly scales: it multiplies the gradients, and comes out again."""
        ends = {v for v in (*self._graph.outputs, *self._written) if not self._is_metric(v)}
        scaled = self._kept.intersection(ends)
        if not scaled.isdisjoint(self._written) or self._freed.isdisjoint(ends):
            return None
        has_inverse = any((self._degree(v) or 0) < 0 and v not in self.numbers for v in self._flow.elements)
        for loss in candidates:
            forward = ancestors([loss])
            backward = [node for node in self._carrying if forward.isdisjoint(node.outputs)]
            is_free = forward.isdisjoint(self._powers)
            # The scale may come out of the loss again, as it does from a weighted mean.
            is_power = loss not in self._bent and self._degree(loss) in (0, 1) and len(backward) == len(self._carrying)
            is_tested = self.tested and not has_inverse and (is_free or self._degree(loss) == 1)
            is_likely = scaled <= {loss} and (is_free or is_power)
            if is_likely and (is_tested or self._reads_cotangent(backward, forward)):
                return loss
        return None

    def _reads_cotangent(self, nodes: Sequence[ir.Node], forward: set[ir.Value]) -> bool:
        """Return whether a multiple in a contraction depends on the loss's own values, or is the seed alone."""
        behind = reach(self._graph, {v for v in forward if v.producer() is not None}) if nodes else set()
        return any(self._degree(v) and (v in behind or v in self.numbers) for node in nodes for v in inputs_of(node))

    def _is_metric(self, value: ir.Value) -> bool:
        return value in self.numbers or (value.shape is not None and len(value.shape) == 0)
