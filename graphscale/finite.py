"""The finite check: are all elements of all gradients finite?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import ml_dtypes
import numpy as np
import onnx_ir as ir

from graphscale.editing import Editor
from graphscale.targets import Target

__all__ = ["all_finite"]


def all_finite(editor: Editor, gradients: Sequence[ir.Value], target: Target, pass_name: str) -> ir.Value:
    """Add nodes that test gradients for finiteness; the result is a scalar bool value, true for no gradients.

    Args:
        editor: where to add them.
        gradients: floating-point values.
        target: decides between `com.microsoft.IsAllFinite` and standard ops.
        pass_name: the mark of the nodes.
    """
    if not gradients:
        return editor.node(
            pass_name,
            "Constant",
            [],
            [("all_finite", ir.DataType.BOOL, [])],
            attributes={"value": ir.tensor(np.asarray(True))},
        ).outputs[0]
    if target.is_all_finite:
        return _by_kernel(editor, gradients, pass_name)
    return _by_standard_ops(editor, gradients, pass_name)


def _by_standard_ops(editor: Editor, gradients: Sequence[ir.Value], pass_name: str) -> ir.Value:
    """IEEE 754: 0*x is 0 for a finite x and NaN otherwise, so the sum of all 0*x is NaN if any x is not finite."""
    probes = []
    for gradient in gradients:
        assert gradient.dtype is not None
        dtype = gradient.dtype
        zero = _zero(editor, dtype)
        probe = _op(editor, pass_name, "Mul", [gradient, zero], f"{gradient.name}.zeroed", dtype, gradient.shape)
        probe = _op(
            editor,
            pass_name,
            "ReduceSum",
            [probe],
            f"{gradient.name}.probe",
            dtype,
            [],
            attributes={"keepdims": 0},
        )
        if dtype is not ir.DataType.FLOAT:
            to = {"to": ir.DataType.FLOAT}
            probe = _op(editor, pass_name, "Cast", [probe], "probe", ir.DataType.FLOAT, [], attributes=to)
        probes.append(probe)
    total = _op(editor, pass_name, "Sum", probes, "probes", ir.DataType.FLOAT, [])
    found = _op(editor, pass_name, "IsNaN", [total], "any_nonfinite", ir.DataType.BOOL, [])
    return _op(editor, pass_name, "Not", [found], "all_finite", ir.DataType.BOOL, [])


def _by_kernel(editor: Editor, gradients: Sequence[ir.Value], pass_name: str) -> ir.Value:
    """One IsAllFinite node for each dtype: its inputs must have one dtype."""
    by_dtype: dict[ir.DataType, list[ir.Value]] = {}
    for gradient in gradients:
        assert gradient.dtype is not None
        by_dtype.setdefault(gradient.dtype, []).append(gradient)
    results = []
    for dtype, group in by_dtype.items():
        name = "all_finite" if len(by_dtype) == 1 else f"all_finite.{dtype.name.lower()}"
        results.append(
            editor.node(
                pass_name, "IsAllFinite", group, [(name, ir.DataType.BOOL, [])], domain="com.microsoft"
            ).outputs[0]
        )
    finite = results[0]
    for i, other in enumerate(results[1:], 2):
        name = "all_finite" if i == len(results) else f"all_finite.{i}"
        finite = _op(editor, pass_name, "And", [finite, other], name, ir.DataType.BOOL, [])
    return finite


def _op(
    editor: Editor,
    pass_name: str,
    op_type: str,
    inputs: Sequence[ir.Value],
    name: str,
    dtype: ir.DataType,
    shape: ir.Shape | Sequence[int] | None,
    attributes: Mapping[str, int] | None = None,
) -> ir.Value:
    return editor.node(pass_name, op_type, inputs, [(name, dtype, shape)], attributes=attributes).outputs[0]


def _zero(editor: Editor, dtype: ir.DataType) -> ir.Value:
    name = f"graphscale/zero.{dtype.name.lower()}"
    existing = editor.graph.initializers.get(name)
    if existing is not None:
        return existing
    numpy_dtype = ml_dtypes.bfloat16 if dtype is ir.DataType.BFLOAT16 else dtype.numpy()
    return editor.constant(name, np.zeros((), dtype=numpy_dtype))
