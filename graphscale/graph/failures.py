"""Nodes that have a result for all inputs."""

from __future__ import annotations

import onnx_ir as ir

from graphscale.graph.values import is_scalar
from graphscale.operators import Trait, constant_tensor, has_trait

__all__ = ["cannot_fail"]


def cannot_fail(node: ir.Node) -> bool:
    """Return whether a node has a result for all inputs of the known types and shapes."""
    if has_trait(node, Trait.TOTAL_BY_AXES):
        axes = node.inputs[1] if len(node.inputs) > 1 else None
        return axes is None or constant_tensor(axes) is not None
    dtype = next((value.dtype for value in node.inputs if value is not None), None)
    if dtype is not None and (dtype is ir.DataType.STRING or (node.op_type == "Div" and dtype.is_integer())):
        return False  # a text without a number, a division by zero
    return has_trait(node, Trait.TOTAL) or (has_trait(node, Trait.TOTAL_BY_SHAPES) and _shapes_agree(node))


def _shapes_agree(node: ir.Node) -> bool:
    """Return whether the shapes of operands certainly agree; feeds may differ on axes with the same name."""
    shapes = [value.shape for value in node.inputs if value is not None and not is_scalar(value)]
    return len(shapes) <= 1 or all(shape is not None and shape.is_static() for shape in shapes)
