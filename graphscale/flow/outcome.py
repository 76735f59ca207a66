"""Outcomes: the value that each value of a graph equals on a step, by the result of the finite check.

With known flags, selections are decided, flags become numbers, and a sum with zero is its other operand. So a guard of
carried state is recognized by its effect, in any form: on a skipped step the next value equals the state.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TypeAlias

import numpy as np
import onnx_ir as ir

from graphscale.flow.degree import is_small_zero
from graphscale.flow.interpreter import Domain, Flow
from graphscale.graph.types import holds_all
from graphscale.graph.values import constant_tensor, is_float, own_dtype
from graphscale.graph.walks import is_contradiction
from graphscale.operators import FIRST, Kind, Trait, has_trait, optimizer_of, rule_of

__all__ = ["Number", "Outcome", "Outcomes", "is_kept"]


_MOVED = Trait.VIEW | Trait.REPEAT


class Number(enum.Enum):
    """A number in all elements of a value."""

    ZERO = "0.0"
    MINUS_ZERO = "-0.0"
    ONE = "1.0"


# A flag, a number, or a value of the graph with the same elements; None for one that equals itself alone.
Outcome: TypeAlias = bool | Number | ir.Value | None


class Outcomes(Domain[Outcome]):
    """The outcome of each value on a step with known flags: a flat lattice.

    Bit for bit, a value equals another one through casts only if their types hold all its numbers, and any number may
    be non-finite. Otherwise values are compared as numbers, apart from rounding by casts and the sign of zero.

    Args:
        nodes: the nodes of a main graph, in execution order.
        flags: the values of some flags.
        states: the values whose copies are of interest, bit for bit.
        risky: values that may be non-finite: zero times one of these is not zero; None to compare bit for bit.
        dependent: the values that depend on the flags.
        functions: the model-local functions.

    Attributes:
        products: the products of a risky value with a zero that depends on the flags.
    """

    default: Outcome = None

    def __init__(
        self,
        nodes: Iterable[ir.Node],
        flags: Mapping[ir.Value, bool],
        states: Iterable[ir.Value] = (),
        *,
        risky: Collection[ir.Value] | None = None,
        dependent: Collection[ir.Value] = (),
        functions: Mapping[ir.OperatorIdentifier, ir.Function] | None = None,
    ) -> None:
        self._flags, self._risky, self._dependent = flags, risky, dependent
        inner = (node for function in (functions or {}).values() for node in function.all_nodes())
        # They differ from call to call, and equal no other value.
        self._in_functions = {value for node in inner for value in (*node.inputs, *node.outputs)}
        self.products: dict[ir.Node, None] = {}
        self._flow = Flow(self, {**dict.fromkeys(states), **flags}, functions)
        if risky is None:
            self._flow.visit_all(nodes)
        else:
            for node in nodes:
                self._flow.visit(node)

    def of(self, value: ir.Value) -> Outcome:
        """Return the outcome of a value; without a known one, the value itself."""
        return self.pass_border(value, self._flow.of(value))

    def pass_border(self, value: ir.Value, element: Outcome) -> Outcome:
        if element is not None:
            return element
        tensor = constant_tensor(value)
        if tensor is not None and tensor.dtype is ir.DataType.BOOL and tensor.size == 1:
            return bool(tensor.numpy().all())
        if is_contradiction(value):
            return False
        if self._risky is not None and is_small_zero(value, of_finite=False):
            return Number.ZERO
        if self._risky is None and tensor is not None and is_small_zero(value):
            signs = np.signbit(tensor.numpy().astype(np.float64))
            if signs.all() == signs.any():
                return Number.MINUS_ZERO if signs.any() else Number.ZERO
        return None if value in self._in_functions else value

    def read(self, node: ir.Node, index: int, element: Outcome) -> Outcome:
        value = node.inputs[index]
        return element if value is None else self.pass_border(value, element)

    def pass_round(self, element: Outcome) -> Outcome:
        return None if isinstance(element, ir.Value) else element

    def write(self, value: ir.Value, element: Outcome) -> Outcome:
        return self._flags.get(value, element)

    def decide(self, condition: Outcome) -> bool | None:
        return condition if isinstance(condition, bool) else None

    def join(self, node: ir.Node, elements: Sequence[Outcome]) -> Outcome:
        return elements[0] if all(element == elements[0] for element in elements) else None

    def opaque(self, node: ir.Node, operands: Sequence[Outcome]) -> Sequence[Outcome]:
        return [None] * len(node.outputs)

    def transfer(self, node: ir.Node, operands: Sequence[Outcome]) -> Sequence[Outcome]:
        optimizer, count = optimizer_of(node), len(node.outputs)
        if optimizer is None:
            return [self._first(node, operands) if operands else None, *[None] * (count - 1)][:count]
        signal = optimizer.update_signal
        if signal is None or signal >= len(operands) or operands[signal] is not False or optimizer.ignores_signal:
            return [None] * count
        sources = [optimizer.source(i) for i in range(count)]
        return [operands[i] if i is not None and i < len(operands) else None for i in sources]

    def _first(self, node: ir.Node, operands: Sequence[Outcome]) -> Outcome:
        """Return the outcome of a node's first output."""
        first, kind = operands[0], "" if node.domain else node.op_type
        if has_trait(node, _MOVED):
            return self._moved(node, first)
        if kind == "Not":
            return not first if isinstance(first, bool) else None
        if kind in ("And", "Or"):
            return self._logic(node, operands)
        if kind == "Where":
            _, new, old = operands
            return (new if first else old) if isinstance(first, bool) else new if new == old else None
        if kind in ("Add", "Sum", "Sub"):
            return self._sum(node, operands)
        if kind == "Mul":
            return self._product(node, operands)
        rule = rule_of(node) if first is Number.ZERO and self._risky is not None else None
        is_power = rule is not None and rule.kind in (Kind.QUOTIENT, Kind.POWER) and rule.power > 0
        return Number.ZERO if is_power or rule == FIRST else None

    def _moved(self, node: ir.Node, element: Outcome) -> Outcome:
        """Return the outcome of a view, a cast or a repetition."""
        if has_trait(node, Trait.REPEAT):
            return self.pass_round(element)
        if element is None or not has_trait(node, Trait.CAST):
            return element
        dtype = own_dtype(node.outputs[0])
        if isinstance(element, ir.Value):
            return element if self._risky is not None or holds_all(dtype, own_dtype(element)) else None
        if dtype is ir.DataType.BOOL:
            return element if isinstance(element, bool) else element is Number.ONE
        if isinstance(element, bool):
            return Number.ONE if element else Number.ZERO
        return element if element is not Number.MINUS_ZERO else None

    def _logic(self, node: ir.Node, operands: Sequence[Outcome]) -> Outcome:
        decides = node.op_type == "Or"
        unknown = [i for i, element in enumerate(operands) if not isinstance(element, bool)]
        if decides in operands:
            return decides
        if len(unknown) == len(operands):
            return None
        # A policy may accept a step that is stuck at the lowest scale; otherwise the check decides.
        is_settled = not unknown or node.inputs[unknown[0]] in self._dependent
        return not decides if is_settled else operands[unknown[0]]

    def _sum(self, node: ir.Node, operands: Sequence[Outcome]) -> Outcome:
        is_difference = node.op_type == "Sub"
        zeros = {Number.ZERO, Number.MINUS_ZERO}
        if self._risky is None and is_float(node.outputs[0]):
            # Only these zeros keep the sign of a zero.
            zeros = {Number.ZERO if is_difference else Number.MINUS_ZERO}
        left = [e for i, e in enumerate(operands) if e not in zeros or (is_difference and i == 0)]
        return left[0] if len(left) == 1 else None if left else operands[0]

    def _product(self, node: ir.Node, operands: Sequence[Outcome]) -> Outcome:
        self.products.pop(node, None)
        for i, element in enumerate(operands):
            other, value = operands[1 - i], node.inputs[1 - i]
            if element is Number.ONE:
                return other
            if element is Number.ZERO and self._risky is not None:
                if not (isinstance(other, ir.Value) and value in self._risky and node.inputs[i] in self._dependent):
                    return Number.ZERO
                self.products[node] = None
                return None
        return None


def is_kept(outcome: Outcome, state: ir.Value) -> bool:
    """Return whether a next value with an outcome is the old one, apart from a reset."""
    if outcome is state or not isinstance(outcome, ir.Value):
        return outcome is state
    from graphscale.flow.resets import is_reset  # few states are accumulated gradients

    return is_reset(outcome, state)
