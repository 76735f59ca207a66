"""The formulas of ONNX's own optimizer operators as nodes, from their specifications. Used by lower-optimizers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir

from graphscale.graph.builder import Builder

__all__ = ["LOWERINGS", "Formula"]


class Formula:
    """A writer of arithmetic on one weight, as nodes before the optimizer's node."""

    def __init__(self, build: Builder, node: ir.Node, like: ir.Value | None) -> None:
        assert like is not None
        self._node, self._like = node, like
        self._dtype = like.dtype or ir.DataType.FLOAT
        self._build = dataclasses.replace(build, prefix=str(like.name), at=("before", node), dtype=self._dtype)

    def attribute(self, name: str, default: float) -> float:
        attribute = self._node.attributes.get(name)
        return default if attribute is None else attribute.as_float()

    @property
    def nesterov(self) -> bool:
        return self._node.attributes["mode"].as_string() == "nesterov"

    def __call__(self, op_type: str, *operands: Any, scalar: bool = False, dtype: Any = None, **attributes: Any) -> Any:
        inputs = [self._value(operand) for operand in operands]
        shape = () if scalar else self._like.shape
        return self._build.op(op_type, inputs, dtype=dtype, shape=shape, **attributes)

    def _value(self, operand: Any) -> ir.Value:
        if isinstance(operand, ir.Value):
            return operand
        return self._build.editor.constant(f"{self._like.name}.number", np.asarray(operand, dtype=self._dtype.numpy()))

    def regularized(self, weight: ir.Value, gradient: ir.Value) -> ir.Value:
        """Add the L2 penalty of the attribute `norm_coefficient` to a gradient."""
        coefficient = self.attribute("norm_coefficient", 0.0)
        return gradient if coefficient == 0.0 else self("Add", self("Mul", weight, coefficient), gradient)

    def counted(self, count: ir.Value) -> ir.Value:
        """Cast the update count to the weight's dtype."""
        return self("Cast", count, scalar=True, to=self._dtype)  # type: ignore[no-any-return]

    def started(self, count: ir.Value, then: Any, otherwise: Any) -> ir.Value:
        """Select `then` if the update count is above 0, else `otherwise`."""
        above = self("Greater", self.counted(count), 0.0, scalar=True, dtype=ir.DataType.BOOL)
        return self("Where", above, then, otherwise, scalar=True)  # type: ignore[no-any-return]


def _adam(f: Formula, rate: Any, count: Any, x: Any, g: Any, v: Any, h: Any) -> tuple[ir.Value, ...]:
    alpha, beta, post = f.attribute("alpha", 0.9), f.attribute("beta", 0.999), f.attribute("norm_coefficient_post", 0.0)
    g = f.regularized(x, g)
    v_new = f("Add", f("Mul", v, alpha), f("Mul", g, 1 - alpha))
    h_new = f("Add", f("Mul", h, beta), f("Mul", f("Mul", g, g), 1 - beta))
    root = f("Add", f("Sqrt", h_new), f.attribute("epsilon", 1e-6))
    t = f.counted(count)
    second = f("Sqrt", f("Sub", 1.0, f("Pow", beta, t, scalar=True), scalar=True), scalar=True)
    first = f("Sub", 1.0, f("Pow", alpha, t, scalar=True), scalar=True)
    adjusted = f("Mul", rate, f("Div", second, first, scalar=True), scalar=True)
    step = f("Div", f("Mul", v_new, f.started(count, adjusted, rate)), root)
    x_new = f("Sub", x, step)
    return (x_new if post == 0.0 else f("Mul", x_new, 1 - post)), v_new, h_new


def _momentum(f: Formula, rate: Any, count: Any, x: Any, g: Any, v: Any) -> tuple[ir.Value, ...]:
    alpha, beta = f.attribute("alpha", 0.9), f.attribute("beta", 1.0)
    g = f.regularized(x, g)
    v_new = f("Add", f("Mul", v, alpha), f("Mul", g, f.started(count, beta, 1.0)))
    direction = f("Add", g, f("Mul", v_new, alpha)) if f.nesterov else v_new
    return f("Sub", x, f("Mul", direction, rate)), v_new


def _adagrad(f: Formula, rate: Any, count: Any, x: Any, g: Any, h: Any) -> tuple[ir.Value, ...]:
    decay = f("Mul", f.counted(count), f.attribute("decay_factor", 0.0), scalar=True)
    r = f("Div", rate, f("Add", decay, 1.0, scalar=True), scalar=True)
    g = f.regularized(x, g)
    h_new = f("Add", h, f("Mul", g, g))
    root = f("Add", f("Sqrt", h_new), f.attribute("epsilon", 1e-6))
    return f("Sub", x, f("Div", f("Mul", g, r), root)), h_new


# The number of tensors for each weight of the operator, and its formula.
LOWERINGS: dict[str, tuple[int, Callable[..., tuple[ir.Value, ...]]]] = {
    "Adam": (4, _adam),
    "Momentum": (3, _momentum),
    "Adagrad": (3, _adagrad),
}
