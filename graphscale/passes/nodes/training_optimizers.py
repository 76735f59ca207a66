"""The optimizers of ONNX Runtime's training builds, in standard operators.

The formulas are those of their CPU kernels. Operations have the kernels' order, and are in float32 except for the
powers of the bias corrections, so that the results equal the kernels'. The coefficients `1 - alpha` are differences of
float32 numbers, too.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import onnx_ir as ir

__all__ = ["AdamW", "Arithmetic", "Operand", "add_sgd", "clip_by_norm", "find_clip_factor", "make_adamw"]

# InplaceClipGradNorm divides by the norm plus this.
_CLIP_EPSILON = 1e-6

Operand = ir.Value | float | np.floating[Any]


class Arithmetic(Protocol):
    """A writer of arithmetic as nodes."""

    def __call__(
        self, name: str, op_type: str, *operands: Operand, dtype: ir.DataType = ir.DataType.FLOAT, **options: Any
    ) -> ir.Value:
        """Add a node, and return its output.

        Args:
            name: the wanted name of the output.
            op_type: the operator.
            operands: its inputs; numbers have the dtype of the output.
            dtype: the dtype of the output.
            options: `like`, a value whose shape the output has, else it is a scalar; the node's attributes.
        """
        ...


# A function from a weight, its gradient and two moments to the next weight and moments.
Rule = Callable[[Arithmetic, ir.Value, ir.Value, ir.Value, ir.Value], tuple[ir.Value, ir.Value, ir.Value]]


@dataclasses.dataclass(frozen=True)
class AdamW:
    """The attributes of `com.microsoft.AdamWOptimizer`, with its defaults."""

    alpha: float = 0.9
    beta: float = 0.999
    epsilon: float = 1e-8
    weight_decay: float = 1e-2
    adam_mode: int = 0
    correct_bias: int = 1

    @property
    def has_kernel(self) -> bool:
        """The existence of a kernel for the mode in ONNX Runtime."""
        return (self.adam_mode, self.correct_bias) in {(0, 1), (1, 0), (1, 1)}


def clip_by_norm(f: Arithmetic, gradients: Sequence[ir.Value], max_norm: float) -> list[ir.Value]:
    """InplaceClipGradNorm: every gradient times `min(1, max_norm / (global norm + 1e-6))`."""
    squares = [f(f"{g.name}.square_sum", "ReduceSumSquare", g, keepdims=0) for g in gradients]
    factor = find_clip_factor(f, f("gradients.square_sum", "Sum", *squares), max_norm)
    return [f(f"{g.name}.clipped", "Mul", g, factor, like=g) for g in gradients]


def find_clip_factor(f: Arithmetic, square_sum: ir.Value, max_norm: float) -> ir.Value:
    """Return the factor of InplaceClipGradNorm, from the sum of the squares of all gradients."""
    norm = f("gradients.norm", "Sqrt", square_sum)
    ratio = f("gradients.ratio", "Div", max_norm, f("gradients.divisor", "Add", norm, _CLIP_EPSILON))
    return f("gradients.factor", "Min", ratio, 1.0)


def add_sgd(f: Arithmetic, rate: ir.Value, weight: ir.Value, gradient: ir.Value) -> ir.Value:
    """Add SGDOptimizerV2, `weight - rate * gradient`, and return the next weight."""
    move = f(f"{weight.name}.move", "Mul", gradient, rate, like=weight)
    return f(f"{weight.name}.moved", "Sub", weight, move, like=weight)


def make_adamw(f: Arithmetic, options: AdamW, rate: ir.Value, step: ir.Value) -> Rule:
    """Return AdamWOptimizer as a rule, for any place of its nodes, such as a body.

    The learning rate and `step`, the number of this step, counted from 1, are scalars.
    """
    one, alpha, beta = np.float32(1), np.float32(options.alpha), np.float32(options.beta)
    # In mode 0, PyTorch's, the weight decays before the step; mode 1 is that of Hugging Face.
    decays_first = options.adam_mode == 0
    step_size, decay_rate = rate, None
    if options.correct_bias:
        first_correction = _correct(f, "alpha", options.alpha, step)
        second_correction = _correct(f, "beta", options.beta, step)
        if not decays_first:
            root = f("adamw.beta_root", "Sqrt", second_correction)
            ratio = f("adamw.correction", "Div", root, first_correction)
            step_size = f("adamw.step_size", "Mul", rate, ratio)
    if options.weight_decay and not decays_first:
        decay_rate = f("adamw.decay", "Mul", rate, options.weight_decay)

    def decayed(f: Arithmetic, name: str | None, weight: ir.Value) -> ir.Value:
        if not options.weight_decay:
            return weight
        if decay_rate is not None:
            decay = f(f"{name}.decay", "Mul", weight, decay_rate, like=weight)
        else:
            part = f(f"{name}.decay_rate", "Mul", weight, rate, like=weight)
            decay = f(f"{name}.decay", "Mul", part, options.weight_decay, like=weight)
        return f(f"{name}.decayed", "Sub", weight, decay, like=weight)

    def rule(
        f: Arithmetic, weight: ir.Value, gradient: ir.Value, first: ir.Value, second: ir.Value
    ) -> tuple[ir.Value, ir.Value, ir.Value]:
        name, g = weight.name, functools.partial(f, like=weight)
        kept = g(f"{first.name}.kept", "Mul", first, alpha)
        first_next = g(f"{first.name}.sum", "Add", kept, g(f"{first.name}.added", "Mul", gradient, one - alpha))
        kept = g(f"{second.name}.kept", "Mul", second, beta)
        part = g(f"{second.name}.part", "Mul", gradient, one - beta)
        second_next = g(f"{second.name}.sum", "Add", kept, g(f"{second.name}.added", "Mul", part, gradient))
        old, corrected = weight, second_next
        if decays_first:
            old = decayed(f, name, weight)
            corrected = g(f"{name}.corrected", "Div", second_next, second_correction)
        divisor = g(f"{name}.divisor", "Add", g(f"{name}.root", "Sqrt", corrected), options.epsilon)
        if decays_first:
            divisor = g(f"{name}.divisor", "Mul", divisor, first_correction)
        scaled = g(f"{name}.direction", "Mul", first_next, step_size)
        moved = g(f"{name}.moved", "Sub", old, g(f"{name}.move", "Div", scaled, divisor))
        return moved if decays_first else decayed(f, name, moved), first_next, second_next

    return rule


def _correct(f: Arithmetic, name: str, base: float, step: ir.Value) -> ir.Value:
    """Return 1 - base ** step, the power in float64: in float32 the difference would lose half of its digits."""
    double, single = ir.DataType.DOUBLE, ir.DataType.FLOAT
    exponent = f(f"adamw.{name}_exponent", "Cast", step, dtype=double, to=double)
    power = f(f"adamw.{name}_power", "Pow", np.float64(np.float32(base)), exponent, dtype=double)
    return f(f"adamw.{name}_correction", "Sub", 1.0, f(f"adamw.{name}_power32", "Cast", power, to=single))
