"""The finite check: its search, and its coverage of gradients, from its result up, with the nodes that lose one."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator

import onnx_ir as ir

from graphscale.checks.linting.view import View
from graphscale.checks.patterns import is_comparison, update_signal
from graphscale.flow.showing import Coverage, Effects, shown_kinds, union
from graphscale.flow.survival import Loss
from graphscale.graph.values import captured_values, constant_number, inputs_of, reads_shape, subgraphs
from graphscale.graph.walks import is_contradiction, reach, source_by_trait
from graphscale.operators import KINDS, Fate, Trait, has_trait, nodes_with, survival_of

__all__ = ["INFINITY", "Check", "find_flag", "is_hiding"]

# The tests that are true for finite numbers, and those that are false.
_TRUE = {"IsAllFinite", "IsFinite", "Less", "LessOrEqual"}
_FALSE = {"IsNaN", "IsInf", "Greater", "GreaterOrEqual"}
INFINITY = Fate.PLUS | Fate.MINUS
_QUANTIZING = ("QuantizeLinear", "DynamicQuantizeLinear")


def find_flag(
    view: View, sources: Collection[ir.Value], states: Collection[ir.Value], numbers: Collection[ir.Value]
) -> ir.Value | None:
    """Find the flag that decides on a step: the last one that most conditions depend on.

    The `sources` are the values that gradients are computed from, the `numbers` the next values of the loss scale's
    state.
    """
    tests = (node for node in view.nodes if _is_test(node) and any(v in sources for v in view.operands(node)))
    # A flag that a body chooses is not the test itself.
    data = {v for node in view.nodes for v in node.outputs if subgraphs(node) or not view.is_logic(v)}
    below = view.descendants((value for node in tests for value in node.outputs), data)
    flags = [value for node in view.nodes for value in node.outputs if value in below and value in view.flags]
    conditions = Counter(condition for node in view.nodes for condition in _conditions(node, states))
    decided = Counter[ir.Value]()
    for condition, count in conditions.items():
        decided.update(dict.fromkeys(view.ancestors([condition], lambda value: value not in below), count))
    most = max((decided[flag] for flag in flags), default=0)
    for likely in ({v for v in flags if decided[v] == most > 0}, view.ancestors(numbers), set(view.graph.outputs)):
        flag = next((value for value in reversed(flags) if value in likely), None)
        while flag is not None and (above := _restricted(view, flag, below)) is not None:
            flag = above
        if flag is not None:
            return flag
    return None


def _restricted(view: View, flag: ir.Value, below: Collection[ir.Value]) -> ir.Value | None:
    """Return the flag that another one views, or adds a condition to, such as that of a stuck scale."""
    node = flag.producer()
    is_known = node is not None and (node.op_type in ("And", "Or") or has_trait(node, Trait.VIEW))
    operands = [value for value in inputs_of(node) if value in below] if node is not None and is_known else []
    if len(operands) < 2:
        return next(iter(operands), None)
    both = zip(operands, reversed(operands), strict=True)
    return next((v for v, other in both if v in view.ancestors([other], lambda each: each not in below)), None)


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
        tested: the coverage by all elements, where no other use of a value bends a number before it is tested.
        shown: the coverage of the elements that are passed on, by any path.
        needed: the values with other uses than the check: the gradients, and the values above them.
        dependent: the result, and the values that depend on it.
    """

    def __init__(self, view: View, value: ir.Value, sources: Collection[ir.Value]) -> None:
        self.view, self.value, self.sources = view, value, sources
        self._effects = Effects(view.positions)
        self.tested, self.shown = (Coverage(self._effects, of_all=of_all) for of_all in (True, False))
        self.dependent = frozenset(view.descendants([value]))
        self.fails_as = self._polarity()
        # The values of a flag, or a number made of flags, that mean failure; None if unknown.
        self._meanings: dict[ir.Value, set[bool | None]] = {value: {self.fails_as}}
        # The walk goes up from all outputs and in-place updates, but not through the check.
        ends = [each for each in view.graph.outputs if each is not value]
        ends += [each for node in nodes_with(view.nodes, Trait.ACCUMULATOR) for each in inputs_of(node)]
        self.needed = view.ancestors(ends, stop=lambda each: each is value)
        end = value.producer()
        for node in reversed(view.nodes[: 0 if end is None else view.positions[end] + 1]):
            meanings = set().union(*(self._meanings.get(value, ()) for value in node.outputs))
            if meanings:
                self._through_flags(node, meanings)
            elif not reads_shape(node):
                operands = [each for each in dict.fromkeys(view.operands(node)) if each in sources]
                if self.needed.isdisjoint(node.outputs) or _is_exact(node, sources):
                    self.tested.pass_up(node, operands)
                # A flag shows nothing by itself: it selects.
                if view.flags.isdisjoint(node.outputs):
                    self.shown.pass_up(node, operands)

    def covers(self, value: ir.Value) -> bool:
        """Return whether a value is tested for NaN and infinity."""
        return self.tested.kinds.get(value) == KINDS

    def _polarity(self) -> bool:
        """Return the value of the result that means failure, by the nearest test."""

        def above(flag: tuple[ir.Value, bool]) -> list[tuple[ir.Value, bool]]:
            node = flag[0].producer()
            return [] if node is None else [(v, flag[1] != self._is_negation(node)) for v in self._flags_of(node)]

        for value, sign in reach([(self.value, True)], above):
            node = value.producer()
            if node is not None and self.view.counts.isdisjoint(node.inputs) and node.op_type in _TRUE | _FALSE:
                return sign == (node.op_type in _FALSE)
        return False

    def _flags_of(self, node: ir.Node) -> list[ir.Value]:
        return [value for value in inputs_of(node) if self.view.is_logic(value)]

    def _is_negation(self, node: ir.Node) -> bool:
        """Return whether a node is a negation, or a comparison of a count that is true for the count 0."""
        if not is_comparison(node):
            return node.op_type == "Not"
        if node.op_type == "Equal":
            return next((n for v in node.inputs if (n := constant_number(v)) is not None), None) == 0
        return node.op_type.startswith("Less") == (node.inputs[0] in self.view.counts)

    def _through_flags(self, node: ir.Node, meanings: set[bool | None]) -> None:
        flags, flips = self._flags_of(node), self._is_negation(node)
        if has_trait(node, Trait.FINITENESS_TEST):
            for value in inputs_of(node):
                tested = survival_of(node, 0)
                self._test(node, value, union(kind for kind in KINDS if Fate.TOLD in tested.through(kind)))
        elif is_comparison(node) and not flags:
            for i, value in enumerate(inputs_of(node)):
                results = _compare(node, i).items()
                self._test(node, value, union(kind for kind, result in results if meanings & {result, None}))
        elif node.op_type not in ("And", "Or") or not self._hides(node, meanings):
            passed = {None} if node.op_type == "Where" else {m if m is None else m != flips for m in meanings}
            for value in flags:
                self._meanings.setdefault(value, set()).update(passed)
        if has_trait(node, Trait.CAST) and not flags:
            self._test(node, node.inputs[0], Fate.NONE)  # a flag of nonzero numbers, such as NaN
        # The branches of an If count as a test of their captures.
        for value in captured_values(node):
            self._test(node, value, shown_kinds(self._effects.of(node, value), KINDS))

    def _hides(self, node: ir.Node, meanings: set[bool | None]) -> bool:
        """Return whether a failure never shows (`finite or true`), or only if both operands fail (`one or other`)."""
        if any(constant_number(value) == float(node.op_type == "Or") for value in node.inputs):
            return True
        if meanings != {node.op_type == "And"}:
            return False
        above = [self.view.ancestors([value]) for value in set(inputs_of(node))]
        return len(above) == 2 and all(self.value not in a and not a.isdisjoint(self.sources) for a in above)

    def _test(self, node: ir.Node, value: ir.Value | None, kinds: Fate) -> None:
        """Record the kinds of numbers in a value that a test notices."""
        if value is not None and value in self.sources:
            self.tested.see(value, kinds, {kind: Loss(node, value, kind) for kind in KINDS & ~kinds})
            self.shown.see(value, kinds, {})


def _compare(node: ir.Node, index: int) -> dict[Fate, bool]:
    """Return the results of a comparison that show the kinds of numbers in an operand: false for every NaN."""
    other = node.inputs[1 - index]
    if other is node.inputs[index]:
        return {Fate.NAN: False}  # infinity equals itself
    limit = constant_number(other)
    if node.op_type == "Equal" and limit is not None and math.isinf(limit):
        return {Fate.PLUS if limit > 0 else Fate.MINUS: True}
    # x > c is true for infinity and false for minus infinity, x < c the other way around, x = c false for both.
    is_greater = node.op_type.startswith("Greater") == (index == 0)
    is_equal = node.op_type == "Equal"
    return {Fate.PLUS: is_greater and not is_equal, Fate.MINUS: not is_greater and not is_equal, Fate.NAN: False}


def _is_exact(node: ir.Node, sources: Collection[ir.Value]) -> bool:
    """Return whether a node's result is finite exactly if its operand is: a view, a cast, a product with a scalar."""
    data = [i for i, v in enumerate(node.inputs) if v in sources]
    is_scaled = data == [0] or (node.op_type == "Mul" and len(data) == 1)
    return has_trait(node, Trait.EXACT | Trait.ACCUMULATOR) or (node.op_type in ("Mul", "Div") and is_scaled)


def is_hiding(node: ir.Node) -> bool:
    """Return whether a node that loses a number converts or replaces it, instead of bounding or comparing it."""
    return has_trait(node, Trait.CAST) or node.op_type in (*_QUANTIZING, "Where") or any(subgraphs(node))
