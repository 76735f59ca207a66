"""The derivatives of activations, times the cotangent.

Each formula is that of ONNX Runtime's kernel: the operator's schema names it without details.
"""

from __future__ import annotations

import math

import onnx_ir as ir

from graphscale.operators import MICROSOFT
from graphscale.passes.lower_training_ops.masking import as_number, keep_where
from graphscale.passes.lower_training_ops.writer import Formula, Writer

__all__ = ["FORMULAS"]


def _relu(f: Writer) -> list[ir.Value]:
    """Compute `dX = dY if Y > 0 else 0`, Y being the result of Relu."""
    dy, y = f.data(0), f.data(1)
    return [keep_where(f, f("Greater", y, 0.0), dy)]


def _leaky_relu(f: Writer) -> list[ir.Value]:
    """Compute `dX = dY if Y > 0 else alpha * dY`, Y being the result of LeakyRelu."""
    dy, alpha, is_positive = f.data(0), f.attribute("alpha", 0.01), f("Greater", f.data(1), 0.0)
    if 0 <= alpha <= 1:
        return [f("Mul", dy, f("Max", as_number(f, is_positive, dy), alpha))]
    return [f("Where", is_positive, dy, f("Mul", dy, alpha))]


def _sigmoid(f: Writer) -> list[ir.Value]:
    """Compute `dX = dY * Y * (1 - Y)`, Y being the result of Sigmoid."""
    dy, y = f.data(0), f.data(1)
    return [f("Mul", f("Mul", dy, y), f("Sub", 1.0, y))]


def _tanh(f: Writer) -> list[ir.Value]:
    """Compute `dX = dY * (1 - Y * Y)`, Y being the result of Tanh."""
    dy, y = f.data(0), f.data(1)
    return [f("Mul", dy, f("Sub", 1.0, f("Mul", y, y)))]


def _gelu(f: Writer) -> list[ir.Value]:
    """Compute `dX = dY * (0.5 * (1 + erf(X / sqrt(2))) + X * exp(-X * X / 2) / sqrt(2 * pi))`."""
    return [_erf_slope(f, f.data(0), f.data(1))]


def _fast_gelu(f: Writer) -> list[ir.Value]:
    """Compute `dX = dY * 0.5 * (1 + t + (1 - t * t) * (a * X + 3 * c * X^3))`.

    Here `a = sqrt(2 / pi)`, `c = 0.044715 * a` and `t = tanh(a * X + c * X^3)`.
    """
    return [_tanh_slope(f, f.data(0), f.data(1))]


def _biased_gelu(f: Writer) -> list[ir.Value]:
    """Compute GeluGrad of `X + B`."""
    return [_erf_slope(f, f.data(0), f("Add", f.data(1), f.data(2)))]


def _biased_fast_gelu(f: Writer) -> list[ir.Value]:
    """Compute FastGeluGrad of `X + B`."""
    return [_tanh_slope(f, f.data(0), f("Add", f.data(1), f.data(2)))]


def _quick_gelu(f: Writer) -> list[ir.Value]:
    """Compute `dX = dY * s * (1 + alpha * X * (1 - s))`, with `s = sigmoid(alpha * X)`."""
    dy, x = f.data(0), f.data(1)
    scaled = f("Mul", x, f.attribute("alpha", 1.702))
    s = f("Sigmoid", scaled)
    return [f("Mul", f("Mul", dy, s), f("Add", 1.0, f("Mul", scaled, f("Sub", 1.0, s))))]


def _erf_slope(f: Writer, dy: ir.Value, x: ir.Value) -> ir.Value:
    normal = f("Mul", f("Add", f("Erf", f("Mul", x, math.sqrt(0.5))), 1.0), 0.5)
    density = f("Exp", f("Mul", f("Mul", x, x), -0.5))
    return f("Mul", dy, f("Add", normal, f("Mul", f("Mul", x, 1 / math.sqrt(2 * math.pi)), density)))


def _tanh_slope(f: Writer, dy: ir.Value, x: ir.Value) -> ir.Value:
    a = math.sqrt(2 / math.pi)
    line, cube = f("Mul", x, a), f("Mul", f("Mul", f("Mul", x, x), x), 0.044715 * a)
    t = f("Tanh", f("Add", line, cube))
    bend = f("Mul", f("Sub", 1.0, f("Mul", t, t)), f("Add", line, f("Mul", cube, 3.0)))
    return f("Mul", f("Mul", dy, 0.5), f("Add", f("Add", t, bend), 1.0))


FORMULAS: dict[tuple[str, str], Formula] = {
    (MICROSOFT, "ReluGrad"): _relu,
    (MICROSOFT, "LeakyReluGrad"): _leaky_relu,
    (MICROSOFT, "SigmoidGrad"): _sigmoid,
    (MICROSOFT, "TanhGrad"): _tanh,
    (MICROSOFT, "GeluGrad"): _gelu,
    (MICROSOFT, "FastGeluGrad"): _fast_gelu,
    (MICROSOFT, "QuickGeluGrad"): _quick_gelu,
    (MICROSOFT, "BiasGeluGrad_dX"): _biased_gelu,
    (MICROSOFT, "BiasFastGeluGrad_dX"): _biased_fast_gelu,
}
