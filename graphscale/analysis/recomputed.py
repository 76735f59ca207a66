"""Forward values that a backward pass computes again: by checkpointing, or because no exporter merged the two."""

from __future__ import annotations

from collections.abc import Container, Hashable, Iterable, Mapping

import onnx_ir as ir

from graphscale.graph.marks import WAS_FLOAT, is_rounding
from graphscale.graph.values import constant_tensor, is_float, is_scalar, subgraphs
from graphscale.operators import Trait, has_trait

__all__ = ["find_recomputed_values", "is_copy"]

_SMALL = 64


def find_recomputed_values(
    forward: Iterable[ir.Node],
    rest: Iterable[ir.Node],
    mixing: Container[ir.Value],
    moved: Mapping[ir.Value, ir.Value] | None = None,
) -> dict[ir.Value, ir.Value]:
    """Map values outside of forward to the forward values that they equal.

    Two nodes are equal if operator, attributes and operands are the same (value numbering); small constants are
    compared by content. Casts of mixed precision are ignored: one of two equal nodes may read the rounded value.

    Args:
        forward: the nodes that the loss depends on, in graph order.
        rest: the others, in graph order.
        mixing: the forward values to compare with: those that mix several inputs, and so are no seed.
        moved: values that count as equal to a weight; all values computed from them are compared, since none is a seed.
    """
    numbers = _Numbers()
    numbers.update((value, numbers[weight]) for value, weight in (moved or {}).items())
    classes: dict[Hashable, list[ir.Node]] = {}
    for node in forward:
        key = _key(node, numbers)
        if key is not None:
            members = classes.setdefault(key, [])
            members.append(node)
            numbers.update(zip(node.outputs, members[0].outputs, strict=False))
    originals: dict[ir.Value, ir.Value] = {}
    behind = set(moved or ())
    for node in rest:
        # The result of a node is recomputed only if all its operands are.
        if [v for v in node.inputs if v is not None and v not in numbers and not _is_source(v)]:
            continue
        key = _key(node, numbers)
        members = [] if key is None else classes.get(key, [])
        follows = not behind.isdisjoint(node.inputs)
        for index, value in enumerate(node.outputs):
            same = [member.outputs[index] for member in members if index < len(member.outputs)]
            if same:
                numbers[value] = numbers[same[0]]
            original = next((v for v in same if v in mixing or follows), None)
            if original is not None:
                originals[value] = original
                behind.update([value] if follows else ())
    return originals


def is_copy(original: ir.Value, copy: ir.Value) -> bool:
    """Return whether two values are computed in the same way.

    Nodes and attributes are the same; inputs, weights, and constants of integers, such as the bounds of a slice, may
    differ.
    """
    pairs: dict[ir.Value, ir.Value] = {}
    pending: list[tuple[ir.Value | None, ir.Value | None]] = [(original, copy)]
    while pending:
        one, other = pending.pop()
        if one is None or other is None:
            if one is not other:
                return False
            continue
        if one is not other and not _is_alike(one, other):
            return False
        if constant_tensor(other) is not None or pairs.get(other) is one:
            continue
        if other in pairs:
            return False
        pairs[other] = one
        node, twin = one.producer(), other.producer()
        if one is not other and node is not None and twin is not None:
            pending.extend(zip(node.inputs, twin.inputs, strict=True))
    return original is not copy


def _is_alike(one: ir.Value, other: ir.Value) -> bool:
    """Return whether two values are interchangeable sources, or results of the same operator."""
    if _is_source(one) and _is_source(other):
        constants = constant_tensor(one), constant_tensor(other)
        if constants[0] is None or constants[1] is None or not is_float(one) or not is_scalar(one):
            return one.dtype is other.dtype and (constants[0] is None) is (constants[1] is None)
        return constants[0].numpy().tobytes() == constants[1].numpy().tobytes()
    node, twin = one.producer(), other.producer()
    if node is None or twin is None or subgraphs(node) or _is_source(one) or _is_source(other):
        return False
    kinds = [(n.domain, n.op_type, v.index(), len(n.inputs)) for v, n in ((one, node), (other, twin))]
    attributes = [{name: _attribute(held) for name, held in n.attributes.items()} for n in (node, twin)]
    return kinds[0] == kinds[1] and attributes[0] == attributes[1]


class _Numbers(dict[ir.Value, Hashable]):
    """The keys for comparing values: the first equal value, or the content of a small constant."""

    def __missing__(self, value: ir.Value) -> Hashable:
        number: Hashable = value
        tensor = constant_tensor(value)
        if tensor is not None and tensor.size <= _SMALL:
            number = tensor.dtype, tuple(tensor.shape), tensor.numpy().tobytes()
        self[value] = number
        return number


def _key(node: ir.Node, numbers: _Numbers) -> Hashable | None:
    """Return the common key of equal nodes; None for a node that equals no other."""
    op_type, inputs, held = node.op_type, node.inputs, node.attributes.data.items()
    if has_trait(node, Trait.RANDOM) or (held and subgraphs(node)):
        return None
    if op_type == "Cast" and is_rounding(node) and inputs[0] is not None:
        numbers[node.outputs[0]] = numbers[inputs[0]]
        return None
    operands = [None if value is None else numbers[value] for value in inputs]
    if has_trait(node, Trait.COMMUTATIVE):
        operands.sort(key=hash)
    attributes = sorted((name, _attribute(value)) for name, value in held) if held else []
    if op_type == "Cast" and WAS_FLOAT in node.metadata_props:
        attributes = [("to", repr(int(ir.DataType.FLOAT)))]
    return node.domain, op_type, tuple(attributes), tuple(operands)


def _is_source(value: ir.Value) -> bool:
    """Return whether a value is an input or a constant, which both passes may read."""
    node = value.producer()
    return node is None or node.op_type == "Constant"


def _attribute(attribute: ir.Attr) -> str:
    if attribute.type == ir.AttributeType.TENSOR and not attribute.is_ref():
        tensor = attribute.as_tensor()
        return repr((tensor.dtype, tuple(tensor.shape), tensor.tobytes() if tensor.size <= _SMALL else id(tensor)))
    return repr(attribute.value)
