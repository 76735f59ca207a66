"""Rules on the guards of carried state: GS401 to GS406."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import onnx_ir as ir

from graphscale.checks.linting.check_search import Check
from graphscale.checks.linting.lint_context import Rule, Subject
from graphscale.checks.linting.lint_report import Finding, found
from graphscale.checks.linting.state_search import Carry, State
from graphscale.checks.linting.steps import Outcomes
from graphscale.checks.patterns import input_at, update_signal
from graphscale.graph.values import constant_tensor, inputs_of, is_scalar, op_name
from graphscale.graph.walks import reach, source_by_trait
from graphscale.operators import Trait, has_trait

__all__ = ["RULES"]

_ADAM = "AdamOptimizer"
# Selections one behind the other.
_DEPTH = 8


def _guards(subject: Subject) -> Iterator[Finding]:
    if subject.check is None or subject.good is None or subject.bad is None:
        return
    guards = _Guards(subject, subject.check, subject.good, subject.bad)
    kept = {state: guards.keeps(state) for state in subject.states}
    adjusts = subject.scale is not None and subject.scale.adjusts
    # Where nothing depends on the check, somebody outside of the graph decides what to do with a step.
    if adjusts or any(kept.values()) or any(guards.depends(state) for state in subject.states):
        for state, is_kept in kept.items():
            finding = guards.never_changes(state) if is_kept else guards.explain(state)
            if finding is not None:
                yield finding


class _Guards:
    """What a skipped step does to carried state.

    Args:
        subject: the model.
        check: its finite check.
        good: the step on which it holds.
        bad: the step on which it fails.
    """

    def __init__(self, subject: Subject, check: Check, good: Outcomes, bad: Outcomes) -> None:
        self.subject = subject
        self.check = check
        self.good = good
        self.bad = bad
        self._flags = {value for value, dtype in subject.view.dtypes.items() if dtype is ir.DataType.BOOL}
        products = [value for node in bad.products for value in node.outputs]
        self._after_products = subject.view.descendants(products)

    def depends(self, state: State) -> bool:
        """Whether the next value of a state depends on the check."""
        operands = (state.next,) if state.node is None else state.node.inputs
        return any(value in self.check.dependent for value in operands if value is not None)

    def keeps(self, state: State) -> bool:
        """Whether a skipped step leaves a state as it is."""
        outcome = self.bad.of(state.next)
        if state.carry is Carry.ADD:
            return self._adds_nothing(state) or self._is_examined(state) or self._only_accumulates
        if state.carry is Carry.OPTIMIZER:
            signal = None if state.node is None else update_signal(state.node)
            return signal is not None and self.bad.of(signal) is False
        return outcome is state.value

    def _adds_nothing(self, state: State) -> bool:
        outcome, node = self.bad.of(state.next), state.node
        if outcome is state.value:
            # The buffer is overwritten with itself; without the flag it would be doubled.
            flag = None if node is None else input_at(node, 2)
            return flag is not None and self.bad.of(flag) is True
        return not isinstance(outcome, ir.Value) and outcome == 0

    def _is_examined(self, state: State) -> bool:
        """Whether the buffer of an accumulator is what is tested, so that it keeps what is not finite."""
        return state.node is not None and any(value in self._tested_later for value in state.node.outputs[1:])

    @functools.cached_property
    def _tested_later(self) -> set[ir.Value]:
        nexts = () if self.subject.scale is None else self.subject.scale.nexts.values()
        return self.subject.view.ancestors(nexts)

    @functools.cached_property
    def _only_accumulates(self) -> bool:
        """Whether the graph adds up gradients, unguarded, until its caller resets them, and updates no weight itself.

        Whoever applies the sums tests them: in a training session the optimizer model does.
        """
        for state in self.subject.states:
            if state.carry is not Carry.ADD:
                if self._is_fed(state.next):
                    return False
            elif state.node is not None:
                flag = input_at(state.node, 2)
                if flag is None or not flag.is_graph_input() or self._adds_nothing(state):
                    return False
        return True

    def never_changes(self, state: State) -> Finding | None:
        """A selection between a state and itself."""
        node = _viewed(state.next).producer()
        if node is None or node.op_type != "Where" or state.carry not in (Carry.OUTPUT, Carry.WRITE):
            return None
        if self.good.of(state.next) is not state.value or not self.depends(state):
            return None
        return found("GS403", f"{state.value.name!r} keeps its value whether or not the check holds", node, state.value)

    def explain(self, state: State) -> Finding | None:
        """What is the matter with the guard of a state that is not kept; None if it is right so."""
        name, value, new = repr(state.value.name), state.value, state.next
        check = repr(self.check.value.name)
        node = state.node or new.producer()
        adam = _adam(state)
        if adam is not None:
            return found("GS406", f"{name} is updated by AdamOptimizer whatever update_signal says", adam, value)
        if self._is_own_bookkeeping(state):
            return None
        if state.carry not in (Carry.ADD, Carry.OPTIMIZER) and self.good.of(new) is value:
            return found("GS403", f"{name} keeps its value if {check} holds, and changes if not", node, value)
        if new in self._after_products:
            return found("GS405", f"{name} is changed by 0 times a gradient that may not be finite", node, value)
        select = self._other_select(state)
        if select is not None:
            condition = select.inputs[0]
            what = (
                "a constant" if constant_tensor(condition) is not None else repr(condition.name if condition else "?")
            )
            return found("GS402", f"{name} is selected by {what}, which is not {check}", select, value)
        if self._is_counter(state) and not self.depends(state):
            return found("GS404", f"{name} counts on whether or not {check} holds", node, value)
        how = "" if state.node is None else f" by {op_name(state.node)}"
        return found("GS401", f"{name} changes{how} also if {check} fails", node, value)

    def _is_own_bookkeeping(self, state: State) -> bool:
        """Whether a state counts steps or skips on purpose: a scalar that no weight or moment depends on."""
        if not self._is_counter(state) or not self.depends(state):
            return False
        reach = self.subject.view.descendants([state.value], stop=self._flags)
        return not any(other.next in reach and not is_scalar(other.value) for other in self.subject.states)

    def _is_counter(self, state: State) -> bool:
        if state.carry not in (Carry.OUTPUT, Carry.WRITE) or not is_scalar(state.value):
            return False
        return not self._is_fed(state.next)

    def _is_fed(self, value: ir.Value) -> bool:
        """Whether numbers computed from gradients flow into a value, other than by way of a condition."""

        def operands(value: ir.Value) -> list[ir.Value]:
            node = value.producer()
            if node is None or has_trait(node, Trait.FINITENESS_TEST):
                return []
            return [operand for operand in inputs_of(node) if operand not in self._flags]

        above = reach(operands(value), operands)
        return any(operand in self.subject.sources and not self._is_of_check(operand) for operand in above)

    def _is_of_check(self, value: ir.Value) -> bool:
        """Whether the check, rather than a gradient itself, has an effect on a value."""
        scale = self.subject.scale
        if value not in self.check.dependent:
            return False
        return is_scalar(value) or (scale is not None and value in scale.scalars.values)

    def _other_select(self, state: State) -> ir.Node | None:
        """A selection between the state and something else that the check does not decide."""
        if state.carry is Carry.OPTIMIZER:
            return None
        value = _viewed(state.next)
        for _ in range(_DEPTH):
            node = value.producer()
            if node is None or node.op_type != "Where":
                return None
            condition, *branches = (v for v in node.inputs if v is not None)
            outcome = self.bad.of(condition)
            decided = isinstance(outcome, bool) and condition in self.check.dependent
            never = outcome is False and self.good.of(condition) is False and condition.producer() is not None
            if any(_viewed(branch) is state.value for branch in branches) and not decided and not never:
                return node
            following = [branch for branch in branches if _viewed(branch) is not state.value]
            if len(following) != 1:
                return None
            value = _viewed(following[0])
        return None


def _adam(state: State) -> ir.Node | None:
    """The AdamOptimizer that updates a state, told to skip by an input that its CPU kernel ignores."""
    node = _viewed(state.next).producer()
    return node if node is not None and node.op_type == _ADAM and update_signal(node) is not None else None


def _viewed(value: ir.Value) -> ir.Value:
    return source_by_trait(value, Trait.VIEW)


def _ignored_signals(subject: Subject) -> Iterator[Finding]:
    """Where no check was found, an AdamOptimizer whose update_signal comes from elsewhere."""
    for node in subject.view.nodes if subject.check is None else ():
        signal = update_signal(node) if node.op_type == _ADAM else None
        if signal is None or constant_tensor(signal) is not None:
            continue
        if any(value.is_graph_output() for value in node.outputs):
            yield found("GS406", f"AdamOptimizer is told to skip by {signal.name!r}", node, signal)


RULES = (
    Rule(("GS401", "GS402", "GS403", "GS404", "GS405", "GS406"), _guards),
    Rule(("GS406",), _ignored_signals),
)
