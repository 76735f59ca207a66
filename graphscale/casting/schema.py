"""Whether an operator takes a small type at all, by ONNX's own definition."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import onnx
import onnx_ir as ir

__all__ = ["takes"]


def takes(node: ir.Node, inputs: Sequence[int], dtype: ir.DataType, opsets: Mapping[str, int]) -> str | None:
    """Why a node cannot compute in a small type, or None. What ONNX does not define is taken to be able to.

    Args:
        node: the node.
        inputs: the operands that would be of that type.
        dtype: the type.
        opsets: the versions of the operator domains.
    """
    domain = "" if node.domain == "ai.onnx" else node.domain
    version = opsets.get(domain, opsets.get("ai.onnx", 1)) if domain == "" else opsets.get(domain, 1)
    allowed = _types(node.op_type, domain, version)
    text = f"tensor({dtype.name.lower()})"
    for i in inputs:
        types = None if allowed is None else allowed[min(i, len(allowed) - 1)]
        if types is not None and text not in types:
            return f"opset {version} does not define it for {dtype.name.lower()}"
    return None


@functools.cache
def _types(op_type: str, domain: str, version: int) -> list[frozenset[str]] | None:
    if not onnx.defs.has(op_type, version, domain):
        return None
    schema = onnx.defs.get_schema(op_type, version, domain)
    found = [frozenset(parameter.types) for parameter in schema.inputs]
    return found or None
