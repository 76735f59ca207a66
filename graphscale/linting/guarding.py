"""Rules on the guards of carried state: GS401 to GS406."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import onnx_ir as ir

from graphscale.analysis.optimizers import optimizer_of
from graphscale.analysis.values import constant_tensor, is_scalar, op_name
from graphscale.linting.checks import Check
from graphscale.linting.report import Finding, found
from graphscale.linting.states import Carry, State
from graphscale.linting.steps import Outcomes
from graphscale.linting.subject import Rule, Subject

__all__ = ["RULES"]

_VIEWS = frozenset({"Cast", "Identity", "Reshape"})
_ADAM = "AdamOptimizer"
_ADAM_SIGNAL = 9


def _guards(subject: Subject) -> Iterator[Finding]:
    check, good, bad = subject.check, subject.good, subject.bad
    if check is None or good is None or bad is None:
        return
    kept = {state: _is_kept(subject, state, bad) for state in subject.states}
    adjusts = subject.scale is not None and subject.scale.adjusts
    # Where nothing depends on the check, somebody outside of the graph decides what to do with a step.
    if not adjusts and not any(kept.values()) and not any(_depends(state, check) for state in subject.states):
        return
    guards = _Guards(subject, check, good, bad)
    for state, is_kept in kept.items():
        if not is_kept:
            finding = guards.explain(state)
            if finding is not None:
                yield finding


def _depends(state: State, check: Check) -> bool:
    operands = state.node.inputs if state.node is not None else (state.next,)
    return any(value in check.dependent for value in operands if value is not None)


def _is_kept(subject: Subject, state: State, bad: Outcomes) -> bool:
    """Whether a skipped step leaves a state as it is."""
    outcome = bad.of(state.next)
    if state.carry is Carry.ADD:
        assert state.node is not None
        if _is_examined(subject, state.node):
            return True
        return outcome is state.value or (not isinstance(outcome, ir.Value) and outcome == 0)
    if state.carry is Carry.OPTIMIZER:
        optimizer = None if state.node is None else optimizer_of(state.node)
        index = None if optimizer is None else optimizer.update_signal
        signal = None if index is None or state.node is None or index >= len(state.node.inputs) else state.node.inputs[index]
        return signal is not None and bad.of(signal) is False
    return outcome is state.value


def _is_examined(subject: Subject, node: ir.Node) -> bool:
    """Whether the buffer of an accumulator is what is tested, so that it keeps what is not finite."""
    sums = [value for value in node.outputs[1:] if value.name]
    return bool(sums) and any(value in _examined(subject) for value in sums)


def _examined(subject: Subject) -> set[ir.Value]:
    nexts = () if subject.scale is None else tuple(subject.scale.nexts.values())
    return _ancestors(subject, nexts)


@functools.lru_cache(maxsize=4)
def _ancestors(subject: Subject, values: tuple[ir.Value, ...]) -> set[ir.Value]:
    return subject.view.ancestors(values)


class _Guards:
    """Says of a state that is not kept on a skipped step what is the matter with its guard."""

    def __init__(self, subject: Subject, check: Check, good: Outcomes, bad: Outcomes) -> None:
        self.subject = subject
        self.check = check
        self.good = good
        self.bad = bad
        self.flags = {value for value, dtype in subject.view.dtypes.items() if dtype is ir.DataType.BOOL}
        products = [value for node in bad.products for value in node.outputs]
        self.after_products = subject.view.descendants(products)

    def explain(self, state: State) -> Finding | None:
        name, value, new = repr(state.value.name), state.value, state.next
        check = repr(self.check.value.name)
        node = state.node or new.producer()
        adam = self._adam(state)
        if adam is not None:
            return found("GS406", f"{name} is updated by AdamOptimizer whatever update_signal says", adam, value)
        if _depends(state, self.check) and self._is_own_bookkeeping(state):
            return None
        if state.carry not in (Carry.ADD, Carry.OPTIMIZER) and self.good.of(new) is value:
            return found("GS403", f"{name} keeps its value if {check} holds, and changes if not", node, value)
        if new in self.after_products:
            return found("GS405", f"{name} is changed by 0 times a gradient that may not be finite", node, value)
        select = self._other_select(state)
        if select is not None:
            condition = select.inputs[0]
            assert condition is not None
            what = "a constant" if constant_tensor(condition) is not None else repr(condition.name)
            return found("GS402", f"{name} is selected by {what}, which is not {check}", select, value)
        if self._is_counter(state):
            return found("GS404", f"{name} counts on whether or not {check} holds", node, value)
        how = "" if state.node is None else f" by {op_name(state.node)}"
        return found("GS401", f"{name} changes{how} also if {check} fails", node, value)

    def _is_own_bookkeeping(self, state: State) -> bool:
        """Whether a state counts steps or skips on purpose: a scalar that no weight or moment depends on."""
        if not self._is_counter(state):
            return False
        reach = self.subject.view.descendants([state.value], stop=self.flags)
        return not any(other.next in reach and not is_scalar(other.value) for other in self.subject.states)

    def _is_counter(self, state: State) -> bool:
        return state.carry in (Carry.OUTPUT, Carry.WRITE) and is_scalar(state.value) and not self._is_fed(state.next)

    def _is_fed(self, value: ir.Value) -> bool:
        """Whether numbers computed from gradients flow into a value, other than by way of a condition."""
        pending, seen = [value], {value}
        while pending:
            node = pending.pop().producer()
            if node is None or node.op_type in ("IsNaN", "IsInf"):
                continue
            for operand in node.inputs:
                if operand is None or operand in seen or self.subject.dtype(operand) is ir.DataType.BOOL:
                    continue
                if operand in self.subject.sources and not self._from_flags(operand):
                    return True
                seen.add(operand)
                pending.append(operand)
        return False

    def _from_flags(self, value: ir.Value) -> bool:
        scale = self.subject.scale
        return value in self.check.dependent and (is_scalar(value) or (scale is not None and value in scale.scalars.values))

    def _adam(self, state: State) -> ir.Node | None:
        """The AdamOptimizer that updates a state, told to skip by an input that its CPU kernel ignores."""
        node = _viewed(state.next).producer()
        if node is None or node.op_type != _ADAM or len(node.inputs) <= _ADAM_SIGNAL:
            return None
        return node if node.inputs[_ADAM_SIGNAL] is not None else None

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
            own = [i for i, branch in enumerate(branches) if _viewed(branch) is state.value]
            decided = isinstance(self.bad.of(condition), bool) and condition in self.check.dependent
            if own and not decided and not self._is_never(condition):
                return node
            following = [branch for branch in branches if _viewed(branch) is not state.value]
            if len(following) != 1:
                return None
            value = _viewed(following[0])
        return None

    def _is_never(self, condition: ir.Value) -> bool:
        return self.bad.of(condition) is False and self.good.of(condition) is False and condition.producer() is not None


# Selections one behind the other.
_DEPTH = 8


def _viewed(value: ir.Value) -> ir.Value:
    node = value.producer()
    while node is not None and node.op_type in _VIEWS and node.inputs[0] is not None:
        value = node.inputs[0]
        node = value.producer()
    return value


def _ignored_signals(subject: Subject) -> Iterator[Finding]:
    """Where no check was found, an AdamOptimizer whose update_signal comes from elsewhere."""
    if subject.check is not None:
        return
    for node in subject.view.nodes:
        signal = node.inputs[_ADAM_SIGNAL] if node.op_type == _ADAM and len(node.inputs) > _ADAM_SIGNAL else None
        if signal is None or constant_tensor(signal) is not None:
            continue
        if any(value.is_graph_output() for value in node.outputs):
            yield found("GS406", f"AdamOptimizer is told to skip by {signal.name!r}", node, signal)


RULES = (
    Rule(("GS401", "GS402", "GS403", "GS404", "GS405", "GS406"), _guards),
    Rule(("GS406",), _ignored_signals),
)
