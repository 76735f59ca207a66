"""Optimizers of one weight, and accumulators. The formulas are those of ONNX Runtime's CPU kernels."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from graphscale.graph.types import dtype_of
from graphscale.operators import MICROSOFT
from graphscale.passes.lower_training_ops.writer import Formula, Writer
from graphscale.passes.lower_training_ops.written_states import check_states, scalar

__all__ = ["FORMULAS"]


def _sgd(f: Writer) -> list[ir.Value | None]:
    """Compute `NW = W - R * G` and `NG = -R * G`."""
    check_states(f)
    weight = f.data(1)
    step = f("Mul", f.data(2), f.cast(scalar(f, f.data(0)), dtype_of(weight)))
    return [f("Sub", weight, step), f("Neg", step) if f.wants(1) else None]


def _adam(f: Writer) -> list[ir.Value | None]:
    """Compute the next count, moments and weight, and the change of the weight.

    `M1' = alpha * M1 + (1 - alpha) * G`, `M2' = beta * M2 + (1 - beta) * G * G`,
    `c1 = 1 - alpha^T` and `c2 = 1 - beta^T` if the count T is above 0 and do_bias_correction, else 1.
    Mode 0: `move = -R * (M1' / c1 / (sqrt(M2' / c2) + epsilon) + lambda * W)`; mode 1, with
    `step = R * sqrt(c2) / c1 * M1' / (sqrt(M2') + epsilon)`: `move = -step - R * lambda * (W - step)`.
    Mode 0 is also written as such a step, with `epsilon * sqrt(c2)`: c1 and c2 are scalars, and each node on a whole
    weight costs time.
    """
    check_states(f)
    if any(f.input(i) is not None for i in range(6, 10)):
        raise f.refusal("its CPU kernel ignores the inputs 6 to 9, and that for CUDA does not")
    count, weight, gradient, *old = (f.data(i) for i in range(1, 6))
    decay, epsilon, dtype = f.attribute("lambda", 0.0), f.attribute("epsilon", 1e-8), dtype_of(weight)
    if any(dtype_of(value) is not dtype for value in (gradient, *old)):
        raise f.refusal("its weight, gradient and moments differ in type")
    rate = f.cast(scalar(f, f.data(0)), dtype)
    bases = [float(np.float32(f.attribute(*held))) for held in (("alpha", 0.9), ("beta", 0.999))]
    moments = []
    for moment, base, power in zip(old, bases, (gradient, f("Mul", gradient, gradient)), strict=True):
        moments.append(f("Add", f("Mul", moment, base), f("Mul", power, float(np.float32(1) - np.float32(base)))))
    size, shift = rate, f.number(epsilon, dtype)
    mode = f.attribute("weight_decay_mode", 0)
    if f.attribute("do_bias_correction", 1):
        first, second = (f.cast(_bias_correction(f, base, count), dtype) for base in bases)
        size = f("Mul", rate, f("Div", f("Sqrt", second), first))
        shift = shift if mode else f("Mul", f("Sqrt", second), shift)
    step = f("Div", f("Mul", moments[0], size), f("Add", f("Sqrt", moments[1]), shift))
    if decay:
        step = f("Add", step, f("Mul", f("Sub", weight, step) if mode else weight, f("Mul", rate, decay)))
    return [f("Add", count, 1), *moments, f("Sub", weight, step), f("Neg", step) if f.wants(4) else None]


def _bias_correction(f: Writer, base: float, count: ir.Value) -> ir.Value:
    double = ir.DataType.DOUBLE
    exponent = f("Cast", scalar(f, count), to=double)
    correction = f("Sub", 1.0, f("Pow", f.number(base, double), exponent))
    return f("Where", f("Greater", exponent, 0.0), correction, 1.0)


def _accumulator(f: Writer) -> list[ir.Value]:
    """Compute `old + value`, or the old sum by update_signal."""
    check_states(f)
    old, signal = f.data(0), f.input(2)
    new = f("Add", old, f.cast(f.data(1), f.dtype))
    return [new if signal is None else f("Where", scalar(f, signal), new, old)]


def _accumulator_v2(f: Writer) -> list[ir.Value]:
    """Compute true, and `old + value`, with 0 for the old sum by overwrite_flag."""
    check_states(f)
    old, signal = f.data(0), f.input(2)
    # A skipped step keeps the old sum, or its reset by the flag: guard-updates finds the sum in this form.
    kept = old if signal is None else f("Where", scalar(f, signal), f.number(0.0, dtype_of(old)), old)
    return [f.constant(np.asarray([True])), f("Add", kept, f.cast(f.data(1), f.dtype))]


FORMULAS: dict[tuple[str, str], Formula] = {
    (MICROSOFT, "SGDOptimizer"): _sgd,
    (MICROSOFT, "AdamOptimizer"): _adam,
    (MICROSOFT, "InPlaceAccumulator"): _accumulator,
    (MICROSOFT, "InPlaceAccumulatorV2"): _accumulator_v2,
}
