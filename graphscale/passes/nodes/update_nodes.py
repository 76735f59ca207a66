"""The nodes of the rule of the dynamic loss scale, step by step those of `graphscale.policy.dynamic_rule`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import numpy as np
import onnx_ir as ir

from graphscale.graph.types import dtype_of
from graphscale.policy.dynamic_rule import DynamicRule

__all__ = ["BAD_STEPS", "GOOD_STEPS", "HYSTERESIS_LEFT", "LOSS_SCALE", "STUCK", "Make", "RuleNodes"]

# The roles of the state that a rule carries from step to step, and of its flag.
LOSS_SCALE, GOOD_STEPS, HYSTERESIS_LEFT, BAD_STEPS = "loss_scale", "good_steps", "hysteresis_left", "bad_steps"
STUCK = "stuck"

# Creates a node from an operator, inputs, the dtype of its output, and attributes; returns that output.
Make = Callable[..., ir.Value]
# Creates a value from the name of one of the policy's numbers, the number, and a dtype.
_Attribute = Callable[[str, float, ir.DataType], ir.Value]

_FLAG, _REAL = ir.DataType.BOOL, ir.DataType.FLOAT


@dataclasses.dataclass(frozen=True)
class RuleNodes:
    """Creates the nodes of a rule.

    Attributes:
        make: creates a node.
        attribute: creates a number of the policy.
        rule: the rule.
    """

    make: Make
    attribute: _Attribute
    rule: DynamicRule

    def results(self, states: Mapping[str, ir.Value], finite: ir.Value) -> list[ir.Value]:
        """Create the nodes.

        Args:
            states: the present state by its role, scalars.
            finite: whether all gradients of the step are finite, a scalar bool value.

        Returns:
            the next state, in the order of `states`, and, unless `on_stuck` is "hold", whether the scale is stuck.
        """
        rule, scale, good = self.rule, states[LOSS_SCALE], states[GOOD_STEPS]
        count = dtype_of(good)
        counted = self._op("Add", good, self._constant(1, count), dtype=count)
        too_few = self._too_few(counted)
        lowers = None
        lowered = self._lowered(scale)
        following: dict[str, ir.Value] = {}
        if rule.counts_hysteresis:
            left = states[HYSTERESIS_LEFT]
            lowers = self._op("Less", left, self._constant(2, count))
            lowered = self._where(lowers, lowered, scale)
            following[HYSTERESIS_LEFT] = self._hysteresis(left, lowers, too_few, finite)
        zero = self._constant(0, count)
        at_start = self._constant(rule.good_steps_at_start, count) if rule.good_steps_at_start else zero
        following[GOOD_STEPS] = self._where(finite, self._where(too_few, counted, zero), at_start)
        following[LOSS_SCALE] = self._where(finite, self._grown(scale, too_few), lowered)
        stuck = None
        if rule.on_stuck != "hold":
            stuck = self._stuck(states, following, lowers, finite)
        if rule.on_stuck == "reset":
            assert stuck is not None
            self._reset(following, stuck)
        ordered = [following[role] for role in states]
        return ordered if stuck is None else [*ordered, stuck]

    def _too_few(self, counted: ir.Value) -> ir.Value:
        period = self.attribute("increment_period", self.rule.increment_period, dtype_of(counted))
        if self.rule.growth_delay == "always":
            return self._op("Not", self._op("Greater", counted, period))
        return self._op("Less", counted, period)

    def _grown(self, scale: ir.Value, too_few: ir.Value) -> ir.Value:
        name = "multiplier" if self.rule.growth_factor is None else "growth_factor"
        grown = self._with_factor("Mul", scale, name, self.rule.growth)
        if self.rule.max_loss_scale is not None:
            limit = self.attribute("max_loss_scale", self.rule.max_loss_scale, _REAL)
            return self._where(too_few, scale, self._op("Min", grown, limit, dtype=_REAL))
        overflows = self._op("Or", self._op("IsInf", grown), self._op("IsNaN", grown))
        return self._where(self._op("Or", too_few, overflows), scale, grown)

    def _lowered(self, scale: ir.Value) -> ir.Value:
        rule = self.rule
        if rule.backoff_factor is None:
            lowered = self._with_factor("Div", scale, "multiplier", rule.multiplier)
        else:
            lowered = self._with_factor("Mul", scale, "backoff_factor", rule.backoff_factor)
        return lowered if rule.min_loss_scale == 0 else self._op("Max", lowered, self._floor(), dtype=_REAL)

    def _floor(self) -> ir.Value:
        floor = self.rule.min_loss_scale
        return self._constant(1, _REAL) if floor == 1 else self.attribute("min_loss_scale", floor, _REAL)

    def _with_factor(self, op_type: str, scale: ir.Value, name: str, factor: float) -> ir.Value:
        if self.rule.arithmetic == "float32":
            return self._op(op_type, scale, self.attribute(name, factor, _REAL), dtype=_REAL)
        wide = ir.DataType.DOUBLE
        operand = self.make("Cast", [scale], dtype=wide, to=wide)
        result = self._op(op_type, operand, self.attribute(name, factor, wide), dtype=wide)
        return self.make("Cast", [result], dtype=_REAL, to=_REAL)

    def _hysteresis(self, left: ir.Value, lowers: ir.Value, too_few: ir.Value, finite: ir.Value) -> ir.Value:
        count, refill = dtype_of(left), self.rule.hysteresis_refill
        full = self.attribute("hysteresis", self.rule.hysteresis, count)
        after_good = self._where(too_few, left, full) if refill == "growth" else full
        used = self._op("Sub", left, self._constant(1, count), dtype=count)
        after_bad = self._where(lowers, full if refill == "decrease" else left, used)
        return self._where(finite, after_good, after_bad)

    def _stuck(
        self,
        states: Mapping[str, ir.Value],
        following: dict[str, ir.Value],
        lowers: ir.Value | None,
        finite: ir.Value,
    ) -> ir.Value:
        stuck = self._op("Not", self._op("Greater", states[LOSS_SCALE], self._floor()))
        if lowers is not None:
            stuck = self._op("And", lowers, stuck)
        if BAD_STEPS in states:
            bad = states[BAD_STEPS]
            count = dtype_of(bad)
            counted = self._op("Add", bad, self._constant(1, count), dtype=count)
            following[BAD_STEPS] = self._where(finite, self._constant(0, count), counted)
            limit = self.attribute("max_consecutive_skips", self.rule.max_consecutive_skips or 0, count)
            stuck = self._op("Or", stuck, self._op("Not", self._op("Less", counted, limit)))
        return self._op("And", self._op("Not", finite), stuck)

    def _reset(self, following: dict[str, ir.Value], stuck: ir.Value) -> None:
        rule, start = self.rule, self.rule.initial_state()
        for role, value in following.items():
            if role == LOSS_SCALE:
                first = self.attribute("initial_loss_scale", rule.initial_loss_scale, _REAL)
            elif role == HYSTERESIS_LEFT:
                first = self.attribute("hysteresis", rule.hysteresis, dtype_of(value))
            else:
                first = self._constant(start.good_steps if role == GOOD_STEPS else 0, dtype_of(value))
            following[role] = self._where(stuck, first, value)

    def _where(self, condition: ir.Value, chosen: ir.Value, other: ir.Value) -> ir.Value:
        return self._op("Where", condition, chosen, other, dtype=dtype_of(chosen))

    def _op(self, op_type: str, *inputs: ir.Value, dtype: ir.DataType = _FLAG) -> ir.Value:
        return self.make(op_type, inputs, dtype=dtype)

    def _constant(self, number: float, dtype: ir.DataType) -> ir.Value:
        return self.make("Constant", [], dtype=dtype, value=ir.tensor(np.asarray(number, dtype=dtype.numpy())))
