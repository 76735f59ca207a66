"""The derivative of Dropout."""

from __future__ import annotations

import onnx_ir as ir

from graphscale.operators import MICROSOFT
from graphscale.passes.lower_training_ops.class_numbers import widest
from graphscale.passes.lower_training_ops.masking import as_number
from graphscale.passes.lower_training_ops.writer import Formula, Writer

__all__ = ["FORMULAS"]


def _dropout(f: Writer) -> list[ir.Value]:
    """Compute `dX = dY * (1 / (1 - ratio) if mask else 0)`, as the kernel does.

    The ratio is an input, 0.5 if omitted. The kernel reads neither `training_mode` nor the attribute `ratio` of Dropout
    before opset 12. With a ratio of 0, it ignores the mask, too, since Dropout keeps all elements.
    """
    ratio = f.input(2)
    if ratio is None:
        scale = f.number(2.0)
    else:
        kept = f("Sub", 1.0, f.cast(f.reshape(ratio, []), ir.DataType.FLOAT))
        # In float32, as in the kernels, except for double.
        scale = f.cast(f("Div", 1.0, f.cast(kept, widest(f))), f.dtype)
    dy = f.data(0)
    return [f("Mul", dy, f("Mul", as_number(f, f.data(1), dy), scale))]


FORMULAS: dict[tuple[str, str], Formula] = {(MICROSOFT, "DropoutGrad"): _dropout}
