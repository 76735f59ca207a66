"""The search for the finite check of a graph."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from itertools import permutations

import onnx_ir as ir

from graphscale.checks.linting.check import Check, is_comparison
from graphscale.checks.linting.state_search import State
from graphscale.checks.linting.view import View, number_of
from graphscale.checks.patterns import is_contradiction, update_signal
from graphscale.graph.values import inputs_of
from graphscale.graph.walks import source_by_trait
from graphscale.operators import Trait, has_trait

__all__ = ["find_check"]


def find_check(
    view: View,
    given: ir.Value | None,
    sources: Collection[ir.Value],
    states: Iterable[State],
    numbers: Iterable[ir.Value],
) -> Check | None:
    """Find the finite check and its coverage.

    Args:
        view: the graph.
        given: its result, where the metadata name it.
        sources: the values that gradients consist of: those that the loss scale reaches.
        states: the carried state.
        numbers: the next values of the loss scale's state.
    """
    value = given if given is not None else _Search(view, sources).best(list(states), list(numbers))
    return None if value is None else Check(view, value, sources)


class _Search:
    """The search for the flag that decides about a step."""

    def __init__(self, view: View, sources: Collection[ir.Value]) -> None:
        self.view = view
        self.flags: set[ir.Value] = set()
        self._roots: dict[ir.Value, ir.Value | None] = {}
        for node in view.nodes:
            operands = list(view.operands(node))
            if (_is_test(node) and any(operand in sources for operand in operands)) or (
                any(operand in self.flags for operand in operands) and _is_logic(node, operands, self.flags)
            ):
                self.flags.update(node.outputs)

    def best(self, states: list[State], numbers: list[ir.Value]) -> ir.Value | None:
        counts: dict[ir.Value, int] = {}
        leaves = {state.value for state in states}
        for node in self.view.nodes:
            for condition in _conditions(node, leaves):
                if condition not in self._roots:
                    self._roots[condition] = self._root(condition)
                root = self._roots[condition]
                if root is not None:
                    counts[root] = counts.get(root, 0) + 1
        if counts:
            return max(counts, key=lambda value: counts[value])
        ends = self.view.ancestors(numbers) if numbers else set()
        for candidates in (ends, set(self.view.graph.outputs)):
            last = [v for node in self.view.nodes for v in node.outputs if v in self.flags and v in candidates]
            if last:
                return self._root(last[-1])
        return None

    def _root(self, value: ir.Value) -> ir.Value | None:
        """Return the flag at the root of a condition, past views, negations and other flags."""
        while value in self.flags:
            node = value.producer()
            if node is None or _is_test(node):
                return value
            operands = [operand for operand in inputs_of(node) if operand in self.flags]
            below = operands[0].producer()
            # The negation of a test is the flag itself: `not any_nan`.
            is_negation = node.op_type == "Not" and not (below is not None and _is_test(below))
            is_logic = node.op_type in ("And", "Or")
            if is_logic and len(operands) == 2:
                above = (v for v, w in permutations(operands) if v in self.view.ancestors([w], stop={v}.__contains__))
                value, last = next(above, value), value
                if value is last:
                    return value
            elif has_trait(node, Trait.VIEW) or is_negation or (is_logic and len(operands) == 1):
                value = operands[0]
            else:
                return value
        return None


def _conditions(node: ir.Node, states: Collection[ir.Value]) -> Iterator[ir.Value]:
    """Yield the condition of a node that selects between a state and something else, or switches an optimizer."""
    if node.op_type == "Where" and node.inputs[0] is not None:
        branches = [source_by_trait(value, Trait.VIEW) for value in node.inputs[1:] if value is not None]
        if not is_contradiction(node.inputs[0]) and any(value in states for value in branches):
            yield node.inputs[0]
    elif node.op_type == "If" and node.inputs[0] is not None:
        yield node.inputs[0]
    elif (signal := update_signal(node)) is not None:
        yield signal


def _is_test(node: ir.Node) -> bool:
    return has_trait(node, Trait.FINITENESS_TEST) or is_comparison(node)


def _is_logic(node: ir.Node, operands: list[ir.Value], flags: Collection[ir.Value]) -> bool:
    """Return whether a node computes with flags alone: logic, counting, selecting between constants."""
    if node.op_type in ("Not", "And", "Or", "Xor") or has_trait(node, Trait.VIEW) or is_comparison(node):
        return True
    if has_trait(node, Trait.REDUCTION) or node.op_type in ("Add", "Sum", "Mul", "Max", "Min", "Concat", "Where"):
        return all(operand in flags or number_of(operand) is not None for operand in node.inputs if operand is not None)
    return False
