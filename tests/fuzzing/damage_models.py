"""Damage to a model that remains a protocol buffer: fields dropped, repeated, swapped, or filled with wrong values."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import onnx
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message
from onnx import TensorProto, helper

from tests.fuzzing.damage_marks import damage_insertion, damage_metadata

_WHOLE = (0, 1, -1, 2, 7, 17, 2**31 - 1, 2**31, -(2**31), 2**40, 2**63 - 1, -(2**63))
_FLOATS = (0.0, -1.0, float("inf"), float("nan"), 1e38, 1e-45)
_TEXTS = (
    "",
    "x",
    "loss",
    "\n",
    "\0",
    "ai.onnx",
    "com.microsoft",
    "graphscale",
    "../x",
    "é\U0001f600",
    "a" * 5000,
    "If",
)
_OPERATORS = ("If", "Loop", "Scan", "Identity", "Where", "Cast", "MatMul", "Constant", "ReduceSum", "Split", "Dropout")


def damage_model(model: onnx.ModelProto, other: onnx.ModelProto, choices: random.Random) -> bytes:
    """A damaged copy of a model, as bytes.

    Args:
        model: the model.
        other: another one, whose parts may get into it.
        choices: decides what happens.
    """
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    own = any(item.key.startswith("graphscale.") for item in copy.metadata_props)
    kinds: list[Callable[[onnx.ModelProto, onnx.ModelProto, random.Random], None]] = [
        *(4 * [_any_field]),
        *(3 * [_edge]),
        _name,
        _node,
        _order,
        _type,
        _tensor,
        _attribute,
        _body,
        _imports,
        _input_or_output,
        *((4 if own else 1) * [damage_metadata]),
        *((2 if own else 0) * [damage_insertion]),
    ]
    for _ in range(choices.choice((1, 1, 1, 2, 3))):
        # Bodies in bodies may be nested deeper than a protocol buffer can be read; then that was the last damage.
        with contextlib.suppress(DecodeError):
            choices.choice(kinds)(copy, other, choices)
    return copy.SerializeToString()


def random_model(choices: random.Random) -> bytes:
    """A ModelProto whose fields are set, or not, to anything that their types allow."""
    model = onnx.ModelProto()
    _fill(model, choices, 4)
    if choices.random() < 0.8:  # Else nearly all end at the first check.
        model.ir_version = choices.choice((7, 8, 9, 10))
        del model.training_info[:]
        model.graph.name = "random"
        del model.opset_import[:]
        model.opset_import.add(domain="", version=choices.choice((13, 17, 20)))
    return model.SerializeToString()


def _fill(message: Message, choices: random.Random, depth: int) -> None:
    for field in message.DESCRIPTOR.fields:
        if choices.random() < 0.5:
            continue
        for _ in range(choices.choice((1, 1, 2, 3)) if field.is_repeated else 1):
            _set(message, field, choices, depth)


def _set(message: Message, field: FieldDescriptor, choices: random.Random, depth: int) -> None:
    held = getattr(message, field.name)
    if field.message_type is not None:
        if depth > 0:
            child = held.add() if field.is_repeated else held
            child.SetInParent()
            _fill(child, choices, depth - 1)
        return
    value = _scalar(field, choices, ["a", "b", "c", "x", "loss"])
    if field.is_repeated:
        held.append(value)
    else:
        setattr(message, field.name, value)


def _scalar(field: FieldDescriptor, choices: random.Random, names: list[str]) -> Any:
    """A value that a field can hold, if it need not make sense there."""
    kind = field.cpp_type
    if kind == FieldDescriptor.CPPTYPE_STRING:
        text = choices.choice((choices.choice(_TEXTS), choices.choice(names), choices.choice(_OPERATORS)))
        return choices.choice((text.encode(), choices.randbytes(9))) if field.type == field.TYPE_BYTES else text
    if kind in (FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE):
        return choices.choice(_FLOATS)
    if kind == FieldDescriptor.CPPTYPE_ENUM:
        return choices.choice(list(field.enum_type.values_by_number))
    whole = choices.choice((choices.choice(_WHOLE), choices.randrange(20)))
    if kind in (FieldDescriptor.CPPTYPE_INT32, FieldDescriptor.CPPTYPE_UINT32):
        return whole % 2**31
    return whole % 2**64 if kind == FieldDescriptor.CPPTYPE_UINT64 else whole


# --- any field --------------------------------------------------------------------------------------------------------


def _messages(message: Message) -> Iterator[Message]:
    yield message
    for field, value in message.ListFields():
        if field.message_type is not None:
            for child in value if field.is_repeated else [value]:
                yield from _messages(child)


def _any_field(model: onnx.ModelProto, other: onnx.ModelProto, choices: random.Random) -> None:
    """One field of one message somewhere: cleared, repeated, thinned out, put in another order, overwritten."""
    holder = choices.choice(list(_messages(model)))
    fields = [field for field, _ in holder.ListFields()] or list(holder.DESCRIPTOR.fields)
    field = choices.choice((choices.choice(fields), choices.choice(holder.DESCRIPTOR.fields)))
    held = getattr(holder, field.name)
    if not field.is_repeated or not held:
        if choices.random() < 0.4:
            holder.ClearField(field.name)
        else:
            _set(holder, field, choices, 1)
        return
    items = list(held)
    action = choices.randrange(5)
    if action == 0:
        del items[choices.randrange(len(items))]
    elif action == 1:
        items.insert(choices.randrange(len(items)), choices.choice(items))
    elif action == 2:
        choices.shuffle(items)
    elif action == 3:
        items = items * choices.choice((0, 2, 3))
    elif field.message_type is None:
        items[choices.randrange(len(items))] = _scalar(field, choices, _names(model))
    rebuilt = type(holder)()
    getattr(rebuilt, field.name).extend(items)
    holder.ClearField(field.name)
    holder.MergeFrom(rebuilt)


# --- graphs -----------------------------------------------------------------------------------------------------------


def _names(model: onnx.ModelProto) -> list[str]:
    graph = model.graph
    found = [name for node in graph.node for name in (*node.input, *node.output)]
    return [*found, *(value.name for value in (*graph.input, *graph.output, *graph.initializer)), "ghost"]


def _some_node(model: onnx.ModelProto, choices: random.Random) -> onnx.NodeProto:
    return choices.choice(model.graph.node) if model.graph.node else model.graph.node.add(op_type="Identity")


def _edge(model: onnx.ModelProto, other: onnx.ModelProto, choices: random.Random) -> None:
    """An edge from or to another value: cycles, reads of what comes later, values computed twice, gaps, more edges."""
    node = _some_node(model, choices)
    edges = choices.choice((node.input, node.input, node.output))
    name = choices.choice((choices.choice(_names(model)), choices.choice(_names(model)), ""))
    action = choices.randrange(4)
    if action == 0 or not edges:
        edges.append(name)
    elif action == 1:
        del edges[choices.randrange(len(edges))]
    else:
        edges[choices.randrange(len(edges))] = name


def _name(model: onnx.ModelProto, other: onnx.ModelProto, choices: random.Random) -> None:
    """A value renamed at one of the places that name it only."""
    graph = model.graph
    holders = [*graph.input, *graph.output, *graph.initializer, *graph.value_info, *graph.node]
    if holders:
        choices.choice(holders).name = choices.choice((choices.choice(_names(model)), choices.choice(_TEXTS)))


def _node(model: onnx.ModelProto, other: onnx.ModelProto, choices: random.Random) -> None:
    """A node of another operator or domain, gone, there twice, or from another model."""
    node = _some_node(model, choices)
    action = choices.randrange(5)
    if action == 0:
        operators = [*_OPERATORS, *(n.op_type for n in model.graph.node), "", "Gone"]
        node.op_type = choices.choice(operators)
    elif action == 1:
        node.domain = choices.choice(("com.microsoft", "ai.onnx.ml", "acme", "", "ai.onnx"))
    elif action == 2:
        model.graph.node.remove(node)
    else:
        copied = node if action == 3 or not other.graph.node else choices.choice(other.graph.node)
        model.graph.node.add().CopyFrom(copied)


def _order(model: onnx.ModelProto, other: onnx.ModelProto, choices: random.Random) -> None:
    nodes = list(model.graph.node)
    choices.shuffle(nodes) if choices.random() < 0.5 else nodes.reverse()
    graph = onnx.GraphProto(node=nodes)
    del model.graph.node[:]
    model.graph.node.extend(graph.node)


def _infos(model: onnx.ModelProto) -> list[onnx.ValueInfoProto]:
    graph = model.graph
    return [*graph.input, *graph.output, *graph.value_info]


def _type(model: onnx.ModelProto, other: onnx.ModelProto, choices: random.Random) -> None:
    """Another dtype, rank or dimension, or no tensor at all."""
    if not _infos(model):
        return
    kind = choices.choice(_infos(model)).type
    action = choices.randrange(7)
    if action == 0:
        kind.tensor_type.elem_type = choices.choice((0, 1, 2, 6, 7, 8, 9, 10, 11, 14, 16, 17, 23, 99, -1))
    elif action == 1:
        kind.sequence_type.elem_type.tensor_type.elem_type = 1
    elif action == 2:
        kind.Clear()
    elif action == 3:
        kind.optional_type.elem_type.sequence_type.elem_type.tensor_type.elem_type = 1
    else:
        shape = kind.tensor_type.shape
        if action == 4 or not shape.dim:
            shape.dim.add(dim_value=choices.choice(_WHOLE))
        elif action == 5:
            choices.choice(shape.dim).dim_value = choices.choice(_WHOLE)
        else:
            choices.choice(shape.dim).dim_param = choices.choice(("n", "", "-1", "n*n", "\0"))


def _tensor(model: onnx.ModelProto, other: onnx.ModelProto, choices: random.Random) -> None:
    """An initializer of another size, type, or place."""
    if not model.graph.initializer:
        model.graph.initializer.add(name=choices.choice(_names(model)), data_type=1, dims=[2])
    tensor = choices.choice(model.graph.initializer)
    action = choices.randrange(6)
    if action == 0:
        tensor.data_type = choices.choice((0, 1, 2, 6, 7, 8, 9, 10, 11, 15, 16, 17, 22, 23, 99, -1))
    elif action == 1:
        tensor.dims.append(choices.choice(_WHOLE))
    elif action == 2 and tensor.dims:
        tensor.dims[choices.randrange(len(tensor.dims))] = choices.choice(_WHOLE)
    elif action == 3:
        tensor.raw_data = choices.randbytes(choices.choice((0, 1, 3, 4, 1000)))
    elif action == 4:
        tensor.data_location = TensorProto.EXTERNAL
        keys = ("location", "offset", "length", "checksum", "odd")
        values = ("weights.bin", "/etc/passwd", "..", "", "-1", "x", str(2**62), "0", "bad.onnx", "\0")
        for _ in range(choices.randrange(4)):
            tensor.external_data.add(key=choices.choice(keys), value=choices.choice(values))
    else:
        tensor.ClearField(choices.choice(("raw_data", "data_type", "dims", "name", "float_data")))
        tensor.segment.begin = choices.choice((0, 0, 5))


def _attribute(model: onnx.ModelProto, other: onnx.ModelProto, choices: random.Random) -> None:
    """An attribute gone, of another type or value, or one too many."""
    with_any = [node for node in model.graph.node if node.attribute]
    if not with_any:
        return
    node = choices.choice(with_any)
    i = choices.randrange(len(node.attribute))
    attribute = node.attribute[i]
    action = choices.randrange(6)
    if action == 0:
        del node.attribute[i]
    elif action == 1:
        attribute.type = choices.choice(list(onnx.AttributeProto.AttributeType.values()))
    elif action == 2:
        attribute.i = choices.choice(_WHOLE)
    elif action == 3:
        attribute.ints.extend([choices.choice(_WHOLE)])
    elif action == 4:
        attribute.name = choices.choice(("", "axis", "axes", "perm", "to", "value", "then_branch"))
    else:
        attribute.ref_attr_name = "outer"


def _body(model: onnx.ModelProto, other: onnx.ModelProto, choices: random.Random) -> None:
    """A node with a body that is damaged, deep, empty, or the model's own graph."""
    body = onnx.GraphProto()
    inside = choices.randrange(4)
    if inside == 0:
        body.CopyFrom(model.graph)
    elif inside == 1:
        body.CopyFrom(helper.make_graph([helper.make_node("Neg", ["ghost"], ["r"])], "b", [], []))
    elif inside == 2:
        body = _nested(choices.choice((1, 3, 20)), choices.choice(_names(model)))
    node = choices.choice((_some_node(model, choices), model.graph.node.add()))
    node.op_type = choices.choice(("If", "Loop", "Scan", "SequenceMap", node.op_type))
    if not node.output:
        node.output.append("of_the_body")
    name = choices.choice(("then_branch", "else_branch", "body", "odd"))
    node.attribute.add(name=name, type=onnx.AttributeProto.GRAPH).g.CopyFrom(body)


def _nested(depth: int, read: str) -> onnx.GraphProto:
    """Conditions within conditions; the innermost gives a value of the graph around all of them."""
    body = helper.make_graph([helper.make_node("Identity", [read], ["r"])], "innermost", [], [])
    body.output.add(name="r")
    for _ in range(depth):
        outer = onnx.GraphProto(name="outer")
        node = outer.node.add(op_type="If", input=[read], output=["r"])
        node.attribute.add(name="then_branch", type=onnx.AttributeProto.GRAPH).g.CopyFrom(body)
        outer.output.add(name="r")
        body = outer
    return body


def _imports(model: onnx.ModelProto, other: onnx.ModelProto, choices: random.Random) -> None:
    """Versions, domains, functions."""
    action = choices.randrange(5)
    if action == 0:
        model.ir_version = choices.choice((0, 1, 3, 9, 13, 14, 99, 2**40, -1))
    elif action == 1:
        model.opset_import.add(domain=choices.choice(("", "acme", "ai.onnx")), version=choices.choice(_WHOLE))
    elif action == 2 and model.opset_import:
        choices.choice(model.opset_import).version = choices.choice((0, -1, 1, 6, 9, 13, 28, 29, 2**40))
    elif action == 3:
        del model.opset_import[:]
    else:
        node = _some_node(model, choices)
        function = model.functions.add(name=node.op_type, domain=choices.choice((node.domain, "acme", "")))
        function.input.extend(["a"] * choices.randrange(3))
        function.output.extend(["b"] * choices.randrange(3))
        # A function that calls itself, or computes nothing.
        if choices.random() < 0.7:
            function.node.add(op_type=node.op_type, domain=function.domain, input=["a"], output=["b"])
        function.opset_import.add(domain="", version=20)


def _input_or_output(model: onnx.ModelProto, other: onnx.ModelProto, choices: random.Random) -> None:
    """An input or output gone, there twice, or of another name."""
    values = choices.choice((model.graph.input, model.graph.output))
    action = choices.randrange(4)
    if values and action == 0:
        del values[choices.randrange(len(values))]
    elif values and action == 1:
        values.add().CopyFrom(choices.choice(values))
    elif values and action == 2:
        choices.choice(values).name = choices.choice(_names(model))
    else:
        values.add(name=choices.choice(_names(model)))
