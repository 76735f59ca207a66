"""The finite check: are all elements of all gradients finite?"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from graphscale.graph.builder import Editor, shape_like
from graphscale.graph.types import dtype_of
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
        dtype, value = dtype_of(gradient), gradient
        if dtype is not ir.DataType.DOUBLE and dtype is not ir.DataType.FLOAT:
            # Small types have few kernels on the CPU; what is finite stays finite in float32.
            value = _cast(editor, pass_name, value, f"{gradient.name}.wide")
            dtype = ir.DataType.FLOAT
        zero = _zero(editor, dtype)
        name, shape = f"{gradient.name}.zeroed", shape_like(gradient)
        probe = editor.node(pass_name, "Mul", [value, zero], [(name, dtype, shape)]).outputs[0]
        outputs = [(f"{gradient.name}.probe", dtype, ir.Shape([]))]
        probe = editor.node(pass_name, "ReduceSum", [probe], outputs, attributes={"keepdims": 0}).outputs[0]
        probes.append(_cast(editor, pass_name, probe, "probe") if dtype is ir.DataType.DOUBLE else probe)
    total = _scalar(editor, pass_name, "Sum", probes, "probes", ir.DataType.FLOAT)
    found = _scalar(editor, pass_name, "IsNaN", [total], "any_nonfinite", ir.DataType.BOOL)
    return _scalar(editor, pass_name, "Not", [found], "all_finite", ir.DataType.BOOL)


def _by_kernel(editor: Editor, gradients: Sequence[ir.Value], pass_name: str) -> ir.Value:
    """One IsAllFinite node for each dtype: its inputs must have one dtype."""
    by_dtype: dict[ir.DataType, list[ir.Value]] = {}
    for gradient in gradients:
        by_dtype.setdefault(dtype_of(gradient), []).append(gradient)
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
        finite = _scalar(editor, pass_name, "And", [finite, other], name, ir.DataType.BOOL)
    return finite


def _cast(editor: Editor, pass_name: str, value: ir.Value, name: str) -> ir.Value:
    outputs = [(name, ir.DataType.FLOAT, shape_like(value))]
    return editor.node(pass_name, "Cast", [value], outputs, attributes={"to": ir.DataType.FLOAT}).outputs[0]


def _scalar(
    editor: Editor, pass_name: str, op_type: str, inputs: Sequence[ir.Value], name: str, dtype: ir.DataType
) -> ir.Value:
    return editor.node(pass_name, op_type, inputs, [(name, dtype, ir.Shape([]))]).outputs[0]


def _zero(editor: Editor, dtype: ir.DataType) -> ir.Value:
    return editor.shared_constant(f"graphscale/zero.{dtype.name.lower()}", np.zeros((), dtype=dtype.numpy()))
