"""Products, quotients and roundings, element by element."""

from __future__ import annotations

import onnx_ir as ir

from graphscale.operators import MICROSOFT
from graphscale.passes.lower_training_ops.broadcasting import sum_to
from graphscale.passes.lower_training_ops.schema_types import widened
from graphscale.passes.lower_training_ops.writer import Formula, Writer

__all__ = ["FORMULAS"]


def _scale(f: Writer) -> list[ir.Value]:
    """Compute `X * S`, or with scale_down `X * (1 / S)`, S being one number of any type, as the kernel does."""
    x, factor = f.data(0), _scalar(f, f.data(1))
    if f.attribute("scale_down", 0):
        # The number of elements of a mean may exceed the range of float16.
        factor = f("Reciprocal", f.cast(factor, widened(f.dtype)))
    return [f("Mul", x, f.cast(factor, f.dtype))]


def _scaled_sum(f: Writer) -> list[ir.Value]:
    """Compute `scale_0 * A + scale_1 * B + scale_2 * C`, as the schema says; C may be missing."""
    given = [(i, value) for i, value in enumerate(f.node.inputs) if value is not None]
    first, *others = [f("Mul", value, f.attribute(f"scale_{i}")) for i, value in given]
    for other in others:
        first = f("Add", first, other)
    return [first]


def _batch_scale(f: Writer) -> list[ir.Value | None]:
    """Compute `scale_i * X` for each result, as the schema says."""
    count = len(f.node.outputs)
    return [f("Mul", f.data(0), f.attribute(f"scale_{i}")) if f.wants(i) else None for i in range(count)]


def _div(f: Writer) -> list[ir.Value | None]:
    """Compute `dA = dY / B` and `dB = -(dY / B) * (A / B)`, summed over repeated axes, of `Y = A / B`."""
    dy, a, b = f.data(0), f.data(1), f.data(2)
    da = f("Div", dy, b)
    db = f("Neg", f("Mul", da, f("Div", a, b))) if f.wants(1) else None
    return [sum_to(f, da, a) if f.wants(0) else None, None if db is None else sum_to(f, db, b)]


def _fake_quant(f: Writer) -> list[ir.Value]:
    """Compute `q = round(X / S) + Z`, `Y = (clip(q, quant_min, quant_max) - Z) * S`, and the mask of unclipped q.

    Source: the kernel; ties are rounded to even. The kernel wraps beyond the range of int64, and returns the lower
        bound for large numbers.
    """
    if f.opset < 11:
        raise f.refusal("Round needs opset 11")
    x, scale, zero = f.data(0), _scalar(f, f.data(1)), _scalar(f, f.data(2))
    low, high = (f.number(f.attribute(name, number)) for name, number in (("quant_min", 0), ("quant_max", 255)))
    q = f("Add", f("Round", f("Div", x, scale)), zero)
    clipped = f("Clip", q, low, high)
    return [f("Mul", f("Sub", clipped, zero), scale), f("Equal", q, clipped)]


def _fake_quant_grad(f: Writer) -> list[ir.Value]:
    """Compute `dX = dY where mask else 0`, as the schema says."""
    return [f("Where", f.data(1), f.data(0), 0.0)]


def _zero_gradient(f: Writer) -> list[ir.Value]:
    """Return zeros of the shape of the first input, as the schema says."""
    if not f.wants(0):
        raise f.refusal("its result is not read: it writes into its input, and no standard operator does so")
    return [f.expand(f.number(0.0), f.shape_of(f.data(0)))]


def _scalar(f: Writer, value: ir.Value) -> ir.Value:
    """Return one element as a scalar: a vector would change the shape of a product with a scalar."""
    return value if value.shape is not None and len(value.shape) == 0 else f.reshape(value, ())


FORMULAS: dict[tuple[str, str], Formula] = {
    (MICROSOFT, "Scale"): _scale,
    (MICROSOFT, "ScaledSum"): _scaled_sum,
    (MICROSOFT, "BatchScale"): _batch_scale,
    (MICROSOFT, "DivGrad"): _div,
    (MICROSOFT, "FakeQuant"): _fake_quant,
    (MICROSOFT, "FakeQuantGrad"): _fake_quant_grad,
    (MICROSOFT, "ZeroGradient"): _zero_gradient,
}
