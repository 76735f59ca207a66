"""The finite check: its search, and its coverage of gradients, from its result up, with the nodes that lose one."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from itertools import permutations
from typing import TypeAlias

import onnx_ir as ir

from graphscale.checks.linting.noticing import effects_on, kinds_of_test, shown_kinds
from graphscale.checks.linting.view import View
from graphscale.checks.patterns import is_comparison, update_signal
from graphscale.flow.support import reach
from graphscale.graph.values import constant_number, inputs_of, is_tensor, reads_shape, subgraphs
from graphscale.graph.walks import is_contradiction, source_by_trait
from graphscale.operators import KINDS, Fate, Survival, Trait, has_trait, nodes_with

__all__ = ["Check", "Loss", "find_flag"]

# A node that loses a number, and the kind that the number has become there.
Loss: TypeAlias = tuple[ir.Node, Fate]


def find_flag(
    view: View, sources: Collection[ir.Value], states: Collection[ir.Value], numbers: Collection[ir.Value]
) -> ir.Value | None:
    """Find the flag that decides on a step: at the root of most conditions, or the last one.

    The `sources` are the values that gradients are computed from, the `numbers` the next values of the loss scale's
    state.
    """
    tests = (node for node in view.nodes if _is_test(node) and any(v in sources for v in view.operands(node)))
    data = {value for node in view.nodes for value in node.outputs} - view.logic
    flags = reach(view.nodes, (value for node in tests for value in node.outputs), data)
    root_of = functools.cache(lambda condition: _root(view, flags, condition))
    roots = (root_of(condition) for node in view.nodes for condition in _conditions(node, states))
    for root, _ in Counter(root for root in roots if root is not None).most_common(1):
        return root
    for candidates in (view.ancestors(numbers), set(view.graph.outputs)):
        last = [v for node in view.nodes for v in node.outputs if v in flags and v in candidates]
        if last:
            return _root(view, flags, last[-1])
    return None


def _root(view: View, flags: Collection[ir.Value], value: ir.Value) -> ir.Value | None:
    """Return the flag at the root of a condition, past views, negations and other flags."""
    while value in flags:
        node = value.producer()
        if node is None or _is_test(node):
            return value
        operands = [operand for operand in inputs_of(node) if operand in flags]
        below = operands[0].producer()
        # The negation of a test is the flag itself: `not any_nan`.
        is_negation = node.op_type == "Not" and not (below is not None and _is_test(below))
        is_logic = node.op_type in ("And", "Or")
        if is_logic and len(operands) == 2:
            above = (v for v, w in permutations(operands) if v in view.ancestors([w], stop={v}.__contains__))
            value, last = next(above, value), value
            if value is last:
                return value
        elif has_trait(node, Trait.VIEW) or is_negation or (is_logic and len(operands) == 1):
            value = operands[0]
        else:
            return value
    return None


def _conditions(node: ir.Node, states: Collection[ir.Value]) -> Iterator[ir.Value]:
    """Yield the condition of a node that selects between a state and another value, or switches an optimizer."""
    if node.op_type in ("Where", "If") and (condition := node.inputs[0]) is not None:
        branches = (source_by_trait(value, Trait.VIEW) for value in node.inputs[1:] if value is not None)
        selects = not is_contradiction(condition) and any(value in states for value in branches)
        if selects or node.op_type == "If":
            yield condition
    elif (signal := update_signal(node)) is not None:
        yield signal


def _is_test(node: ir.Node) -> bool:
    return has_trait(node, Trait.FINITENESS_TEST) or is_comparison(node)


class Check:
    """The finite check of a graph, and its coverage: from its result up to the values that it tests.

    Attributes:
        value: the result.
        sources: the values that gradients are computed from.
        fails_as: the value of the result if a gradient is not finite: False for `all_finite`, True for `overflow`.
        sees: for values, the kinds of numbers that the check notices.
        shown: for values, the kinds of numbers that reach a tested value, which another use may bend.
        lost: for values with a partial check, `{kind: (the node that loses it, the kind that it has become there)}`.
        needed: the values with other uses than the check: the gradients, and the values above them.
        dependent: the result, and the values that depend on it.
    """

    def __init__(self, view: View, value: ir.Value, sources: Collection[ir.Value]) -> None:
        self.view = view
        self.value = value
        self.sources = sources
        self.sees: dict[ir.Value, Fate] = {}
        self.shown: dict[ir.Value, Fate] = {}
        self.lost: dict[ir.Value, dict[Fate, Loss]] = {}
        self.effects = functools.cache(functools.partial(effects_on, view))
        self.dependent = frozenset(view.descendants([value]))
        self.fails_as = self._polarity()
        # The values of a flag, or a number made of flags, that mean failure; None if unknown.
        self._meanings: dict[ir.Value, set[bool | None]] = {value: {self.fails_as}}
        # The walk goes up from all outputs and in-place updates, but not through the check.
        ends = [each for each in view.graph.outputs if each is not value]
        ends += [each for node in nodes_with(view.nodes, Trait.ACCUMULATOR) for each in inputs_of(node)]
        self.needed = view.ancestors(ends, stop=lambda each: each is value)
        end = value.producer()
        for node in reversed(view.nodes[: 0 if end is None else view.nodes.index(end) + 1]):
            meanings = set().union(*(self._meanings.get(value, ()) for value in node.outputs))
            if meanings:
                self._through_flags(node, meanings)
            elif not reads_shape(node):
                self._through_numbers(node)

    def _through_numbers(self, node: ir.Node) -> None:
        is_seen = self.needed.isdisjoint(node.outputs) or _is_exact(node, self.sources)
        kinds, lost, shown = Fate.NONE, dict[Fate, Loss](), Fate.NONE
        for value in node.outputs:
            # A flag shows nothing by itself: it selects.
            shown |= Fate.NONE if value in self.view.flags else self.shown.get(value, Fate.NONE)
            kinds |= self.sees.get(value, Fate.NONE) if is_seen else Fate.NONE
            lost |= self.lost.get(value, {}) if is_seen else {}
        operands = dict.fromkeys(self.view.operands(node)) if kinds or lost or shown else ()
        for operand in (each for each in operands if each in self.sources):
            effects = self.effects(node, operand)
            self.shown[operand] = self.shown.get(operand, Fate.NONE) | shown_kinds(effects, shown, False)
            if kinds or lost:
                # The members of a sequence are tested one by one.
                passed = shown_kinds(effects, kinds, is_tensor(operand))
                other = node if kinds else next(iter(lost.values()))[0]
                self._see(operand, passed, {k: _cause(k, effects, lost) or (other, k) for k in KINDS & ~passed})

    def covers(self, value: ir.Value) -> bool:
        """Return whether a value is tested for NaN and infinity."""
        return self.sees.get(value) == KINDS

    def _flags_of(self, node: ir.Node) -> list[ir.Value]:
        """Return the operands of a node that are flags, or numbers computed from flags."""
        return [v for v in inputs_of(node) if v in self.view.logic]

    def _polarity(self) -> bool:
        """Return the value of the result that means failure, by the tests."""
        pending: list[tuple[ir.Value, bool]] = [(self.value, True)]
        seen = {self.value}
        while pending:
            value, sign = pending.pop()
            node = value.producer()
            if node is None:
                continue
            if node.op_type in ("IsNaN", "IsInf", "Greater", "GreaterOrEqual") and not self._counts(node):
                return sign
            if node.op_type in ("IsAllFinite", "IsFinite", "Less", "LessOrEqual") and not self._counts(node):
                return not sign
            flips = self._is_negation(node)
            pending += [(flag, sign != flips) for flag in self._flags_of(node) if flag not in seen]
            seen.update(self._flags_of(node))
        return False

    def _counts(self, node: ir.Node) -> bool:
        return any(value in self.view.counts for value in node.inputs)

    def _is_negation(self, node: ir.Node) -> bool:
        """Return whether a node is a negation, or a comparison of a count that is true for the count 0."""
        if not is_comparison(node):
            return node.op_type == "Not"
        if node.op_type == "Equal":
            return next((n for v in node.inputs if (n := constant_number(v)) is not None), None) == 0
        return node.op_type.startswith("Less") == (node.inputs[0] in self.view.counts)

    def _through_flags(self, node: ir.Node, meanings: set[bool | None]) -> None:
        flags = self._flags_of(node)
        if has_trait(node, Trait.FINITENESS_TEST):
            kinds = kinds_of_test(node)
            for value in inputs_of(node):
                self._see(value, kinds, _lose(node, KINDS & ~kinds))
        elif is_comparison(node) and not self._counts(node) and not any(v in self.view.flags for v in flags):
            self._compare(node, meanings)
        elif node.op_type in ("And", "Or") and self._hides(node, meanings):
            return
        else:
            flips = self._is_negation(node)
            passed = {None} if node.op_type == "Where" else {m if m is None else m != flips for m in meanings}
            for value in flags:
                self._meanings.setdefault(value, set()).update(passed)
        data = node.inputs[0] if has_trait(node, Trait.CAST) and not flags else None
        if data is not None and data in self.sources:
            self._see(data, Fate.NONE, _lose(node, KINDS))  # a flag of nonzero numbers, such as NaN
        for body in subgraphs(node):
            # The branches of an If count as a test of their captures.
            for value in (v for inner in body for v in inputs_of(inner) if v.graph is not body and v in self.sources):
                seen = shown_kinds(self.effects(node, value), KINDS)
                self._see(value, seen, _lose(node, KINDS & ~seen))

    def _hides(self, node: ir.Node, meanings: set[bool | None]) -> bool:
        """Return whether a failure never shows (`finite or true`), or only if both operands fail (`one or other`)."""
        if any(constant_number(value) == float(node.op_type == "Or") for value in node.inputs):
            return True
        if meanings != {node.op_type == "And"}:
            return False
        above = [self.view.ancestors([value]) for value in set(inputs_of(node))]
        return len(above) == 2 and all(self.value not in a and not a.isdisjoint(self.sources) for a in above)

    def _compare(self, node: ir.Node, meanings: set[bool | None]) -> None:
        """Record the coverage of a comparison, which is false for every NaN."""
        first, second = node.inputs[0], node.inputs[1]
        if first is None or second is None:
            return
        true_fails, false_fails = bool(meanings & {True, None}), bool(meanings & {False, None})
        for value, other in ((first, second), (second, first)):
            if value not in self.sources:
                continue
            kinds = Fate.NAN if false_fails else Fate.NONE
            limit = constant_number(other)
            if node.op_type == "Equal" and limit is not None and math.isinf(limit):
                kinds = (Fate.PLUS if limit > 0 else Fate.MINUS) if true_fails else Fate.NONE
            elif node.op_type == "Equal":
                # All that differs from a finite number fails; but infinity equals itself.
                kinds |= Fate.PLUS | Fate.MINUS if false_fails and first is not second else Fate.NONE
            elif first is not second:
                # x > c is true for infinity and false for minus infinity, x < c the other way around.
                above, below = (true_fails, false_fails)
                if node.op_type.startswith("Greater") != (value is first):
                    above, below = below, above
                kinds |= (Fate.PLUS if above else Fate.NONE) | (Fate.MINUS if below else Fate.NONE)
            self._see(value, kinds, _lose(node, KINDS & ~kinds))

    def _see(self, value: ir.Value, kinds: Fate, lost: Mapping[Fate, Loss]) -> None:
        seen = self.sees.get(value, Fate.NONE) | kinds
        self.sees[value] = seen
        self.shown[value] = self.shown.get(value, Fate.NONE) | kinds
        self.lost[value] = {k: n for k, n in {**self.lost.get(value, {}), **lost}.items() if k not in seen}


def _lose(node: ir.Node, kinds: Fate) -> dict[Fate, Loss]:
    return {kind: (node, kind) for kind in kinds}


def _cause(kind: Fate, effects: Survival, lost: Mapping[Fate, Loss]) -> Loss | None:
    """Return the loss of what a kind of number becomes in a node: the kind itself first, as a sum keeps infinity."""
    return next((lost[k] for k in (kind, *KINDS) if k in lost and k in effects.through(kind)), None)


def _is_exact(node: ir.Node, sources: Collection[ir.Value]) -> bool:
    """Return whether a node's result is finite exactly if its operand is: a view, a cast, a product with a scalar."""
    data = [i for i, v in enumerate(node.inputs) if v in sources]
    is_scaled = data == [0] or (node.op_type == "Mul" and len(data) == 1)
    return has_trait(node, Trait.EXACT | Trait.ACCUMULATOR) or (node.op_type in ("Mul", "Div") and is_scaled)
