"""A GRU that keeps its gates for the backward pass.

The formula is that of ONNX's GRU with its default activations, in one direction. The order of gates is z, r, h.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import onnx_ir as ir

from graphscale.operators import MICROSOFT
from graphscale.passes.lower_training_ops.recurrent_parts import (
    check_recurrence,
    joined,
    part,
    split,
    transposed,
    zeros,
)
from graphscale.passes.lower_training_ops.time_steps import Cell, Step, run_steps
from graphscale.passes.lower_training_ops.writer import Formula, Writer

__all__ = ["ACTIVATIONS", "FORMULAS"]

ACTIVATIONS = ("sigmoid", "tanh")


def _gru(f: Writer) -> list[ir.Value]:
    """Compute all hidden states, the last one, and all gates.

    With the last step's state H: `z = sigmoid(X Wz^T + H Rz^T + Wbz + Rbz)`, r alike,
    `h = tanh(X Wh^T + Wbh + (r * H) Rh^T + Rbh)`, or, if linear_before_reset,
    `h = tanh(X Wh^T + Wbh + r * (H Rh^T + Rbh))`; `H' = h + z * (H - h)`.
    """
    check_recurrence(f, ACTIVATIONS, 4)
    x, size = f.data(0), f.attribute("hidden_size")
    is_linear = bool(f.attribute("linear_before_reset", 0))
    projected, inner = f("MatMul", x, transposed(f, f.data(1))), None
    if (bias := f.input(3)) is not None:
        outer, inner = split(f, bias, 2, 1)
        projected = f("Add", projected, outer if is_linear else f("Add", outer, inner))
    recurrence = transposed(f, f.data(2))
    if is_linear:
        cell: Cell = functools.partial(_linear_step, recurrence=recurrence, bias=inner)
    else:
        ends = [(0, 2 * size), (2 * size, 3 * size)]
        gates, last = (part(f, recurrence, 1, *end) for end in ends)
        cell = functools.partial(_step, gates=gates, last_gate=last)
    first = f.input(5) or zeros(f, x, size)
    [final], (hidden, *kept) = run_steps(f, cell, [first], split(f, projected, 3, -1))
    return [f.unsqueeze(hidden, [1]), final, f.unsqueeze(joined(f, kept, -1), [1])]


def _step(
    f: Writer, states: Sequence[ir.Value], slices: Sequence[ir.Value], gates: ir.Value, last_gate: ir.Value
) -> Step:
    [hidden] = states
    own = split(f, f("MatMul", hidden, gates), 2, -1)
    z, r = (f("Sigmoid", f("Add", slices[k], own[k])) for k in (0, 1))
    h = f("Tanh", f("Add", slices[2], f("MatMul", f("Mul", r, hidden), last_gate)))
    return _result(f, hidden, z, r, h)


def _linear_step(
    f: Writer, states: Sequence[ir.Value], slices: Sequence[ir.Value], recurrence: ir.Value, bias: ir.Value | None
) -> Step:
    [hidden] = states
    product = f("MatMul", hidden, recurrence)
    own = split(f, product if bias is None else f("Add", product, bias), 3, -1)
    z, r = (f("Sigmoid", f("Add", slices[k], own[k])) for k in (0, 1))
    h = f("Tanh", f("Add", slices[2], f("Mul", r, own[2])))
    return _result(f, hidden, z, r, h)


def _result(f: Writer, hidden: ir.Value, z: ir.Value, r: ir.Value, h: ir.Value) -> Step:
    hidden = f("Add", h, f("Mul", z, f("Sub", hidden, h)))
    return [hidden], (hidden, z, r, h)


FORMULAS: dict[tuple[str, str], Formula] = {(MICROSOFT, "GRUTraining"): _gru}
