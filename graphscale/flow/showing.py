"""Showing: the kinds of numbers in a value that certainly show in a tested value below it, from the tests up.

Each step up is a question to the survival of numbers in one node. Survival alone tells of numbers that may be lost.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import operator
from collections.abc import Collection, Iterable, Mapping

import onnx_ir as ir

from graphscale.flow.interpreter import Flow
from graphscale.flow.signs import survival_at
from graphscale.flow.survival import Effect, Loss, SurvivalDomain
from graphscale.graph.cones import producers_of
from graphscale.graph.values import constant_tensor, inputs_of, is_tensor, reads_shape, subgraphs
from graphscale.graph.walks import reach, source_by_trait
from graphscale.operators import KINDS, Fate, Survival, Trait, has_trait

__all__ = ["Coverage", "Effects", "is_empty", "shown_kinds", "union"]

_SINGLE = (Fate.PLUS, Fate.MINUS, Fate.NAN)
# Numbers of repeats that are read; values from a condition up to the number that decides it.
_FEW = _NEAR = 50


class Coverage:
    """The kinds of numbers that show in a tested value, for each value, and the losses of the others.

    Args:
        effects: the effects of the numbers in operands.
        of_all: True for all elements of a value; False for those that are passed on to a tested value.

    Attributes:
        kinds: the kinds that show.
        lost: the other kinds, each with the node that loses it, or the NaN that it may have become.
    """

    def __init__(self, effects: Effects, *, of_all: bool) -> None:
        self.kinds: dict[ir.Value, Fate] = {}
        self.lost: dict[ir.Value, dict[Fate, Loss]] = {}
        self._effects = effects
        self._of_all = of_all

    def see(self, value: ir.Value, kinds: Fate, lost: Mapping[Fate, Loss]) -> None:
        """Add the kinds that show by one reader of a value, and those that it loses."""
        self.kinds[value] = seen = self.kinds.get(value, Fate.NONE) | kinds
        self.lost[value] = {k: n for k, n in {**self.lost.get(value, {}), **lost}.items() if k not in seen}

    def pass_up(self, node: ir.Node, operands: Collection[ir.Value]) -> None:
        """Pass the kinds that show in the results of a node on to operands."""
        kinds = union(self.kinds.get(value, Fate.NONE) for value in node.outputs)
        lost = {kind: loss for value in node.outputs for kind, loss in self.lost.get(value, {}).items()}
        # Where nothing shows, a node below has lost it all.
        losing = next(iter(lost.values())).node if self._of_all and lost and not kinds else node
        for value in operands if kinds or lost else ():
            effects = self._effects.of(node, value)
            # The members of a sequence are tested one by one.
            passed = shown_kinds(effects, kinds, self._of_all and is_tensor(value))
            blamed = KINDS if self._of_all else kinds | union(lost)
            own = {kind: Loss(losing, value, kind) for kind in blamed & ~passed}
            above = {kind: loss for kind in KINDS & ~passed if (loss := _cause(kind, effects, lost)) is not None}
            self.see(value, passed, own | above)


def _cause(kind: Fate, effects: Survival, lost: Mapping[Fate, Loss]) -> Loss | None:
    """Return the loss of a kind of number in a node: the kind itself first, as a sum keeps infinity."""
    fate = effects.through(kind)
    loss = next((lost[each] for each in (kind, *KINDS) if each in lost and each in fate), None)
    # Infinity that may meet NaN is lost with it; infinity times zero is lost itself.
    is_certain = loss is not None and fate & KINDS == loss.kinds
    return dataclasses.replace(loss, kinds=kind) if loss is not None and is_certain else loss


@functools.lru_cache(maxsize=1024)
def shown_kinds(survival: Survival, noticed: Fate, of_all: bool = True) -> Fate:
    """Return the kinds of numbers that certainly have an effect that is noticed.

    Args:
        survival: the effects of each kind in an operand.
        noticed: the kinds that are noticed in the results.
        of_all: True for all elements of the operand; else only for those that are passed on.
    """
    shown = Fate.NONE
    for kind, fate in zip(_SINGLE, survival, strict=True):
        is_sure = Fate.GONE not in fate or not (of_all or fate & (Fate.BENT | Fate.TOLD))
        if is_sure and fate & KINDS and not fate & KINDS & ~noticed:
            shown |= kind
    return shown


def union(kinds: Iterable[Fate]) -> Fate:
    """Return all of some kinds."""
    return functools.reduce(operator.or_, kinds, Fate.NONE)


class Effects:
    """The effects of the numbers in an operand on the results of its node.

    Args:
        positions: the index of each node of the main graph.
    """

    def __init__(self, positions: Mapping[ir.Node, int]) -> None:
        self._positions = positions
        # Single nodes are interpreted, since the interpreter knows the layout of their bodies.
        self._flow = Flow(SurvivalDomain())
        self._nearest, self._is_empty = functools.cache(_nearest_above), functools.cache(is_empty)
        self.of = functools.cache(self._find)

    def _find(self, node: ir.Node, value: ir.Value) -> Survival:
        """Return the effects of the numbers in an operand, or a captured value, on the results of a node."""
        if self._is_empty(node):
            return Survival(Fate.GONE, Fate.GONE, Fate.GONE)
        places = [i for i, each in enumerate(node.inputs) if each is value]
        if len(places) == 1 and not (subgraphs(node) or has_trait(node, Trait.REMOVABLE_BY_CONDITION)):
            return survival_at(node, places[0])
        return Survival(*(self._effect(node, value, kind) for kind in _SINGLE))

    def _effect(self, node: ir.Node, value: ir.Value, kind: Fate) -> Fate:
        """Return the effect on a node with bodies, a condition, or other operands that may depend on the number."""
        source, flow, positions = source_by_trait(value, Trait.VIEW), self._flow, self._positions
        flow.elements = {source: Effect(kind), value: Effect(kind)}
        around = [self._nearest(each) for each in inputs_of(node) if each is not value]
        if any(source in values or value in values for values in around):  # else nothing but the operand depends on it
            makers = producers_of(each for values in around for each in values if each is not value)
            flow.visit_all(sorted(makers & positions.keys(), key=positions.__getitem__))
        # A number is gone if it is in none of the results.
        fates = [effect.fate for effect in flow.evaluate(node)]
        is_gone = all(Fate.GONE in each or not each & KINDS for each in fates)
        fate = union(fates) | Fate.GONE if is_gone else union(fates) & ~Fate.GONE
        return fate | kind if Fate.TOLD in fate and subgraphs(node) else fate


def _nearest_above(value: ir.Value) -> frozenset[ir.Value]:
    """Return a value, and the nearest values above it: those that may decide a condition."""

    def operands(each: ir.Value) -> Iterable[ir.Value]:
        node = each.producer()
        return () if node is None or reads_shape(node) else inputs_of(node)

    return frozenset(itertools.islice(reach([value], operands), _NEAR))


def is_empty(node: ir.Node) -> bool:
    """Return whether a node's result has no elements: zero repeats, or an axis of length 0."""
    if any(value.shape is not None and 0 in value.shape.dims for value in node.outputs):
        return True
    if node.op_type in ("Tile", "Expand", "ConstantOfShape"):
        counts = constant_tensor(node.inputs[-1])
        if counts is None:  # A fed number may be zero.
            above = _nearest_above(inputs_of(node)[-1]) if node.op_type == "Tile" else ()
            return any(leaf.is_graph_input() and leaf.dtype is ir.DataType.INT64 for leaf in above)
        return counts.size < _FEW and bool((counts.numpy() == 0).any())
    if not has_trait(node, Trait.ELEMENTWISE):
        return False
    tensors = map(constant_tensor, node.inputs)
    if any(tensor is not None and tensor.size == 0 for tensor in tensors):
        return True
    fills = (value.producer() for value in inputs_of(node))
    return any(fill is not None and fill.op_type == "ConstantOfShape" and is_empty(fill) for fill in fills)
