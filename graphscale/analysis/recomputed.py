"""Forward values that a backward pass computes again: by checkpointing, or because nobody merged the two."""

from __future__ import annotations

from collections.abc import Container, Hashable, Iterable

import onnx_ir as ir

from graphscale.analysis.values import constant_tensor, subgraphs
from graphscale.marks import WAS_FLOAT, is_rounding

__all__ = ["recomputed_values"]

_RANDOM = {
    "Dropout",
    "RandomNormal",
    "RandomNormalLike",
    "RandomUniform",
    "RandomUniformLike",
    "Bernoulli",
    "Multinomial",
}
_COMMUTATIVE = {"Add", "Mul", "Sum", "Max", "Min"}
_SMALL = 64


def recomputed_values(
    nodes: Iterable[ir.Node], forward: Container[ir.Value], mixing: Container[ir.Value]
) -> dict[ir.Value, ir.Value]:
    """Return the values outside of forward that equal a forward value, each with that value.

    Two nodes compute the same if operator, attributes and operands are the same (value numbering); small constants
    are compared by content. Casts that mixed precision put in are looked through: of two equal nodes, one may read the
    rounded value alone.

    Args:
        nodes: the nodes in graph order.
        forward: the values that the loss depends on.
        mixing: the forward values that count: those that mix several inputs, so that a seed is never among them.
    """
    numbers: dict[ir.Value, Hashable] = {}
    classes: dict[Hashable, list[ir.Node]] = {}
    for node in nodes:
        if node.op_type in _RANDOM or any(subgraphs(node)):
            continue
        if is_rounding(node) and node.inputs[0] is not None:
            numbers[node.outputs[0]] = _number(node.inputs[0], numbers)
            continue
        operands = [None if value is None else _number(value, numbers) for value in node.inputs]
        if node.op_type in _COMMUTATIVE:
            operands.sort(key=hash)
        found_attributes = node.attributes.data.items()
        attributes = sorted((name, _attribute(value)) for name, value in found_attributes) if found_attributes else ()
        if WAS_FLOAT in node.metadata_props:
            attributes = [("to", repr(int(ir.DataType.FLOAT)))]
        key = (node.domain, node.op_type, tuple(attributes), tuple(operands))
        members = classes.setdefault(key, [])
        members.append(node)
        numbers.update(zip(node.outputs, members[0].outputs, strict=False))
    found: dict[ir.Value, ir.Value] = {}
    for members in classes.values():
        for index in range(len(members[0].outputs) if len(members) > 1 else 0):
            same = [node.outputs[index] for node in members if index < len(node.outputs)]
            original = next((v for v in same if v in forward and v in mixing), None)
            found.update((v, original) for v in same if original is not None and v not in forward)
    return found


def _number(value: ir.Value, numbers: dict[ir.Value, Hashable]) -> Hashable:
    if value not in numbers:
        tensor = constant_tensor(value)
        small = tensor is not None and tensor.size <= _SMALL
        numbers[value] = (
            (tensor.dtype, tuple(tensor.shape), tensor.tobytes()) if small and tensor is not None else value
        )
    return numbers[value]


def _attribute(attribute: ir.Attr) -> str:
    if attribute.type == ir.AttributeType.TENSOR and not attribute.is_ref():
        tensor = attribute.as_tensor()
        return repr((tensor.dtype, tuple(tensor.shape), tensor.tobytes() if tensor.size <= _SMALL else id(tensor)))
    return repr(attribute.value)
