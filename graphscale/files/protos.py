"""Between ModelProto and onnx_ir: what onnx_ir reads and writes, with nodes and the types of values read faster.

A graph has as many types as values, and few different ones: each of these is read and written once, and so are numbers
in attributes. What is rare is left to onnx_ir.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import onnx
import onnx_ir as ir

__all__ = ["read_model", "write_model"]

# The IR version from which on functions say the types of their values, which were said in the main graph before.
_OWN_INFOS = 10
_ANNOTATION = "quant_parameter_tensor_names"
_GRAPHS = (onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS)
# The dtype of a tensor, and its shape.
_Plain = tuple[ir.DataType, ir.Shape | None]
_NUMBERS = (onnx.AttributeProto.INT, onnx.AttributeProto.INTS, onnx.AttributeProto.FLOAT, onnx.AttributeProto.FLOATS)


class _StandIn:
    """An object with some of its attributes replaced, and without what a loop over it would give.

    Args:
        original: gives all others.
        replaced: these attributes.
    """

    def __init__(self, original: Any, **replaced: Any) -> None:
        self.__dict__.update(replaced, _original=original)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def __iter__(self) -> Iterator[Any]:
        return iter(())


class _RareError(Exception):
    """A graph has what only onnx_ir reads, or is damaged."""


def read_model(proto: onnx.ModelProto) -> ir.Model:
    """Turn a ModelProto into an onnx_ir model, as `onnx_ir.serde.deserialize_model` does.

    Shapes that are equal are one object, which is frozen; attributes that are equal numbers are one object, too.

    Raises:
        Exception: what onnx_ir raises for a damaged graph.
    """
    typed_elsewhere = bool(proto.functions) and proto.ir_version < _OWN_INFOS
    if not typed_elsewhere and not proto.graph.quantization_annotation:
        graph = _StandIn(proto.graph, input=(), value_info=(), node=(), output=())
        model = ir.serde.deserialize_model(_StandIn(proto, graph=graph))  # type: ignore[arg-type]
        try:
            _Reader(proto.graph).read_into(model.graph)
        except _RareError:
            pass
        else:
            return model
    return ir.serde.deserialize_model(proto)


class _Reader:
    """Reads the values and nodes of a graph without subgraphs, whose nodes are in order.

    Args:
        proto: the graph.
    """

    def __init__(self, proto: onnx.GraphProto) -> None:
        self._proto = proto
        self._types: dict[bytes, _Plain | None] = {}
        self._attributes: dict[bytes, ir.Attr] = {}
        self._values: dict[str, ir.Value] = {}
        self._infos = {info.name: self._known(info) for info in proto.value_info}

    def read_into(self, graph: ir.Graph) -> None:
        """Put all into a graph that has its initializers.

        Raises:
            _RareError: the graph has subgraphs, or is damaged.
        """
        for info in self._proto.input:
            if info.name in self._values:
                raise _RareError
            value = graph.initializers.get(info.name) or ir.Value(name=info.name)
            self._values[info.name] = value
            self._describe(value, self._known(info))
            graph.inputs.append(value)
        for name, value in graph.initializers.items():
            if name not in self._values:
                self._values[name] = value
                if name in self._infos:
                    self._describe(value, self._infos[name])
        graph.extend([self._node(node) for node in self._proto.node])
        for info in self._proto.output:
            if info.name not in self._values:
                raise _RareError
            value = self._values[info.name]
            self._describe(value, self._known(info))
            graph.outputs.append(value)

    def _node(self, proto: onnx.NodeProto) -> ir.Node:
        attributes, values = proto.attribute, self._values
        if proto.device_configurations:
            raise _RareError
        try:
            inputs = [values[name] if name else None for name in proto.input]
        except KeyError:
            raise _RareError from None
        return ir.Node(
            proto.domain,
            proto.op_type,
            inputs,
            [self._attribute(attribute) for attribute in attributes] if attributes else (),
            overload=proto.overload,
            outputs=[self._result(name) for name in proto.output],
            name=proto.name,
            doc_string=proto.doc_string if proto.HasField("doc_string") else None,
            metadata_props={entry.key: entry.value for entry in proto.metadata_props} or None,
        )

    def _attribute(self, proto: onnx.AttributeProto) -> ir.Attr:
        kind = proto.type
        if kind not in _NUMBERS:
            if kind in _GRAPHS:
                raise _RareError
            return ir.serde.deserialize_attribute(proto)
        content = proto.SerializeToString()
        known = self._attributes.get(content)
        if known is None:
            known = self._attributes[content] = ir.serde.deserialize_attribute(proto)
        return known

    def _result(self, name: str) -> ir.Value:
        if not name:
            return ir.Value(name=name)
        if name in self._values:
            raise _RareError
        known = self._infos.get(name)
        if known is None:
            value = ir.Value(name=name)
        elif isinstance(known, tuple):
            value = ir.Value(name=name, type=ir.TensorType(known[0]), shape=known[1])
        else:
            value = self._read_rare(known, None)
        self._values[name] = value
        return value

    def _describe(self, value: ir.Value, known: _Plain | onnx.ValueInfoProto) -> None:
        """Give a value what is said of it."""
        if isinstance(known, tuple):
            value.type, value.shape, value.doc_string = ir.TensorType(known[0]), known[1], None
        else:
            self._read_rare(known, value)

    def _read_rare(self, info: onnx.ValueInfoProto, value: ir.Value | None) -> ir.Value:
        self._plain_type(info)  # says of a damaged type what is wrong with it; onnx_ir says where it is
        return ir.serde.deserialize_value_info_proto(info, value)

    def _known(self, info: onnx.ValueInfoProto) -> _Plain | onnx.ValueInfoProto:
        """What is said of a value; what is rare, or damaged, as it is.

        Of all others no object of protobuf shall live on: there is one for each value.
        """
        try:
            return self._plain_type(info) or info
        except ValueError:
            return info

    def _plain_type(self, info: onnx.ValueInfoProto) -> _Plain | None:
        """The dtype and shape of a value; None if something else is said of it, too."""
        if info.metadata_props or info.doc_string:
            return None
        content = info.type.SerializeToString()
        if content not in self._types:
            self._types[content] = _plain(info.type)
        return self._types[content]


def _plain(proto: onnx.TypeProto) -> _Plain | None:
    """The dtype and shape of a tensor; None for another type, or one with denotations."""
    tensor = proto.tensor_type
    if not proto.HasField("tensor_type") or not tensor.HasField("elem_type") or proto.denotation:
        return None
    if any(axis.denotation for axis in tensor.shape.dim):
        return None
    return ir.DataType(tensor.elem_type), ir.serde.deserialize_type_proto_for_shape(proto)


def write_model(model: ir.Model, *, annotated: bool = True) -> onnx.ModelProto:
    """Turn an onnx_ir model into a ModelProto, as `onnx_ir.serde.serialize_model` does.

    Args:
        model: the model.
        annotated: whether results of nodes may have quantization annotations: those of a model that was read from a
            ModelProto without any have none.

    Raises:
        SerdeError: a part of the model cannot be serialized.
    """
    graph = model.graph
    annotated = annotated and any(_is_annotated(value) for node in graph for value in node.outputs)
    if annotated or (model.functions and model.ir_version < _OWN_INFOS):
        return ir.serde.serialize_model(model)
    proto = onnx.ModelProto()
    bare = _StandIn(graph)  # without its nodes
    ir.serde.serialize_model_into(proto, _StandIn(model, graph=bare))
    try:
        _Writer(proto.graph, model.ir_version).write(graph)
    except (TypeError, ValueError):  # of which onnx_ir says more
        return ir.serde.serialize_model(model)
    return proto


def _is_annotated(value: ir.Value) -> bool:
    # A value that is asked for its `meta` gets a store, which takes more memory than the value itself.
    return getattr(value, "_metadata", value) is not None and _ANNOTATION in value.meta


class _Writer:
    """Writes the nodes of a graph, and the types of their results, each kind of type and of number once.

    Args:
        proto: where to.
        ir_version: the model's IR version.
    """

    def __init__(self, proto: onnx.GraphProto, ir_version: int) -> None:
        self._nodes: Any = proto.node  # whose add() takes the fields, which the type does not say
        self._infos: Any = proto.value_info
        self._ir_version = ir_version
        # The objects are held beside what they became, so that their ids stay theirs.
        self._attributes: dict[int, tuple[onnx.AttributeProto, ir.Attr]] = {}
        self._types: dict[tuple[ir.DataType, str | None, int], tuple[onnx.TypeProto, ir.Shape]] = {}

    def write(self, graph: ir.Graph) -> None:
        """Add all nodes, and what is known of their results."""
        for node in graph:
            outputs = node.outputs
            self._write_node(node, outputs)
            for value in outputs:
                if not value.is_graph_output():
                    self._write_type(value)

    def _write_node(self, node: ir.Node, outputs: Sequence[ir.Value]) -> None:
        names = [value.name for value in outputs]
        if node.doc_string or node.overload or node.device_configurations or not all(names):
            ir.serde.serialize_node_into(self._nodes.add(), node, model_ir_version=self._ir_version)
            return
        written = self._nodes.add(
            op_type=node.op_type,
            name=node.name or None,
            domain=node.domain or None,
            input=["" if value is None else value.name for value in node.inputs],
            output=names,
        )
        attributes, properties = node.attributes.data, node.metadata_props
        for attribute in attributes.values() if attributes else ():
            self._write_attribute(written.attribute, attribute)
        for key in sorted(properties) if properties else ():
            written.metadata_props.add(key=key, value=properties[key])

    def _write_attribute(self, attributes: Any, attribute: ir.Attr) -> None:
        known = self._attributes.get(id(attribute))
        if known is not None:
            attributes.append(known[0])
            return
        proto = attributes.add()
        if attribute.is_ref():
            ir.serde.serialize_reference_attribute_into(proto, attribute)
            return
        ir.serde.serialize_attribute_into(proto, attribute)
        if proto.type in _NUMBERS:
            self._attributes[id(attribute)] = proto, attribute

    def _write_type(self, value: ir.Value) -> None:
        kind, shape, name = value.type, value.shape, value.name
        more = value.metadata_props or value.doc_string
        if not name or (kind is None and shape is None and not more):
            return
        info = self._infos.add()
        if type(kind) is not ir.TensorType or shape is None or more:
            ir.serde.serialize_value_into(info, value)
            return
        key = kind.dtype, kind.denotation, id(shape)
        known = self._types.get(key)
        if known is None:
            ir.serde.serialize_value_into(info, value)
            self._types[key] = info.type, shape
        else:
            info.name = name
            info.type.CopyFrom(known[0])
