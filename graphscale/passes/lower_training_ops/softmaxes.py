"""The derivatives of Softmax and LogSoftmax."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from graphscale.operators import MICROSOFT
from graphscale.passes.lower_training_ops.writer import Formula, Writer

__all__ = ["FORMULAS"]


def _softmax(f: Writer) -> list[ir.Value]:
    """Compute `dX = Y * (dY - sum(dY * Y))` over the axes from `axis` on, as the schema's function does."""
    return [_softmax_slope(f, _trailing_axes(f))]


def _softmax_13(f: Writer) -> list[ir.Value]:
    """Compute SoftmaxGrad along `axis` alone, as the kernel does."""
    return [_softmax_slope(f, [f.attribute("axis", -1)])]


def _log_softmax(f: Writer) -> list[ir.Value]:
    """Compute `dX = dY - exp(Y) * sum(dY)` over the axes from `axis` on, as the kernel does."""
    return [_log_softmax_slope(f, _trailing_axes(f))]


def _log_softmax_13(f: Writer) -> list[ir.Value]:
    """Compute LogSoftmaxGrad along `axis` alone, as the kernel does."""
    return [_log_softmax_slope(f, [f.attribute("axis", -1)])]


def _softmax_slope(f: Writer, axes: Sequence[int]) -> ir.Value:
    dy, y = f.data(0), f.data(1)
    return f("Mul", f("Sub", dy, f.reduce_sum(f("Mul", dy, y), axes)), y)


def _log_softmax_slope(f: Writer, axes: Sequence[int]) -> ir.Value:
    dy, y = f.data(0), f.data(1)
    return f("Sub", dy, f("Mul", f("Exp", y), f.reduce_sum(dy, axes)))


def _trailing_axes(f: Writer) -> range:
    """Return the axes that Softmax joins before opset 13: `axis` and all later ones."""
    axis = f.attribute("axis", 1)
    if axis < 0:
        return range(axis, 0)
    return range(axis, f.rank(f.data(1)))


FORMULAS: dict[tuple[str, str], Formula] = {
    (MICROSOFT, "SoftmaxGrad"): _softmax,
    (MICROSOFT, "SoftmaxGrad_13"): _softmax_13,
    (MICROSOFT, "LogSoftmaxGrad"): _log_softmax,
    (MICROSOFT, "LogSoftmaxGrad_13"): _log_softmax_13,
}
