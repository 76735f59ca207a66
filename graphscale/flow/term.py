"""Terms: value numbers. Equal terms are computed in the same way from the same sources, so their values are equal.

A term is an operator with its attributes on operand terms, in one table that several graphs may share; those of a
commutative operator are in any order. Sources are inputs, initializers, and small constants by their content. Casts of
mixed precision are left out: one of two equal passes may read the rounded value.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence

import onnx_ir as ir

from graphscale.flow.interpreter import Domain
from graphscale.graph.marks import WAS_FLOAT, is_rounding
from graphscale.graph.values import constant_tensor, subgraphs
from graphscale.operators import Trait, has_trait

__all__ = ["Term", "TermDomain", "attribute_key", "computation", "content_key"]

# Larger constants differ if their objects do.
_SMALL = 64

# The number of a term; None for a value that equals no other.
Term = int | None
Attributes = tuple[tuple[str, str], ...]
_FLOAT: Attributes = (("to", repr(int(ir.DataType.FLOAT))),)


class TermDomain(Domain[Term]):
    """The table of terms; above all of them is None.

    Attributes:
        source: returns the term of an input, an initializer or a constant; None for other values.
        given: the terms of values that equal none by their computation.
        is_closed: True to add no more terms of operators: results without an equal so far are None.
    """

    default: Term = None

    def __init__(self) -> None:
        self.is_closed = False
        self.given: dict[ir.Value, Term] = {}
        self._terms: dict[Hashable, int] = {}
        self.source = functools.cache(self._source)

    def _source(self, value: ir.Value) -> Term:
        node = value.producer()
        if node is not None and node.op_type != "Constant":
            return None
        tensor = constant_tensor(value)
        if tensor is None and node is not None:
            return None
        return self._number(value if tensor is None else content_key(tensor) or value)

    def read(self, node: ir.Node, index: int, element: Term) -> Term:
        value = node.inputs[index]
        return self.source(value) if element is None and value is not None else element

    def transfer(self, node: ir.Node, operands: Sequence[Term]) -> Sequence[Term]:
        if node.op_type == "Constant":
            return [self.source(value) for value in node.outputs]
        if node.op_type == "Cast" and is_rounding(node):
            return operands
        if has_trait(node, Trait.RANDOM) or subgraphs(node) or operands.count(None) > node.inputs.count(None):
            return self.opaque(node, operands)
        key = computation(
            node, operands, _FLOAT if node.op_type == "Cast" and WAS_FLOAT in node.metadata_props else None
        )
        return [self.result((index, key)) for index in range(len(node.outputs))]

    def result(self, key: Hashable) -> Term:
        """Return the term of a computation; None for a new one if the table is closed."""
        return self._terms.get(key) if self.is_closed else self._number(key)

    def opaque(self, node: ir.Node, operands: Sequence[Term]) -> Sequence[Term]:
        return [None if self.is_closed else self._number(value) for value in node.outputs]

    def write(self, value: ir.Value, element: Term) -> Term:
        return self.given.get(value) if element is None else element

    def join(self, node: ir.Node, elements: Sequence[Term]) -> Term:
        return elements[0] if len(set(elements)) == 1 else None

    def _number(self, key: Hashable) -> int:
        return self._terms.setdefault(key, len(self._terms))


def computation(node: ir.Node, operands: Sequence[Term], attributes: Attributes | None = None) -> Hashable:
    """Return an operator with its attributes, or others, on the terms of its operands."""
    if attributes is None:
        attributes = tuple(sorted((name, attribute_key(value)) for name, value in node.attributes.items()))
    terms = sorted(operands, key=hash) if has_trait(node, Trait.COMMUTATIVE) else operands
    return node.op_identifier(), attributes, *terms


def attribute_key(attribute: ir.Attr) -> str:
    """Return a text that is the same for equal attributes, and for all graphs."""
    if attribute.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS):
        return "graph"
    if attribute.is_ref():
        return f"@{attribute.ref_attr_name}"
    if attribute.type != ir.AttributeType.TENSOR:
        return repr(attribute.value)
    tensor = attribute.as_tensor()
    return repr(content_key(tensor) or (tensor.dtype, tuple(tensor.shape), id(tensor)))


def content_key(tensor: ir.TensorProtocol) -> Hashable | None:
    """Return the type, shape and bits of a small constant; None for others, and for damaged ones."""
    if tensor.size > _SMALL or isinstance(tensor, ir.ExternalTensor):
        return None
    try:
        content = tensor.numpy()
    except (TypeError, ValueError):  # its data do not fit its shape
        return None
    is_text = tensor.dtype is ir.DataType.STRING
    return tensor.dtype, tuple(tensor.shape), repr(content.tolist()) if is_text else content.tobytes()
