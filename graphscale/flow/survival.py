"""Survival: the effects of numbers that are not finite on the values below them, by the rows of the operator table.

The invariant of a proof that no overflow is lost: each element of a value is right, or not finite. A value that is left
out has no effect on the numbers that remain; a bound, a comparison or a quotient turns an overflow into a wrong finite
number.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Container, Iterable, Sequence
from typing import NamedTuple

import onnx_ir as ir

from graphscale.flow.interpreter import Domain, Flow
from graphscale.graph.values import (
    captured_values,
    constant_tensor,
    is_float,
    node_name,
    op_name,
    reads_shape,
)
from graphscale.operators import KINDS, LOST, Fate, Survival, Trait, has_trait, rule_of, survival_of

__all__ = ["FINITE", "SCALE", "Effect", "Loss", "SurvivalDomain", "find_lost"]

_WRONG = Fate.BENT | Fate.TOLD


@dataclasses.dataclass(frozen=True)
class Loss:
    """A node that may turn a number that is not finite into a wrong finite one.

    Attributes:
        node: the node; inside a subgraph, the inner one.
        value: the operand, or a value that bodies capture.
        kinds: the kinds of numbers that it loses.
    """

    node: ir.Node
    value: ir.Value | None
    kinds: Fate

    def __str__(self) -> str:
        names = {Fate.PLUS: "infinity", Fate.MINUS: "minus infinity", Fate.NAN: "NaN"}
        kinds = " and ".join(name for kind, name in names.items() if kind in self.kinds)
        name = None if self.value is None else self.value.name
        return f"{op_name(self.node)} of node {node_name(self.node)!r} may make {kinds} in {name!r} finite"


class Effect(NamedTuple):
    """An element of the lattice: the possible effects of numbers above on a value, ordered by inclusion.

    Attributes:
        fate: the effects.
        loss: the first loss, if a finite element or a flag may be wrong.
        is_scale: True for a number made of the loss scale alone: it is finite, and its multiples may overflow.
    """

    fate: Fate = Fate.NONE
    loss: Loss | None = None
    is_scale: bool = False


FINITE, SCALE = Effect(), Effect(is_scale=True)


class SurvivalDomain(Domain[Effect]):
    """The effects of numbers that are not finite.

    Args:
        overflow: the kinds of numbers that each multiple of the loss scale may hold by its own overflow.
        is_positive: tests whether a value is known to be positive.
    """

    default = FINITE

    def __init__(
        self,
        overflow: Fate = Fate.NONE,
        is_positive: Callable[[ir.Value], bool] = lambda _: False,
    ) -> None:
        self.overflow = overflow
        self.is_positive = is_positive

    def transfer(self, node: ir.Node, operands: Sequence[Effect]) -> Sequence[Effect]:
        carrying = [(i, effect) for i, effect in enumerate(operands) if effect is not FINITE and effect != FINITE]
        if not carrying or reads_shape(node):
            return [FINITE] * len(node.outputs)
        if any(effect.is_scale for _, effect in carrying) and self._is_scale(node, operands):
            return [SCALE] * len(node.outputs)
        facts = tuple([(self._survival(node, i), effect.fate) for i, effect in carrying])
        selects = len(facts) > 1 and has_trait(node, Trait.REMOVABLE_BY_CONDITION)
        number, is_wrong, other, loser = _pass_on(self.overflow, facts, len(node.inputs) - 1 if selects else 0)
        loss = next((effect.loss for _, effect in carrying if effect.loss is not None), None)
        if loss is None and loser is not None:
            loss = Loss(node, node.inputs[carrying[loser][0]], _losing(*facts[loser]))
        rule = rule_of(node)
        effects = []
        for value in node.outputs:
            if is_float(value) and (rule is None or rule.has_degree(value.index() or 0)):
                effects.append(Effect(number, loss if is_wrong else None))
            else:
                effects.append(Effect(other, loss if other else None))
        return effects

    def _survival(self, node: ir.Node, index: int) -> Survival:
        if self.overflow is KINDS:
            return survival_of(node, index)  # signs do not matter where each number may be of any kind
        from graphscale.flow.signs import survival_at

        return survival_at(node, index, self.is_positive)

    def _is_scale(self, node: ir.Node, operands: Sequence[Effect]) -> bool:
        """Return whether a node computes with the loss scale and constants alone."""
        pairs = zip(node.inputs, operands, strict=True)
        return all(effect.is_scale or value is None or constant_tensor(value) for value, effect in pairs)

    def opaque(self, node: ir.Node, operands: Sequence[Effect]) -> Sequence[Effect]:
        values = (*node.inputs, *captured_values(node))
        for value, effect in zip(values, operands, strict=True):
            if effect != FINITE:
                return [Effect(LOST.nan, effect.loss or Loss(node, value, KINDS))] * len(node.outputs)
        return [FINITE] * len(node.outputs)

    def join(self, node: ir.Node, elements: Sequence[Effect]) -> Effect:
        fate = Fate.NONE
        for effect in elements:
            fate |= effect.fate
        if node.op_type == "If" and fate and any(not effect.fate for effect in elements):
            fate |= Fate.GONE  # a branch that does not read the number
        loss = next((effect.loss for effect in elements if effect.loss is not None), None)
        return Effect(fate, loss, not fate and any(effect.is_scale for effect in elements))

    def control(self, element: Effect, condition: Effect) -> Effect:
        wrong = condition.fate & _WRONG
        return Effect(element.fate | wrong, element.loss or condition.loss, element.is_scale) if wrong else element


@functools.lru_cache(maxsize=4096)
def _pass_on(
    overflow: Fate, operands: tuple[tuple[Survival, Fate], ...], selected: int
) -> tuple[Fate, bool, Fate, int | None]:
    """Return the effects on the results of a node.

    Args:
        overflow: the kinds of numbers that results may hold by their own overflow.
        operands: for each operand with an effect, its survival and the effects on it.
        selected: the number of operands that a selection takes its elements from; 0 for other nodes.

    Returns:
        the effects on the numbers, and whether finite ones may be wrong; the effects on flags, indices and other
            results; the place of the first losing operand.
    """
    fate, told, gone, sure, loser = overflow, Fate.NONE, True, 0, None
    for place, (survival, above) in enumerate(operands):
        own = survival.through(above)
        if loser is None and own & _WRONG:
            loser = place
        fate |= own | (above & _WRONG)
        told |= above & Fate.TOLD
        is_sure = bool(own & KINDS) and Fate.GONE not in above
        gone = gone and not (is_sure and Fate.GONE not in own)
        sure += is_sure
    fate = fate | Fate.GONE if gone and (not selected or sure < selected) else fate & ~Fate.GONE
    number = (fate & ~Fate.TOLD) | told
    return number, bool(number & _WRONG), fate & _WRONG, loser


@functools.lru_cache(maxsize=1024)
def _losing(survival: Survival, kinds: Fate) -> Fate:
    """Return the kinds of numbers that an operand loses."""
    return functools.reduce(operator.or_, (kind for kind in kinds & KINDS if survival.through(kind) & _WRONG))


def find_lost(
    nodes: Iterable[ir.Node], scale: ir.Value, checked: Iterable[ir.Value], plain: Container[ir.Value] = ()
) -> dict[ir.Value, Loss]:
    """Find the tested values that may be wrong and finite because a multiple of the loss scale above overflowed.

    Args:
        nodes: the nodes of a main graph, in execution order, without those of the update rule.
        scale: the loss scale.
        checked: the tested values.
        plain: numbers without a power of the scale; of finite numbers, others may overflow where the original does not.

    Returns:
        for each such value, the first node that makes an overflow finite.
    """
    domain = _TestedDomain(frozenset(checked), plain, scale.graph)
    Flow(domain, {scale: SCALE}).visit_all(nodes)
    return domain.lost


class _TestedDomain(SurvivalDomain):
    """The effects of overflows on a step that is applied, whose tested values are finite."""

    def __init__(
        self, tested: Container[ir.Value], plain: Container[ir.Value], graph: ir.Graph | ir.Function | None
    ) -> None:
        super().__init__(KINDS)
        self._tested, self._plain, self._graph = tested, plain, graph
        self.lost: dict[ir.Value, Loss] = {}

    def transfer(self, node: ir.Node, operands: Sequence[Effect]) -> Sequence[Effect]:
        effects = super().transfer(node, operands)
        if any(effect.fate for effect in operands):
            return effects
        return [FINITE if v in self._plain else effect for v, effect in zip(node.outputs, effects, strict=True)]

    def _is_scale(self, node: ir.Node, operands: Sequence[Effect]) -> bool:
        # In a body, an argument may be a tested multiple.
        is_alone = node.graph is self._graph and not any(value in self._tested for value in node.inputs)
        return is_alone and super()._is_scale(node, operands)

    def write(self, value: ir.Value, element: Effect) -> Effect:
        if value not in self._tested:
            return element
        if element.loss is not None:
            self.lost[value] = element.loss
        return FINITE if value in self._plain else SCALE
