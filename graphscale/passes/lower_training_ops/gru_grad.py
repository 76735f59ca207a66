"""The gradient of GRU, from the gates that GRUTraining keeps.

The formulas are those of ONNX Runtime's CPU kernel. The order of gates is z, r, h.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import onnx_ir as ir

from graphscale.operators import MICROSOFT
from graphscale.passes.lower_training_ops.gru import ACTIVATIONS
from graphscale.passes.lower_training_ops.recurrent_parts import (
    check_recurrence,
    joined,
    part,
    previous,
    sigmoid_slope,
    split,
    total,
    weight_gradient,
    zeros,
)
from graphscale.passes.lower_training_ops.time_steps import Cell, Step, run_steps
from graphscale.passes.lower_training_ops.writer import Formula, Writer

__all__ = ["FORMULAS"]


def _gru_grad(f: Writer) -> list[ir.Value | None]:
    """Compute the gradients of X, W, R, B and the first H.

    From the last step to the first, with `dH += dY_t`, and all but dH from the forward pass:
    `da_z = dH * (H_before - h) * z * (1 - z)`, `da_h = dH * (1 - z) * (1 - h^2)`,
    `da_r = (da_h Rh) * H_before * r * (1 - r)`, then `dH = dH * z + (da_z, da_r) Rzr + (da_h Rh) * r`;
    if linear_before_reset, `da_r = da_h * (H_before Rh^T + Rbh) * r * (1 - r)`, then
    `dH = dH * z + (da_z, da_r, da_h * r) R`.
    Over all steps: `dX = da W`, `dW = da^T X`, `dR = (da_z^T H_before, da_r^T H_before, da_h^T (r * H_before))`,
    `dB = (sum da, sum da)`; if linear_before_reset, with `da_h * r` for da_h in the second half of dB.
    """
    check_recurrence(f, ACTIVATIONS, 4)
    x, size = f.data(0), f.attribute("hidden_size")
    is_linear = bool(f.attribute("linear_before_reset", 0))
    before = previous(f, f.input(5) or zeros(f, x, size), f.squeeze(f.data(6), [1]))
    z, r, h = split(f, f.squeeze(f.data(7), [1]), 3, -1)
    slope_z = f("Mul", f("Sub", before, h), sigmoid_slope(f, z))
    slope_h = f("Mul", f("Sub", 1.0, z), f("Sub", 1.0, f("Mul", h, h)))
    upstream = [] if (held := f.input(8)) is None else [f.squeeze(held, [1])]
    states = [f.input(9) or zeros(f, x, size)]
    whole = f.squeeze(f.data(2), [0])
    gates, last = (part(f, whole, 0, *end) for end in ((0, 2 * size), (2 * size, 3 * size)))
    if is_linear:
        product = f("MatMul", before, f("Transpose", last, perm=[1, 0]))
        if (bias := f.input(3)) is not None:
            product = f("Add", product, part(f, bias, 1, 5 * size, 6 * size))
        slope_r = f("Mul", slope_h, f("Mul", product, sigmoid_slope(f, r)))
        slopes = joined(f, [slope_z, slope_r, f("Mul", slope_h, r)], -1)
        cell: Cell = functools.partial(_linear_step_back, recurrence=whole)
        [first], (inner, d_hidden) = run_steps(f, cell, states, [slopes, z, *upstream], backward=True)
        da_h = f("Mul", d_hidden, slope_h)
        da = f("Concat", part(f, inner, 2, 0, 2 * size), da_h, axis=2)
    else:
        slope_r = f("Mul", before, sigmoid_slope(f, r))
        cell = functools.partial(_step_back, gates=gates, last_gate=last)
        sequences = [slope_z, slope_r, slope_h, z, r, *upstream]
        [first], (da_zr, da_h) = run_steps(f, cell, states, sequences, backward=True)
        da = inner = f("Concat", da_zr, da_h, axis=2)
    results: list[ir.Value | None] = [None] * 4 + [first]
    if f.wants(0):
        results[0] = f("MatMul", da, f.squeeze(f.data(1), [0]))
    if f.wants(1):
        results[1] = weight_gradient(f, da, x)
    if f.wants(2) and is_linear:
        results[2] = weight_gradient(f, inner, before)
    elif f.wants(2):
        pairs = (da_zr, before), (da_h, f("Mul", r, before))
        results[2] = f("Concat", *(weight_gradient(f, *pair) for pair in pairs), axis=1)
    if f.wants(3):
        results[3] = joined(f, [total(f, da), total(f, inner)], -1)
    return results


def _step_back(
    f: Writer, states: Sequence[ir.Value], slices: Sequence[ir.Value], gates: ir.Value, last_gate: ir.Value
) -> Step:
    slope_z, slope_r, slope_h, z, r, *upstream = slices
    d_hidden = f("Add", states[0], upstream[0]) if upstream else states[0]
    da_h = f("Mul", d_hidden, slope_h)
    through = f("MatMul", da_h, last_gate)
    da_zr = joined(f, [f("Mul", d_hidden, slope_z), f("Mul", through, slope_r)], -1)
    kept = f("Add", f("Mul", d_hidden, z), f("Mul", through, r))
    return [f("Add", kept, f("MatMul", da_zr, gates))], (da_zr, da_h)


def _linear_step_back(f: Writer, states: Sequence[ir.Value], slices: Sequence[ir.Value], recurrence: ir.Value) -> Step:
    slopes, z, *upstream = slices
    d_hidden = f("Add", states[0], upstream[0]) if upstream else states[0]
    inner = f("Mul", joined(f, [d_hidden] * 3, -1), slopes)
    return [f("Add", f("Mul", d_hidden, z), f("MatMul", inner, recurrence))], (inner, d_hidden)


FORMULAS: dict[tuple[str, str], Formula] = {(MICROSOFT, "GRUGrad"): _gru_grad}
