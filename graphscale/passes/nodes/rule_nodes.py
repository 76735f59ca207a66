"""The nodes of the dynamic loss scale's rule, in a graph or in a function."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import numpy as np
import onnx_ir as ir

from graphscale.graph.types import dtype_of
from graphscale.operators import OPERATORS
from graphscale.policy.dynamic_rule import DynamicRule
from graphscale.policy.names import ScaledValue

__all__ = ["RuleNodes"]

_REAL, _WIDE = ir.DataType.FLOAT, ir.DataType.DOUBLE


@dataclasses.dataclass(frozen=True)
class RuleNodes:
    """A writer of a rule's nodes.

    Attributes:
        make: creates a node from an operator, inputs, the dtype of its output, and attributes; returns the output.
        attribute: creates a value from the name of one of the policy's numbers, and a dtype.
        rule: the rule.
    """

    make: Callable[..., ir.Value]
    attribute: Callable[[str, ir.DataType], ir.Value]
    rule: DynamicRule

    def results(self, states: Mapping[ScaledValue, ir.Value], finite: ir.Value) -> list[ir.Value]:
        """Create the nodes.

        Args:
            states: the present state by its role, scalars.
            finite: the result of the finite check, a scalar bool value.

        Returns:
            the next state, in the order of `states`, and, unless `on_stuck` is "hold", the bool value `stuck`.
        """
        rule, scale, good = self.rule, states[ScaledValue.LOSS_SCALE], states[ScaledValue.GOOD_STEPS]
        count = dtype_of(good)
        counted = self._incremented(good)
        too_few = self._too_few(counted)
        lowers = None
        lowered = self._lowered(scale)
        following: dict[ScaledValue, ir.Value] = {}
        if rule.counts_hysteresis:
            left = states[ScaledValue.HYSTERESIS_LEFT]
            lowers = self._op("Less", left, self._constant(2, count))
            lowered = self._op("Where", lowers, lowered, scale)
            following[ScaledValue.HYSTERESIS_LEFT] = self._hysteresis(left, lowers, too_few, finite)
        zero = self._constant(0, count)
        at_start = self._constant(rule.good_steps_at_start, count) if rule.good_steps_at_start else zero
        more = self._op("Where", too_few, counted, zero)
        following[ScaledValue.GOOD_STEPS] = self._op("Where", finite, more, at_start)
        following[ScaledValue.LOSS_SCALE] = self._op("Where", finite, self._grown(scale, too_few), lowered)
        if rule.on_stuck == "hold":
            return [following[role] for role in states]
        stuck = self._stuck(states, following, lowers, finite)
        if rule.on_stuck == "reset":
            self._reset(following, stuck)
        return [*(following[role] for role in states), stuck]

    def _too_few(self, counted: ir.Value) -> ir.Value:
        period = self.attribute("increment_period", dtype_of(counted))
        if self.rule.growth_delay == "always":
            return self._op("Not", self._op("Greater", counted, period))
        return self._op("Less", counted, period)

    def _grown(self, scale: ir.Value, too_few: ir.Value) -> ir.Value:
        name = "multiplier" if self.rule.growth_factor is None else "growth_factor"
        grown = self._with_factor("Mul", scale, name)
        if self.rule.max_loss_scale is not None:
            limited = self._op("Min", grown, self.attribute("max_loss_scale", _REAL))
            return self._op("Where", too_few, scale, limited)
        overflows = self._op("Or", self._op("IsInf", grown), self._op("IsNaN", grown))
        return self._op("Where", self._op("Or", too_few, overflows), scale, grown)

    def _lowered(self, scale: ir.Value) -> ir.Value:
        op_type, name = ("Div", "multiplier") if self.rule.backoff_factor is None else ("Mul", "backoff_factor")
        lowered = self._with_factor(op_type, scale, name)
        return lowered if self.rule.min_loss_scale == 0 else self._op("Max", lowered, self._floor())

    def _floor(self) -> ir.Value:
        return self._constant(1, _REAL) if self.rule.min_loss_scale == 1 else self.attribute("min_loss_scale", _REAL)

    def _with_factor(self, op_type: str, scale: ir.Value, name: str) -> ir.Value:
        if self.rule.arithmetic == "float32":
            return self._op(op_type, scale, self.attribute(name, _REAL))
        operand = self.make("Cast", [scale], dtype=_WIDE, to=_WIDE)
        result = self._op(op_type, operand, self.attribute(name, _WIDE))
        return self.make("Cast", [result], dtype=_REAL, to=_REAL)

    def _hysteresis(self, left: ir.Value, lowers: ir.Value, too_few: ir.Value, finite: ir.Value) -> ir.Value:
        count, refill = dtype_of(left), self.rule.hysteresis_refill
        full = self.attribute("hysteresis", count)
        after_good = self._op("Where", too_few, left, full) if refill == "growth" else full
        used = self._op("Sub", left, self._constant(1, count))
        after_bad = self._op("Where", lowers, full if refill == "decrease" else left, used)
        return self._op("Where", finite, after_good, after_bad)

    def _stuck(
        self,
        states: Mapping[ScaledValue, ir.Value],
        following: dict[ScaledValue, ir.Value],
        lowers: ir.Value | None,
        finite: ir.Value,
    ) -> ir.Value:
        stuck = self._op("Not", self._op("Greater", states[ScaledValue.LOSS_SCALE], self._floor()))
        if lowers is not None:
            stuck = self._op("And", lowers, stuck)
        if (bad := states.get(ScaledValue.BAD_STEPS)) is not None:
            count = dtype_of(bad)
            counted = self._incremented(bad)
            following[ScaledValue.BAD_STEPS] = self._op("Where", finite, self._constant(0, count), counted)
            limit = self.attribute("max_consecutive_skips", count)
            stuck = self._op("Or", stuck, self._op("Not", self._op("Less", counted, limit)))
        return self._op("And", self._op("Not", finite), stuck)

    def _reset(self, following: dict[ScaledValue, ir.Value], stuck: ir.Value) -> None:
        names: dict[ScaledValue, str] = {
            ScaledValue.LOSS_SCALE: "initial_loss_scale",
            ScaledValue.HYSTERESIS_LEFT: "hysteresis",
        }
        for role, value in following.items():
            if role in names:
                first = self.attribute(names[role], dtype_of(value))
            else:
                first = self._constant(
                    self.rule.good_steps_at_start if role == ScaledValue.GOOD_STEPS else 0, dtype_of(value)
                )
            following[role] = self._op("Where", stuck, first, value)

    def _op(self, op_type: str, *inputs: ir.Value) -> ir.Value:
        """Create a node with a result of its last operand's type, unless the operator has another type."""
        return self.make(op_type, inputs, dtype=OPERATORS["", op_type].dtype or dtype_of(inputs[-1]))

    def _incremented(self, value: ir.Value) -> ir.Value:
        return self._op("Add", value, self._constant(1, dtype_of(value)))

    def _constant(self, number: float, dtype: ir.DataType) -> ir.Value:
        return self.make("Constant", [], dtype=dtype, value=ir.tensor(np.asarray(number, dtype=dtype.numpy())))
