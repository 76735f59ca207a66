"""Optimizers of sequences of weights. The formulas are those of ONNX Runtime's CPU kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from graphscale.operators import MICROSOFT
from graphscale.passes.lower_training_ops.sequences import Rule, map_sequences, members
from graphscale.passes.lower_training_ops.writer import Formula, Writer
from graphscale.passes.lower_training_ops.written_states import check_states, scalar
from graphscale.passes.nodes.training_optimizers import (
    AdamW,
    Arithmetic,
    Operand,
    add_sgd,
    clip_by_norm,
    find_clip_factor,
    make_adamw,
)

__all__ = ["FORMULAS"]


def _sgd_v2(f: Writer) -> list[ir.Value]:
    """Compute the flag of an update, and for each weight `W - R * G`, or the weight without an update."""
    check_states(f)
    _check_dtypes(f, 1, 2)
    rate = scalar(f, f.data(0))

    def rule(f: Writer, values: Sequence[ir.Value]) -> list[ir.Value]:
        return [add_sgd(_arithmetic(f), rate, *values)]

    return [_flag(f, 3, f.data(0)), *_updated(f, rule, (1, 2), (0,), 3)]


def _adamw(f: Writer) -> list[ir.Value]:
    """Compute the flag of an update, and the next weights and moments, or the old ones without an update.

    `M1' = alpha * M1 + (1 - alpha) * G`, `M2' = beta * M2 + (1 - beta) * G * G`, `c1 = 1 - alpha^step`,
    `c2 = 1 - beta^step`, both 1 unless correct_bias.
    Mode 0: `V = W - R * weight_decay * W`, `W' = V - R * M1' / (c1 * (sqrt(M2' / c2) + epsilon))`.
    Mode 1: `V = W - R * sqrt(c2) / c1 * M1' / (sqrt(M2') + epsilon)`, `W' = V - R * weight_decay * V`.
    """
    check_states(f)
    _check_dtypes(f, 2, 3, 4, 5)
    options = AdamW(**{name: held.value for name, held in f.node.attributes.items()})
    if not options.has_kernel:
        raise f.refusal(f"no kernel has adam_mode {options.adam_mode} and correct_bias {options.correct_bias}")
    apply = make_adamw(_arithmetic(f), options, scalar(f, f.data(0)), scalar(f, f.data(1)))

    def rule(f: Writer, values: Sequence[ir.Value]) -> tuple[ir.Value, ...]:
        return apply(_arithmetic(f), *values)

    return [_flag(f, 6, f.data(1)), *_updated(f, rule, (2, 3, 4, 5), (0, 2, 3), 6)]


def _clip(f: Writer) -> list[ir.Value]:
    """Compute every gradient times `min(1, max_norm / (norm + 1e-6))`, with the norm of all of them together."""
    _check_dtypes(f, 0)
    gradients, max_norm = f.data(0), f.attribute("max_norm", 1.0)
    write = _arithmetic(f)
    if (known := members(gradients)) is not None:
        return [f("SequenceConstruct", *clip_by_norm(write, known, max_norm))]
    squares = map_sequences(f, lambda f, values: [f("ReduceSumSquare", *values, keepdims=0)], [gradients])
    square_sum = f.reduce_sum(f("ConcatFromSequence", *squares, axis=0, new_axis=1), keepdims=False)
    factor = find_clip_factor(write, square_sum, max_norm)
    return map_sequences(f, lambda f, values: [f("Mul", *values, factor)], [gradients])


def _check_dtypes(f: Writer, *sequences: int) -> None:
    """Refuse sequences of types other than float32: the kernels read them as float32."""
    for dtype in (f.data(i).dtype for i in sequences):
        if dtype not in (None, ir.DataType.FLOAT):
            raise f.refusal(f"its kernels compute in float32, and it has a sequence of {dtype}")


def _updated(f: Writer, rule: Rule, inputs: Sequence[int], states: Sequence[int], signal: int) -> list[ir.Value]:
    """Apply a rule to the members of some inputs, or keep their states where a signal is false."""
    is_active = None if (held := f.input(signal)) is None else scalar(f, held)

    def guarded(f: Writer, values: Sequence[ir.Value]) -> Sequence[ir.Value]:
        new = rule(f, values)
        if is_active is None:
            return new
        return [f("Where", is_active, *pair) for pair in zip(new, (values[i] for i in states), strict=True)]

    return map_sequences(f, guarded, [f.data(i) for i in inputs])


def _flag(f: Writer, signal: int, like: ir.Value) -> ir.Value:
    """Return whether the node updates, in the shape of an operand of one element."""
    held = f.input(signal)
    shape = f.shape_of(like)
    return f.expand(f.constant(np.asarray(True)), shape) if held is None else f.reshape(held, shape)


def _arithmetic(f: Writer) -> Arithmetic:
    def write(
        name: str, op_type: str, *operands: Operand, dtype: ir.DataType = ir.DataType.FLOAT, **options: Any
    ) -> ir.Value:
        values = [value if isinstance(value, ir.Value) else f.number(float(value), dtype) for value in operands]
        return f(op_type, *values, **options)

    return write


FORMULAS: dict[tuple[str, str], Formula] = {
    (MICROSOFT, "SGDOptimizerV2"): _sgd_v2,
    (MICROSOFT, "AdamWOptimizer"): _adamw,
    (MICROSOFT, "InplaceClipGradNorm"): _clip,
}
