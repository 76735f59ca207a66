"""Sequences of tensors: the members of sequences made in the graph, a Loop over all others."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import onnx_ir as ir

from graphscale.graph.types import dtype_of
from graphscale.passes.lower_training_ops.writer import Writer

__all__ = ["Rule", "map_sequences", "members"]

# A rule from one member of each sequence to one of each result.
Rule = Callable[[Writer, Sequence[ir.Value]], Sequence[ir.Value]]


def members(sequence: ir.Value) -> list[ir.Value] | None:
    """Return the members of a sequence made of tensors in the graph; None for other sequences."""
    node = sequence.producer()
    if node is None or (node.domain, node.op_type) != ("", "SequenceConstruct"):
        return None
    return [value for value in node.inputs if value is not None]


def map_sequences(f: Writer, rule: Rule, sequences: Sequence[ir.Value]) -> list[ir.Value]:
    """Apply a rule to the members of sequences of one length, and return sequences of its results."""
    known = [members(sequence) for sequence in sequences]
    lists = [each for each in known if each is not None]
    if len(lists) < len(known):
        return _loop(f, rule, sequences)
    if len({len(each) for each in lists}) > 1:
        raise f.refusal("its sequences differ in length")
    results = [rule(f, values) for values in zip(*lists, strict=True)]
    return [f("SequenceConstruct", *parts) for parts in zip(*results, strict=True)]


def _loop(f: Writer, rule: Rule, sequences: Sequence[ir.Value]) -> list[ir.Value]:
    if f.opset < 13:
        raise f.refusal("a Loop that carries a sequence needs opset 13")
    body, unique = f.within(f"{f.build.prefix}.member"), f.build.editor.unique
    graph, name = body.build.body, f"{f.build.prefix}.member"
    assert graph is not None
    number = ir.val(unique(f"{name}.number"), ir.DataType.INT64, [])
    going = ir.val(unique(f"{name}.going"), ir.DataType.BOOL, [])
    results = rule(body, [body("SequenceAt", sequence, number) for sequence in sequences])
    kinds = [ir.SequenceType(ir.TensorType(dtype_of(value))) for value in results]
    carried = [ir.Value(name=unique(f"{name}.carried"), type=kind) for kind in kinds]
    graph.inputs.extend([number, going, *carried])
    longer = [body("SequenceInsert", *pair) for pair in zip(carried, results, strict=True)]
    body.build.closed([body("Identity", going, like=going), *longer])
    first = [_empty(f, kind) for kind in kinds]
    count = f("SequenceLength", sequences[0])
    outputs = [(f"{f.build.prefix}.loop", None, None)] * len(carried)
    node = f.build.node("Loop", [count, f.constant(np.asarray(True)), *first], outputs, attributes={"body": graph})
    for value, kind in zip(node.outputs, kinds, strict=True):
        value.type = kind
    return list(node.outputs)


def _empty(f: Writer, kind: ir.SequenceType) -> ir.Value:
    node = f.build.node(
        "SequenceEmpty", [], [(f"{f.build.prefix}.empty", None, None)], attributes={"dtype": kind.dtype}
    )
    node.outputs[0].type = kind
    return node.outputs[0]
