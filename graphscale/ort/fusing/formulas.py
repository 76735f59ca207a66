"""The optimizers of ONNX Runtime's training sessions in standard operators, with the formulas of their CPU kernels.

Operations come in the kernels' order, and in float32 but for the powers of the bias corrections, so that the results
are the kernels' own; their coefficients `1 - alpha` are differences of float32 numbers too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from graphscale.graph.builder import Editor
from graphscale.ort.fusing.optimizer_model import AdamW

__all__ = ["AdamWRule", "Formula", "clip_by_norm"]

# InplaceClipGradNorm divides by the norm plus this.
_CLIP_EPSILON = 1e-6

Operand = ir.Value | float | np.floating[Any]


class Formula:
    """Writes float32 arithmetic as nodes at the end of a graph.

    Args:
        editor: the editor of the graph.
    """

    def __init__(self, editor: Editor) -> None:
        self.editor = editor
        # The step is an original graph: nodes that scale inserts later are told apart by their mark.
        self.build = editor.builder("fuse", shape=(), is_marked=False)
        self._numbers: dict[tuple[float, ir.DataType], ir.Value] = {}

    def __call__(
        self,
        name: str,
        op_type: str,
        *operands: Operand,
        like: ir.Value | None = None,
        dtype: ir.DataType = ir.DataType.FLOAT,
        **attributes: Any,
    ) -> ir.Value:
        """Add a node, and return its output: of the shape of `like`, or a scalar."""
        inputs = [operand if isinstance(operand, ir.Value) else self._number(operand, dtype) for operand in operands]
        return self.build.op(op_type, inputs, name=name, like=like, dtype=dtype, **attributes)

    def _number(self, number: float | np.floating[Any], dtype: ir.DataType) -> ir.Value:
        key = (float(number), dtype)
        if key not in self._numbers:
            self._numbers[key] = self.editor.constant(f"optimizer/{number:g}", np.asarray(number, dtype.numpy()))
        return self._numbers[key]


def clip_by_norm(f: Formula, gradients: Sequence[ir.Value], max_norm: float) -> list[ir.Value]:
    """InplaceClipGradNorm: every gradient times min(1, max_norm / (global norm + 1e-6))."""
    squares = [f(f"{g.name}.square_sum", "ReduceSumSquare", g, keepdims=0) for g in gradients]
    total = f("gradients.square_sum", "Sum", *squares)
    norm = f("gradients.norm", "Sqrt", total)
    ratio = f("gradients.ratio", "Div", max_norm, f("gradients.divisor", "Add", norm, _CLIP_EPSILON))
    factor = f("gradients.factor", "Min", ratio, 1.0)
    return [f(f"{g.name}.clipped", "Mul", g, factor, like=g) for g in gradients]


class AdamWRule:
    """AdamWOptimizer: `step` is the number of this step, counted from 1.

    Args:
        f: writes the nodes.
        options: the operator's attributes.
        rate: the learning rate, a scalar.
        step: the number of this step, a scalar.
    """

    def __init__(self, f: Formula, options: AdamW, rate: ir.Value, step: ir.Value) -> None:
        self._f, self._options, self._rate = f, options, rate
        self._alpha, self._beta = np.float32(options.alpha), np.float32(options.beta)
        self._corrections: tuple[Operand, Operand] = (1.0, 1.0)
        self._step_size: ir.Value = rate
        self._decay: ir.Value | None = None
        if options.correct_bias:
            self._corrections = (
                self._correction("alpha", self._alpha, step),
                self._correction("beta", self._beta, step),
            )
            if options.adam_mode == 1:
                root = f("adamw.beta_root", "Sqrt", self._corrections[1])
                ratio = f("adamw.correction", "Div", root, self._corrections[0])
                self._step_size = f("adamw.step_size", "Mul", rate, ratio)
        if options.weight_decay and options.adam_mode == 1:
            self._decay = f("adamw.decay", "Mul", rate, options.weight_decay)

    def _correction(self, name: str, base: np.float32, step: ir.Value) -> ir.Value:
        """1 - base ** step, the power in float64: in float32 it would lose half of its digits in the difference."""
        f, double, single = self._f, ir.DataType.DOUBLE, ir.DataType.FLOAT
        exponent = f(f"adamw.{name}_exponent", "Cast", step, dtype=double, to=double)
        power = f(f"adamw.{name}_power", "Pow", np.float64(base), exponent, dtype=double)
        return f(f"adamw.{name}_correction", "Sub", 1.0, f(f"adamw.{name}_power32", "Cast", power, to=single))

    def __call__(
        self, weight: ir.Value, gradient: ir.Value, first: ir.Value, second: ir.Value
    ) -> tuple[ir.Value, ir.Value, ir.Value]:
        """Return the next weight and its next two moments."""
        f, name = self._f, weight.name
        one = np.float32(1)
        kept = f(f"{first.name}.kept", "Mul", first, self._alpha, like=weight)
        added = f(f"{first.name}.added", "Mul", gradient, one - self._alpha, like=weight)
        first_next = f(f"{first.name}.sum", "Add", kept, added, like=weight)
        kept = f(f"{second.name}.kept", "Mul", second, self._beta, like=weight)
        part = f(f"{second.name}.part", "Mul", gradient, one - self._beta, like=weight)
        added = f(f"{second.name}.added", "Mul", part, gradient, like=weight)
        second_next = f(f"{second.name}.sum", "Add", kept, added, like=weight)
        if self._options.adam_mode == 0:
            weight = self._decayed(weight, name)
        corrected = second_next
        if self._options.adam_mode == 0:
            corrected = f(f"{name}.corrected", "Div", second_next, self._corrections[1], like=weight)
        root = f(f"{name}.root", "Sqrt", corrected, like=weight)
        divisor = f(f"{name}.divisor", "Add", root, self._options.epsilon, like=weight)
        if self._options.adam_mode == 0:
            divisor = f(f"{name}.divisor", "Mul", divisor, self._corrections[0], like=weight)
        scaled = f(f"{name}.direction", "Mul", first_next, self._step_size, like=weight)
        moved = f(f"{name}.move", "Div", scaled, divisor, like=weight)
        weight_next = f(f"{name}.moved", "Sub", weight, moved, like=weight)
        if self._options.adam_mode == 1:
            weight_next = self._decayed(weight_next, name)
        return weight_next, first_next, second_next

    def _decayed(self, weight: ir.Value, name: str | None) -> ir.Value:
        f = self._f
        if not self._options.weight_decay:
            return weight
        if self._decay is not None:
            decay = f(f"{name}.decay", "Mul", weight, self._decay, like=weight)
        else:
            part = f(f"{name}.decay_rate", "Mul", weight, self._rate, like=weight)
            decay = f(f"{name}.decay", "Mul", part, self._options.weight_decay, like=weight)
        return f(f"{name}.decayed", "Sub", weight, decay, like=weight)
