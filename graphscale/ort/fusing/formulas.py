"""The optimizers of ONNX Runtime's training sessions: read from an optimizer model, and written in standard operators.

The formulas are those of their CPU kernels. Operations come in the kernels' order, and in float32 but for the powers of
the bias corrections, so that the results are the kernels' own; their coefficients `1 - alpha` are differences of
float32 numbers too.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from graphscale.errors import UnsupportedModelError
from graphscale.graph.builder import Editor
from graphscale.graph.values import node_name
from graphscale.operators import attribute, optimizer_of
from graphscale.ort.artifacts.optimizer_guard import trace_clips

__all__ = ["AdamW", "Formula", "add_sgd", "clip_by_norm", "make_adamw", "read_optimizer"]

# InplaceClipGradNorm divides by the norm plus this.
_CLIP_EPSILON = 1e-6

Operand = ir.Value | float | np.floating[Any]
Rule = Callable[[ir.Value, ir.Value, ir.Value, ir.Value], tuple[ir.Value, ir.Value, ir.Value]]


@dataclasses.dataclass(frozen=True)
class AdamW:
    """The attributes of `com.microsoft.AdamWOptimizer`, with its defaults."""

    alpha: float = 0.9
    beta: float = 0.999
    epsilon: float = 1e-8
    weight_decay: float = 1e-2
    adam_mode: int = 0
    correct_bias: int = 1


def read_optimizer(model: ir.Model, name: str) -> tuple[AdamW | None, list[float]]:
    """Read an optimizer model; messages call it by its path.

    Returns:
        the attributes of AdamWOptimizer, None for SGDOptimizerV2, which has none; the global norms that the gradients
        are clipped to before, one after the other.

    Raises:
        UnsupportedModelError: it has an operator other than AdamWOptimizer, SGDOptimizerV2 and InplaceClipGradNorm,
            or feeds them in another way than `generate_artifacts` does.
    """
    nodes = tuple(model.graph)
    optimizers = [(node, found.inputs) for node in nodes if (found := optimizer_of(node)) and found.inputs]
    if len(optimizers) != 1:
        raise UnsupportedModelError(
            f"{name} has {len(optimizers)} optimizer operators; one is needed, AdamWOptimizer or SGDOptimizerV2"
        )
    [(node, roles)] = optimizers
    for index, operand in enumerate(node.inputs):
        role = roles[index] if index < len(roles) else None
        if role is None and operand is not None:
            raise UnsupportedModelError(
                f"{name} steers {node_name(node)!r} with the update signal {operand.name!r}, which a fused step "
                "decides by itself; fuse the folder as generate_artifacts wrote it"
            )
        if role is not None and role != "gradients" and (operand is None or operand.name != role):
            given = "nothing" if operand is None else repr(operand.name)
            raise UnsupportedModelError(f"{name}: {node_name(node)!r} reads {given} where {role!r} is expected")
    gradients, clips = trace_clips(node.inputs[roles.index("gradients")])
    source = None if gradients is None else gradients.producer()
    if source is not None:
        raise UnsupportedModelError(
            f"{name}: the optimizer's gradients come from {source.op_type} (node {node_name(source)!r}), not from "
            "InplaceClipGradNorm"
        )
    if gradients is None or gradients.name != "gradients":
        raise UnsupportedModelError(f"{name}: the optimizer's gradients do not come from the input 'gradients'")
    others = [other for other in nodes if other is not node and other not in clips]
    if others:
        raise UnsupportedModelError(
            f"{name}: fuse knows AdamWOptimizer, SGDOptimizerV2 and InplaceClipGradNorm, and not "
            f"{others[0].op_type} (node {node_name(others[0])!r})"
        )
    attributes = {key: held.value for key, held in node.attributes.items()}
    rule = AdamW(**attributes) if node.op_type == "AdamWOptimizer" else None
    if rule is not None and (rule.adam_mode, rule.correct_bias) not in {(0, 1), (1, 0), (1, 1)}:
        raise UnsupportedModelError(
            f"{name}: ONNX Runtime has no AdamWOptimizer with adam_mode {rule.adam_mode} and correct_bias "
            f"{rule.correct_bias}"
        )
    return rule, [attribute(clip, "max_norm", 1.0) for clip in reversed(clips)]


class Formula:
    """Writes float32 arithmetic as nodes at the end of a graph."""

    def __init__(self, editor: Editor) -> None:
        self.editor = editor
        # The step is an original graph: nodes that scale inserts later carry a mark.
        self.build = editor.builder("fuse", shape=(), is_marked=False)
        self._numbers: dict[tuple[float, ir.DataType], ir.Value] = {}

    def __call__(
        self, name: str, op_type: str, *operands: Operand, dtype: ir.DataType = ir.DataType.FLOAT, **options: Any
    ) -> ir.Value:
        """Add a node, and return its output, a scalar if not said otherwise; the options are those of `Builder.op`."""
        inputs = [operand if isinstance(operand, ir.Value) else self._number(operand, dtype) for operand in operands]
        return self.build.op(op_type, inputs, name=name, dtype=dtype, **options)

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


def add_sgd(f: Formula, rate: ir.Value, weight: ir.Value, gradient: ir.Value) -> ir.Value:
    """Add SGDOptimizerV2, and return the next weight."""
    move = f(f"{weight.name}.move", "Mul", gradient, rate, like=weight)
    return f(f"{weight.name}.moved", "Sub", weight, move, like=weight)


def make_adamw(f: Formula, options: AdamW, rate: ir.Value, step: ir.Value) -> Rule:
    """Return AdamWOptimizer as a rule: from a weight, its gradient and two moments to the next weight and moments.

    The learning rate and `step`, the number of this step, counted from 1, are scalars.
    """
    one, alpha, beta = np.float32(1), np.float32(options.alpha), np.float32(options.beta)
    # Mode 0 is PyTorch's: the weight decays before the step; mode 1 is that of Hugging Face.
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

    def decayed(name: str | None, weight: ir.Value) -> ir.Value:
        if not options.weight_decay:
            return weight
        if decay_rate is not None:
            decay = f(f"{name}.decay", "Mul", weight, decay_rate, like=weight)
        else:
            part = f(f"{name}.decay_rate", "Mul", weight, rate, like=weight)
            decay = f(f"{name}.decay", "Mul", part, options.weight_decay, like=weight)
        return f(f"{name}.decayed", "Sub", weight, decay, like=weight)

    def rule(
        weight: ir.Value, gradient: ir.Value, first: ir.Value, second: ir.Value
    ) -> tuple[ir.Value, ir.Value, ir.Value]:
        name, g = weight.name, functools.partial(f, like=weight)
        kept = g(f"{first.name}.kept", "Mul", first, alpha)
        first_next = g(f"{first.name}.sum", "Add", kept, g(f"{first.name}.added", "Mul", gradient, one - alpha))
        kept = g(f"{second.name}.kept", "Mul", second, beta)
        part = g(f"{second.name}.part", "Mul", gradient, one - beta)
        second_next = g(f"{second.name}.sum", "Add", kept, g(f"{second.name}.added", "Mul", part, gradient))
        old, corrected = weight, second_next
        if decays_first:
            old = decayed(name, weight)
            corrected = g(f"{name}.corrected", "Div", second_next, second_correction)
        divisor = g(f"{name}.divisor", "Add", g(f"{name}.root", "Sqrt", corrected), options.epsilon)
        if decays_first:
            divisor = g(f"{name}.divisor", "Mul", divisor, first_correction)
        scaled = g(f"{name}.direction", "Mul", first_next, step_size)
        moved = g(f"{name}.moved", "Sub", old, g(f"{name}.move", "Div", scaled, divisor))
        return moved if decays_first else decayed(name, moved), first_next, second_next

    return rule


def _correct(f: Formula, name: str, base: float, step: ir.Value) -> ir.Value:
    """Return 1 - base ** step, the power in float64: in float32 the difference would lose half of its digits."""
    double, single = ir.DataType.DOUBLE, ir.DataType.FLOAT
    exponent = f(f"adamw.{name}_exponent", "Cast", step, dtype=double, to=double)
    power = f(f"adamw.{name}_power", "Pow", np.float64(np.float32(base)), exponent, dtype=double)
    return f(f"adamw.{name}_correction", "Sub", 1.0, f(f"adamw.{name}_power32", "Cast", power, to=single))
