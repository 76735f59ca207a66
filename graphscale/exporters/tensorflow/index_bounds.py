"""Bounds of indices that a step computes from floating-point numbers."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import onnx_ir as ir

from graphscale.errors import ExportError
from graphscale.exporters.step_file import REFUSED_INDEX
from graphscale.graph.builder import Builder, Editor
from graphscale.graph.inference import complete_types
from graphscale.graph.values import inputs_of, is_float, is_source
from graphscale.graph.walks import ancestors, source_by_trait
from graphscale.operators import Trait, has_trait

__all__ = ["bound_indices"]


def bound_indices(model: ir.Model) -> None:
    """Bound indices that are casts of computed numbers: ONNX Runtime refuses a step whose index is a cast of NaN.

    Indices in range stay unchanged. An index of the batch that is out of range is a wrong batch, not a step to skip.
    TensorFlow refuses a negative one too, and ONNX counts it from the end: it becomes one that is far out of range.

    Before: `y = ScatterElements(x, Cast(bucket), updates)`, `z = Gather(table, word)`
    After:  `y = ScatterElements(x, Max(Min(Cast(bucket), size - 1), -size), updates)`,
            `z = Gather(table, Where(Less(word, 0), -2147483648, word))`

    Raises:
        ExportError: the number of axes that such an index goes into is not known, or the dtype of the index.
    """
    nodes = [node for node in model.graph if has_trait(node, Trait.INDEXES_AXIS | Trait.INDEXES_AXES)]
    nodes = [node for node in nodes if not inputs_of(node)[1].is_initializer()]
    if not nodes:
        return
    complete_types(model, [value for node in model.graph for value in node.outputs])
    editor = Editor(model.graph)
    for node in nodes:
        build = editor.builder("index-bounds", f"{node.name}/bounds", at=("before", node), is_marked=False)
        integers = ancestors(inputs_of(node)[1:2], operands=_integers)
        if any(_is_cast(value, is_fed=False) for value in integers):
            node.replace_input_with(1, _bound(node, build))
        elif any(value.is_graph_input() or _is_cast(value, is_fed=True) for value in integers):
            node.replace_input_with(1, _refuse_negative(node, build))


def _origin(value: ir.Value) -> ir.Value:
    """Return the value that another one repeats, in whatever order and shape."""
    return source_by_trait(value, Trait.VIEW | Trait.PERMUTE | Trait.REPEAT)


def _is_cast(value: ir.Value, is_fed: bool) -> bool:
    """Return whether a value is a cast of floating-point numbers, fed or computed."""
    node = value.producer()
    if node is None or node.op_type != "Cast" or is_float(value):
        return False
    number = inputs_of(node)[0]
    return is_float(number) and is_source(_origin(number)) == is_fed


def _integers(node: ir.Node) -> Iterable[ir.Value]:
    """Return the integers that a node reads, not those of a shape."""
    return () if node.op_type in ("Shape", "Size") else (value for value in inputs_of(node) if not is_float(value))


def _bound(node: ir.Node, build: Builder) -> ir.Value:
    """Add the bounds of an index: a number for an axis, or one for each axis that it is an index into."""
    data, index = inputs_of(node)[:2]
    single = has_trait(node, Trait.INDEXES_AXIS)
    count = 1 if single else None if index.shape is None else index.shape[-1]
    if data.shape is None or index.dtype is None or not isinstance(count, int):
        raise ExportError(f"node {node.name}, {node.op_type} by computed indices, has operands of unknown shapes")
    first = node.attributes.get_int("axis", 0) % len(data.shape) if single else node.attributes.get_int("batch_dims", 0)
    sizes = data.shape[first : first + count]
    if all(isinstance(size, int) for size in sizes):
        known = np.array(sizes[0] if single else sizes, index.dtype.numpy())
        least, most = (build.editor.shared_array("index-bounds", np.asarray(each)) for each in (-known, known - 1))
    else:
        size = build.op("Shape", [data], start=first, end=first + count, dtype=ir.DataType.INT64, shape=[count])
        size = build.op("Squeeze", [size], dtype=ir.DataType.INT64, shape=[]) if single else size
        size = build.cast(size, index.dtype)
        least = build.op("Neg", [size], like=size)
        most = build.op("Sub", [size, build.number(1, index.dtype)], like=size)
    return build.op("Max", [build.op("Min", [index, most], like=index), least], like=index)


def _refuse_negative(node: ir.Node, build: Builder) -> ir.Value:
    """Add a choice that makes negative indices smaller than any axis is long."""
    index = inputs_of(node)[1]
    if index.dtype is None:
        raise ExportError(f"node {node.name}, {node.op_type} by indices of the batch, has an index of unknown dtype")
    numbers = (np.array(number, index.dtype.numpy()) for number in (0, REFUSED_INDEX))
    none, least = (build.editor.shared_array("index-bounds", number) for number in numbers)
    is_negative = build.op("Less", [index, none], like=index, dtype=ir.DataType.BOOL)
    return build.op("Where", [is_negative, least, index], like=index)
