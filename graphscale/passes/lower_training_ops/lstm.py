"""An LSTM that keeps its gates for the backward pass, and its gradient.

The formulas are those of ONNX's LSTM with its default activations, in one direction, and of ONNX Runtime's CPU kernels.
The order of gates is i, o, f, c.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import onnx_ir as ir

from graphscale.operators import MICROSOFT
from graphscale.passes.lower_training_ops.recurrent_parts import (
    check_recurrence,
    joined,
    previous,
    sigmoid_slope,
    split,
    total,
    transposed,
    weight_gradient,
    zeros,
)
from graphscale.passes.lower_training_ops.time_steps import Step, run_steps
from graphscale.passes.lower_training_ops.writer import Formula, Writer

__all__ = ["FORMULAS"]

_ACTIVATIONS = ("sigmoid", "tanh", "tanh")


def _lstm(f: Writer) -> list[ir.Value]:
    """Compute all hidden states, the last one, the last cell state, all cell states, and all gates.

    `a = X W^T + H R^T + Wb + Rb`, with the last step's states H and C;
    `i = sigmoid(a_i + P_i * C)`, `f = sigmoid(a_f + P_f * C)`, `c = tanh(a_c)`, `C' = f * C + i * c`,
    `o = sigmoid(a_o + P_o * C')`, `H' = o * tanh(C')`.
    """
    check_recurrence(f, _ACTIVATIONS, 4)
    x, size = f.data(0), f.attribute("hidden_size")
    projected = f("MatMul", x, transposed(f, f.data(1)))
    if (bias := f.input(3)) is not None:
        projected = f("Add", projected, f.reduce_sum(f.reshape(bias, [2, -1]), [0], keepdims=False))
    peepholes = f.input(7)
    held = None if peepholes is None else split(f, peepholes, 3, 1)
    cell = functools.partial(_step, recurrence=transposed(f, f.data(2)), peepholes=held)
    states = [f.input(i) or zeros(f, x, size) for i in (5, 6)]
    last, (hidden, cells, *gates) = run_steps(f, cell, states, [projected])
    return [
        f.unsqueeze(hidden, [1]),
        *last,
        f.unsqueeze(cells, [1]),
        f.unsqueeze(joined(f, gates, -1), [1]),
    ]


def _step(
    f: Writer,
    states: Sequence[ir.Value],
    slices: Sequence[ir.Value],
    recurrence: ir.Value,
    peepholes: Sequence[ir.Value] | None,
) -> Step:
    hidden, cell = states
    i, o, forget, c = split(f, f("Add", f("MatMul", hidden, recurrence), slices[0]), 4, -1)
    if peepholes is not None:
        i, forget = (f("Add", gate, f("Mul", cell, peepholes[k])) for gate, k in ((i, 0), (forget, 2)))
    i, forget, c = f("Sigmoid", i), f("Sigmoid", forget), f("Tanh", c)
    cell = f("Add", f("Mul", forget, cell), f("Mul", i, c))
    if peepholes is not None:
        o = f("Add", o, f("Mul", cell, peepholes[1]))
    o = f("Sigmoid", o)
    hidden = f("Mul", o, f("Tanh", cell))
    return (hidden, cell), (hidden, cell, i, o, forget, c)


def _lstm_grad(f: Writer) -> list[ir.Value | None]:
    """Compute the gradients of X, W, R, B, the first H, the first C, and P.

    From the last step to the first, with `dH += dY_t`, and all but dH and dC from the forward pass:
    `dC += dH * o * (1 - tanh(C)^2)`,
    `da = (dC * c * i * (1 - i), dH * tanh(C) * o * (1 - o), dC * C_before * f * (1 - f), dC * i * (1 - c^2))`,
    then `dH = da R`, `dC = dC * f`. Peephole weights add nothing to dC, as in the kernel. Over all steps: `dX = da W`,
    `dW = da^T X`, `dR = da^T H_before`, `dB = (sum da, sum da)`, `dP = (sum da_i * C_before, sum da_o * C, sum da_f *
    C_before)`.
    """
    check_recurrence(f, _ACTIVATIONS, 3)
    x, size = f.data(0), f.attribute("hidden_size")
    first_hidden, first_cell = (f.input(k) or zeros(f, x, size) for k in (4, 5))
    hidden, cells, gates = (f.squeeze(f.data(k), [1]) for k in (6, 7, 8))
    cells_before = previous(f, first_cell, cells)
    i, o, forget, c = split(f, gates, 4, -1)
    bent = f("Tanh", cells)
    slopes = [
        f("Mul", c, sigmoid_slope(f, i)),
        f("Mul", bent, sigmoid_slope(f, o)),
        f("Mul", cells_before, sigmoid_slope(f, forget)),
        f("Mul", i, f("Sub", 1.0, f("Mul", c, c))),
    ]
    sequences = [joined(f, slopes, -1), f("Mul", o, f("Sub", 1.0, f("Mul", bent, bent))), forget]
    if (upstream := f.input(9)) is not None:
        sequences.append(f.squeeze(upstream, [1]))
    states = [f.input(k) or zeros(f, x, size) for k in (10, 11)]
    cell = functools.partial(_step_back, recurrence=f.squeeze(f.data(2), [0]))
    (d_hidden, d_cell), (da,) = run_steps(f, cell, states, sequences, backward=True)

    results: list[ir.Value | None] = [None, None, None, None, d_hidden, d_cell, None]
    if f.wants(0):
        results[0] = f("MatMul", da, f.squeeze(f.data(1), [0]))
    if f.wants(1):
        results[1] = weight_gradient(f, da, x)
    if f.wants(2):
        results[2] = weight_gradient(f, da, previous(f, first_hidden, hidden))
    if f.wants(3):
        results[3] = joined(f, [total(f, da)] * 2, -1)
    if f.wants(6):
        di, do, df, _ = split(f, da, 4, -1)
        parts = (f("Mul", one, two) for one, two in ((di, cells_before), (do, cells), (df, cells_before)))
        results[6] = total(f, joined(f, list(parts), -1))
    return results


def _step_back(f: Writer, states: Sequence[ir.Value], slices: Sequence[ir.Value], recurrence: ir.Value) -> Step:
    slopes, through, forget, *upstream = slices
    d_hidden, d_cell = states
    if upstream:
        d_hidden = f("Add", d_hidden, upstream[0])
    d_cell = f("Add", d_cell, f("Mul", d_hidden, through))
    da = f("Mul", joined(f, [d_cell, d_hidden, d_cell, d_cell], -1), slopes)
    return (f("MatMul", da, recurrence), f("Mul", d_cell, forget)), (da,)


FORMULAS: dict[tuple[str, str], Formula] = {
    (MICROSOFT, "LSTMTraining"): _lstm,
    (MICROSOFT, "LSTMGrad"): _lstm_grad,
}
