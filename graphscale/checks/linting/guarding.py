"""Rules on the guards of carried state: GS401 to GS406."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import onnx_ir as ir

from graphscale.analysis.updates import same_type
from graphscale.checks.linting.check import Check
from graphscale.checks.linting.lint_context import LintContext, rule
from graphscale.checks.linting.lint_report import Finding, report
from graphscale.checks.linting.state_search import Carry, State
from graphscale.checks.patterns import input_at, producer, skip_ordering, update_signal
from graphscale.flow.outcome import Number, Outcomes, is_kept
from graphscale.flow.support import reach
from graphscale.graph.cones import producers_of
from graphscale.graph.values import constant_tensor, inputs_of, is_scalar, op_name
from graphscale.graph.walks import is_contradiction, source_by_trait
from graphscale.operators import Trait, has_trait, optimizer_of

__all__: list[str] = []


@rule("GS401", "GS402", "GS403", "GS404", "GS405", "GS406")
def _guards(context: LintContext) -> Iterator[Finding]:
    if context.check is None or context.outcomes is None:
        return
    guards = _Guards(context, context.check, *context.outcomes)
    kept = {state: guards.keeps(state) for state in context.states}
    adjusts = context.scale is not None and context.scale.adjusts
    # If no value depends on the check, the decision on a step is made outside of the graph.
    if adjusts or any(kept.values()) or any(guards.depends(state) for state in context.states):
        found = (guards.never_changes(state) if kept[state] else guards.explain(state) for state in kept)
        yield from (finding for finding in found if finding is not None)


class _Guards:
    """The effects of a skipped step on carried state."""

    def __init__(self, context: LintContext, check: Check, good: Outcomes, bad: Outcomes) -> None:
        self.context, self.check = context, check
        self.good, self.bad = good, bad
        self._flags = context.flags
        products = [value for node in bad.products for value in node.outputs]
        self._after_products = context.descendants(products)

    def depends(self, state: State) -> bool:
        """Return whether the next value of a state depends on the check."""
        operands = (state.next,) if state.node is None else inputs_of(state.node)
        return not self.check.dependent.isdisjoint(operands)

    def keeps(self, state: State) -> bool:
        """Return whether a skipped step leaves a state unchanged."""
        if state.carry is Carry.ADD:
            # An accumulator with a tested buffer keeps non-finite numbers.
            is_examined = state.node is not None and not self._tested_later.isdisjoint(state.node.outputs[1:])
            return is_examined or self._adds_nothing(state) or self._only_accumulates
        if state.carry is Carry.OPTIMIZER:
            signal = None if state.node is None else update_signal(state.node)
            return signal is not None and self.bad.of(signal) is False
        return is_kept(self.bad.of(state.next), state.value)

    def _adds_nothing(self, state: State) -> bool:
        outcome, flag = self.bad.of(state.next), None if state.node is None else input_at(state.node, 2)
        # A buffer may be overwritten with itself; without the flag it would be doubled.
        is_same = outcome is state.value and flag is not None and self.bad.of(flag) is True
        return is_same or outcome is Number.ZERO

    @functools.cached_property
    def _tested_later(self) -> set[ir.Value]:
        return self.context.ancestors(self.context.nexts.values())

    @functools.cached_property
    def _only_accumulates(self) -> bool:
        """True if the graph adds up gradients, unguarded, up to a reset by the caller, and updates no weight itself.

        The graph that applies the sums tests them: in a training session the optimizer model does.
        """
        sums = [state for state in self.context.states if state.carry is Carry.ADD]
        flags = [input_at(state.node, 2) for state in sums if state.node is not None]
        return (
            all(flag is not None and flag.is_graph_input() for flag in flags)
            and not any(self._adds_nothing(state) for state in sums)
            and not any(self._is_fed(state.next) for state in self.context.states if state.carry is not Carry.ADD)
        )

    def never_changes(self, state: State) -> Finding | None:
        """Return the finding on a selection between equal states."""
        value, node = state.value, producer(_viewed(state.next), "Where")
        is_selected = node is not None and state.carry in (Carry.OUTPUT, Carry.WRITE)
        if node is None or not is_selected or self.good.of(state.next) is not value or not self.depends(state):
            return None
        # A graph that passes a state on selects its copy: no update is lost.
        if any(branch is not value for branch in node.inputs[1:]) and not self._loses_update(value):
            return None
        return report("GS403", f"{value.name!r} keeps its value whether or not the check holds", node, value)

    def _loses_update(self, state: ir.Value) -> bool:
        """Return whether a value like a state is computed from the state and gradients, but has no readers."""
        alike = (value for value in self._unread if same_type(value, state) and value in self.context.sources)
        return any(state in self.context.ancestors([value]) for value in alike)

    @functools.cached_property
    def _unread(self) -> list[ir.Value]:
        values = (value for node in self.context.nodes for value in node.outputs)
        return [value for value in values if not value.uses() and not value.is_graph_output()]

    def explain(self, state: State) -> Finding | None:
        """Return the finding on the guard of a state that is not kept, None for a correct one."""
        name, value, new = repr(state.value.name), state.value, state.next
        check = repr(self.check.value.name)
        node = state.node or new.producer()
        adam = _viewed(new).producer()
        if adam is not None and _ignored_signal(adam) is not None:
            return report("GS406", f"{name} is updated by {adam.op_type} whatever update_signal says", adam, value)
        if self._is_own_bookkeeping(state) or self._is_record(state):
            return None
        if state.carry not in (Carry.ADD, Carry.OPTIMIZER) and is_kept(self.good.of(new), value):
            return report("GS403", f"{name} keeps its value if {check} holds, and changes if not", node, value)
        if new in self._after_products:
            return report("GS405", f"{name} is changed by 0 times a gradient that may not be finite", node, value)
        select = self._other_select(state)
        if select is not None:
            condition = select.inputs[0]
            is_constant = constant_tensor(condition) is not None
            what = "a constant" if is_constant else repr(condition.name if condition else "?")
            return report("GS402", f"{name} is selected by {what}, which is not {check}", select, value)
        if self._is_counter(state) and not self.depends(state):
            return report("GS404", f"{name} counts on whether or not {check} holds", node, value)
        how = "" if state.node is None else f" by {op_name(state.node)}"
        return report("GS401", f"{name} changes{how} also if {check} fails", node, value)

    def _is_own_bookkeeping(self, state: State) -> bool:
        """Return whether a state counts steps or skips on purpose: a scalar without effect on weights and moments."""
        if not self._is_counter(state) or not self.depends(state):
            return False
        reach = self.context.descendants([state.value], stop=self._flags)
        return not any(other.next in reach and not is_scalar(other.value) for other in self.context.states)

    def _is_record(self, state: State) -> bool:
        """Return whether a state only keeps measurements of an If, and is no operand of other values."""
        new, descendants = skip_ordering(state.next), self.context.descendants
        node = new.producer()
        if node is None or node.op_type != "If":
            return False
        readers = producers_of(descendants([state.value], stop={*node.outputs}))
        is_kept = all(n.op_type == "Identity" or has_trait(n, Trait.ACCUMULATOR) for n in readers)
        below = descendants([new])
        return is_kept and not any(other.next in below for other in self.context.states if other is not state)

    def _is_counter(self, state: State) -> bool:
        is_number = state.carry in (Carry.OUTPUT, Carry.WRITE) and is_scalar(state.value)
        return is_number and not self._is_fed(state.next)

    def _is_fed(self, value: ir.Value) -> bool:
        """Return whether numbers computed from gradients flow into a value, except through a condition."""
        node = value.producer()
        return node is not None and not self._fed.isdisjoint(inputs_of(node))

    @functools.cached_property
    def _fed(self) -> set[ir.Value]:
        dependent, sources = self.check.dependent, self.context.sources - self._flags
        of_check = {v for v in dependent & sources if is_scalar(v) or self.context.is_bookkeeping(v)}
        return reach(self.context.nodes, sources - of_check, self._flags)

    def _other_select(self, state: State) -> ir.Node | None:
        """Return a selection between the state and another value, without an effect of the check."""
        ends = () if state.carry is Carry.OPTIMIZER else (skip_ordering(state.next), self.good.of(state.next))
        for value in ends:
            node = producer(_viewed(value), "Where") if isinstance(value, ir.Value) else None
            if node is not None and any(_viewed(branch) is state.value for branch in inputs_of(node)[1:]):
                condition = inputs_of(node)[0]
                decided = isinstance(self.bad.of(condition), bool) and condition in self.check.dependent
                if not (decided or is_contradiction(condition)):
                    return node
        return None


def _ignored_signal(node: ir.Node) -> ir.Value | None:
    """Return the update signal of an optimizer whose kernel ignores it."""
    optimizer = optimizer_of(node)
    return update_signal(node) if optimizer is not None and optimizer.ignores_signal else None


def _viewed(value: ir.Value) -> ir.Value:
    return source_by_trait(value, Trait.VIEW)


@rule("GS406")
def _ignored_signals(context: LintContext) -> Iterator[Finding]:
    """Find, without a check, each optimizer with a foreign signal that it ignores."""
    for node in context.nodes if context.check is None else ():
        signal = _ignored_signal(node)
        is_output = any(value.is_graph_output() for value in node.outputs)
        if signal is not None and constant_tensor(signal) is None and is_output:
            yield report("GS406", f"{node.op_type} is to skip by {signal.name!r}", node, signal)
