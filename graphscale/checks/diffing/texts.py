"""Attributes and constants as texts."""

from __future__ import annotations

import onnx_ir as ir

__all__ = ["attribute_text", "tensor_text"]

# Tensors up to this many elements are compared by content.
_TINY = 16


def attribute_text(attribute: ir.Attr) -> str:
    """Return an attribute's value as text, or only the kind of a large tensor or a graph."""
    if attribute.is_ref():
        return f"@{attribute.ref_attr_name}"
    value = attribute.value
    if attribute.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS):
        return "graph"
    if isinstance(value, ir.TensorProtocol):
        elements = tensor_text(value)
        return f"{value.dtype.name.lower()}{list(value.shape)}" + (f" {elements}" if elements is not None else "")
    return str(list(value) if isinstance(value, tuple) else value)


def tensor_text(tensor: ir.TensorProtocol) -> str | None:
    """Return a small tensor's elements as text, None for a large, external or damaged one."""
    if tensor.size > _TINY or isinstance(tensor, ir.ExternalTensor):
        return None
    try:
        return str(tensor.numpy().tolist())
    except (TypeError, ValueError):  # its data do not fit its shape
        return None
