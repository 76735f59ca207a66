"""The effect of a step on each value if the finite check holds, and if it fails: a small abstract interpretation.

With a known result of the check, selections are decided, flags and counts become numbers, and a sum with zero is its
other operand. So a guard is recognized by its effect, in any form.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import onnx_ir as ir

from graphscale.checks.linting.view import View, is_zero
from graphscale.checks.patterns import input_at, is_contradiction, update_signal
from graphscale.graph.values import constant_tensor, inputs_of, subgraphs
from graphscale.operators import FIRST, Optimizer, Trait, has_trait, optimizer_of, rule_of

__all__ = ["Outcomes"]

# A known value: a flag, or a number, equal in all elements; or a value of the graph that it equals.
Outcome = bool | int | ir.Value


class Outcomes:
    """The outcome of each value on a step, given the result of the finite check.

    Args:
        view: the graph.
        check: the check's result.
        holds: its value on the step.
        risky: values that may be non-finite on a skipped step; zero times one of these is not zero.

    Attributes:
        products: the products of a zero with a risky value.
    """

    def __init__(self, view: View, check: ir.Value, holds: bool, risky: Collection[ir.Value]) -> None:
        self._check = check
        self._risky = risky
        self._dependent = view.descendants([check])
        self._known: dict[ir.Value, Outcome] = {check: holds}
        self.products: list[ir.Node] = []
        for node in view.nodes:
            self._visit(node)

    def of(self, value: ir.Value) -> Outcome:
        """Return the known outcome of a value."""
        if value in self._known:
            return self._known[value]
        if is_zero(value, of_finite=False):
            return 0
        tensor = constant_tensor(value)
        if tensor is not None and tensor.dtype is ir.DataType.BOOL and tensor.size == 1:
            return bool(tensor.numpy().all())
        return value

    def _visit(self, node: ir.Node) -> None:
        if self._check in node.outputs:
            return
        optimizer = optimizer_of(node)
        if node.op_type == "If" and node.inputs[0] is not None:
            self._visit_if(node, self.of(node.inputs[0]))
        elif optimizer is not None:
            self._visit_optimizer(node, optimizer)
        elif node.domain in ("", "ai.onnx") and not any(subgraphs(node)) and node.outputs:
            outcome = self._evaluate(node)
            if outcome is not None:
                self._known[node.outputs[0]] = outcome

    def _visit_if(self, node: ir.Node, condition: Outcome) -> None:
        branch = node.attributes.get("then_branch" if condition else "else_branch")
        if branch is None or not isinstance(condition, bool):
            return
        for inner in branch.as_graph():
            self._visit(inner)
        for value, leaving in zip(node.outputs, branch.as_graph().outputs, strict=False):
            self._known[value] = self.of(leaving)

    def _visit_optimizer(self, node: ir.Node, optimizer: Optimizer) -> None:
        signal = update_signal(node)
        if signal is None or self.of(signal) is not False or node.op_type == "AdamOptimizer":
            return
        for i, value in enumerate(node.outputs):
            state = input_at(node, optimizer.source(i))
            if state is not None:
                self._known[value] = self.of(state)

    def _evaluate(self, node: ir.Node) -> Outcome | None:
        values = inputs_of(node)
        known = [self.of(value) for value in values]
        kind = node.op_type
        if not known:
            return None
        if kind in ("Not", "And", "Or"):
            return self._logic(node, values, known)
        if has_trait(node, Trait.VIEW | Trait.REPEAT):
            return self._view(node, known[0])
        if kind == "Where" and len(known) == 3:
            condition, new, old = known
            same = new is old or (isinstance(new, int) and new == old)
            return (new if condition else old) if isinstance(condition, bool) else new if same else None
        if kind in ("Add", "Sum", "Sub"):
            return self._sum(node, known)
        if kind == "Mul" and len(known) == 2:
            return self._product(node, values, known)
        is_zero_of_zero = rule_of(node) == FIRST or kind == "Sqrt" or (kind == "Div" and len(known) == 2)
        return 0 if is_zero_of_zero and known[0] is not False and known[0] == 0 else None

    def _logic(self, node: ir.Node, values: Sequence[ir.Value], known: Sequence[Outcome]) -> Outcome | None:
        if node.op_type == "Not":
            return not known[0] if isinstance(known[0], bool) else None
        decides = node.op_type == "Or"
        flags = [outcome for outcome in known if isinstance(outcome, bool)]
        if decides in flags:
            return decides
        if len(flags) == len(known):
            return not decides
        if is_contradiction(node.outputs[0]):
            return False
        unknown = next(value for value, outcome in zip(values, known, strict=True) if not isinstance(outcome, bool))
        # A policy may accept a step that is stuck at the lowest scale; otherwise the check decides.
        overridden = flags and unknown in self._dependent
        return (not decides) if overridden else self.of(unknown) if flags else None

    def _view(self, node: ir.Node, outcome: Outcome) -> Outcome | None:
        if isinstance(outcome, bool) and node.op_type == "Cast":
            to = ir.DataType(node.attributes["to"].as_int())
            return outcome if to is ir.DataType.BOOL else int(outcome)
        if isinstance(outcome, ir.Value) and has_trait(node, Trait.REPEAT):
            return None
        return outcome

    def _sum(self, node: ir.Node, known: Sequence[Outcome]) -> Outcome | None:
        left = [outcome for outcome in known if isinstance(outcome, ir.Value) or outcome != 0]
        if not left:
            return 0
        is_negated = node.op_type == "Sub" and isinstance(known[0], int) and known[0] == 0
        return None if len(left) > 1 or is_negated else left[0]

    def _product(self, node: ir.Node, values: Sequence[ir.Value], known: Sequence[Outcome]) -> Outcome | None:
        for i, outcome in enumerate(known):
            other, value = known[1 - i], values[1 - i]
            if isinstance(outcome, int) and outcome == 0:
                if not (isinstance(other, ir.Value) and value in self._risky and values[i] in self._dependent):
                    return 0
                self.products.append(node)
                return None
            if isinstance(outcome, int) and outcome == 1:
                return other
        return None
