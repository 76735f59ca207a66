"""The fate of NaN and infinity in a node: the non-finite numbers of an operand that its results show."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable

import onnx_ir as ir

from graphscale.checks.linting.view import View, nearest_above
from graphscale.flow.survival import Effect, SurvivalDomain, survival_at
from graphscale.graph.values import constant_tensor, inputs_of, subgraphs
from graphscale.graph.walks import source_by_trait
from graphscale.operators import KINDS, Fate, Survival, Trait, has_trait, survival_of

__all__ = ["INFINITY", "effects_on", "is_empty", "is_hiding", "kinds_of_test", "shown_kinds"]

INFINITY = Fate.PLUS | Fate.MINUS
_QUANTIZING = ("QuantizeLinear", "DynamicQuantizeLinear")
_SINGLE = (Fate.PLUS, Fate.MINUS, Fate.NAN)
# Numbers of repeats that are read.
_FEW = 50


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


def effects_on(view: View, node: ir.Node, value: ir.Value) -> Survival:
    """Return the effects of the numbers in an operand, or in a value that bodies capture, on the results of a node."""
    if is_empty(node):
        return Survival(Fate.GONE, Fate.GONE, Fate.GONE)
    places = [i for i, each in enumerate(node.inputs) if each is value]
    if subgraphs(node) or has_trait(node, Trait.REMOVABLE_BY_CONDITION):
        return Survival(*(_effect_in_flow(view, node, value, kind) for kind in _SINGLE))
    if len(places) == 1:
        return survival_at(node, places[0])
    operands = [[Effect(kind if each is value else Fate.NONE) for each in node.inputs] for kind in _SINGLE]
    return Survival(*(_common(SurvivalDomain().transfer(node, each)) for each in operands))


def _effect_in_flow(view: View, node: ir.Node, value: ir.Value, kind: Fate) -> Fate:
    """Return the effect on a node with bodies, or with a condition, which may depend on the number itself."""
    source = source_by_trait(value, Trait.VIEW)
    flow = view.survival
    flow.elements = {source: Effect(kind), value: Effect(kind)}
    around = [view.nearest_above(each) for each in inputs_of(node) if each is not value]
    if any(source in values or value in values for values in around):  # else nothing but the operand depends on it
        makers = {maker for values in around for each in values if each is not value and (maker := each.producer())}
        flow.visit_all(sorted((maker for maker in makers if maker in view.positions), key=view.positions.__getitem__))
    fate = _common(flow.evaluate(node))
    return fate | kind if Fate.TOLD in fate and subgraphs(node) else fate


def _common(effects: Iterable[Effect]) -> Fate:
    """Return the effect on the results together: a number is gone if it is in none of them."""
    fates = [effect.fate for effect in effects]
    fate = functools.reduce(operator.or_, fates, Fate.NONE)
    return fate | Fate.GONE if all(Fate.GONE in each or not each & KINDS for each in fates) else fate & ~Fate.GONE


def is_hiding(node: ir.Node) -> bool:
    """Return whether a node that loses a number converts or replaces it, instead of bounding or comparing it."""
    return has_trait(node, Trait.CAST) or node.op_type in (*_QUANTIZING, "Where") or any(subgraphs(node))


def kinds_of_test(node: ir.Node) -> Fate:
    """Return the kinds of numbers that a test for finiteness notices."""
    tested = survival_of(node, 0)
    return functools.reduce(operator.or_, (kind for kind in KINDS if Fate.TOLD in tested.through(kind)), Fate.NONE)


@functools.lru_cache(maxsize=64)  # walks call this for each operand of a node; lint clears the cache
def is_empty(node: ir.Node) -> bool:
    """Return whether a node's result has no elements: zero repeats, or an axis of length 0."""
    if any(value.shape is not None and 0 in value.shape.dims for value in node.outputs):
        return True
    if node.op_type in ("Tile", "Expand", "ConstantOfShape"):
        counts = constant_tensor(node.inputs[-1])
        if counts is None:  # A fed number may be zero.
            leaves = nearest_above(node.inputs[-1]) if node.op_type == "Tile" and node.inputs[-1] is not None else ()
            return any(leaf.is_graph_input() and leaf.dtype is ir.DataType.INT64 for leaf in leaves)
        return counts.size < _FEW and bool((counts.numpy() == 0).any())
    if not has_trait(node, Trait.ELEMENTWISE):
        return False
    tensors = map(constant_tensor, node.inputs)
    if any(tensor is not None and tensor.size == 0 for tensor in tensors):
        return True
    fills = (value.producer() for value in inputs_of(node))
    return any(fill is not None and fill.op_type == "ConstantOfShape" and is_empty(fill) for fill in fills)
