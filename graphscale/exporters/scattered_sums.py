"""Sums of numbers by their places, in a form that ONNX Runtime computes right on a CPU."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from graphscale.errors import ExportError
from graphscale.graph.builder import Builder, Editor
from graphscale.graph.inference import complete_types
from graphscale.graph.values import inputs_of

__all__ = ["rewrite_scattered_sums"]

_INT = ir.DataType.INT64


def rewrite_scattered_sums(model: ir.Model) -> None:
    """Let ScatterElements compute all reductions by places, in float32 for float16.

    ScatterND adds in several threads without a lock, and loses numbers of equal places. ScatterElements adds in one
    thread, and has no kernel for float16.

    Before: `y = ScatterND(x, i, u, reduction="add")`
    After:  `y = Cast(ScatterElements(Cast(x), Expand(i, Shape(u)), Cast(u), reduction="add", axis=0))`

    Raises:
        ExportError: the number of axes that an index goes into is not known.
    """
    nodes = [node for node in model.graph.all_nodes() if not node.domain and _reduction(node) != "none"]
    if not nodes:
        return
    complete_types(model, [value for node in nodes for value in inputs_of(node)])
    editor = Editor(model.graph)
    for node in nodes:
        data, index, updates = inputs_of(node)
        if node.op_type == "ScatterElements" and data.dtype != ir.DataType.FLOAT16:
            continue
        build = editor.builder("scattered-sums", f"{node.name}/sums", at=("before", node), is_marked=False)
        axis, dtype = node.attributes.get_int("axis", 0), data.dtype
        rows = _as_rows(build, node) if node.op_type == "ScatterND" else (data, index, updates)
        if dtype == ir.DataType.FLOAT16:
            rows = build.cast(rows[0], ir.DataType.FLOAT), rows[1], build.cast(rows[2], ir.DataType.FLOAT)
        found = build.op("ScatterElements", rows, like=rows[0], axis=axis, reduction=_reduction(node))
        if dtype == ir.DataType.FLOAT16:
            found = build.cast(found, dtype)
        if rows[0].shape != data.shape:
            found = build.op("Reshape", [found, build.op("Shape", [data], dtype=_INT)], dtype=dtype)
        editor.replace_result(node.outputs[0], found, "scattered")
        assert node.graph is not None
        node.graph.remove(node, safe=True)


def _reduction(node: ir.Node) -> str:
    is_scatter = node.op_type in ("ScatterElements", "ScatterND")
    return str(node.attributes.get_string("reduction", "none")) if is_scatter else "none"


def _as_rows(build: Builder, node: ir.Node) -> tuple[ir.Value, ir.Value, ir.Value]:
    """Return the data and the updates of a ScatterND as matrices, and the row of each number of the updates.

    ScatterND has data `[*sizes, *rest]`, an index `[*some, len(sizes)]` and updates `[*some, *rest]`.
    """
    data, index, updates = inputs_of(node)
    if data.shape is None or index.shape is None or not isinstance(depth := index.shape[-1], int):
        raise ExportError(f"node {node.name}, ScatterND, has operands of unknown shapes")
    some = len(index.shape) - 1
    rows = _row(build, data, index, depth) if depth > 1 else index
    if depth > 1 or some != 1:
        column = build.editor.shared_array("scattered-sums", np.array([-1, 1]))
        rows = build.op("Reshape", [rows, column], dtype=_INT)
    # A matrix has one axis of rows.
    if depth > 1 or len(data.shape) != 2:
        data = build.op("Flatten", [data], dtype=data.dtype, axis=depth)
    if some != 1 or len(data.shape or ()) != 2:
        updates = build.op("Flatten", [updates], dtype=updates.dtype, axis=some)
    size = build.op("Shape", [updates], dtype=_INT)
    return data, build.op("Expand", [rows, size], dtype=_INT), updates


def _row(build: Builder, data: ir.Value, index: ir.Value, depth: int) -> ir.Value:
    """Return the place of each index in the flat first axes of the data; a negative one counts from the end."""
    sizes = build.op("Shape", [data], dtype=_INT)
    row = None
    for axis in range(depth):
        number = build.number(axis, _INT)
        size = build.op("Gather", [sizes, number], dtype=_INT, axis=0)
        own = build.op("Gather", [index, number], dtype=_INT, axis=-1)
        is_negative = build.op("Less", [own, build.number(0, _INT)], dtype=ir.DataType.BOOL)
        own = build.op("Where", [is_negative, build.op("Add", [own, size], dtype=_INT), own], dtype=_INT)
        row = own if row is None else build.op("Add", [build.op("Mul", [row, size], dtype=_INT), own], dtype=_INT)
    assert row is not None
    return row
