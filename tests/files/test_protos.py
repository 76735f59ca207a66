"""Models are read and written as onnx_ir reads and writes them, to the byte."""

from __future__ import annotations

from collections.abc import Callable

import onnx
import onnx.parser
import onnx_ir as ir
import pytest

import graphscale as gs
from graphscale.files.protos import read_model, write_model
from tests.conftest import MODEL_NAMES, MODELS

SMALL = """
<ir_version: {ir_version}, opset_import: ["" : 20, "local" : 1]>
step (float[N,4] x, float[4] w) => (float[N,4] y, float[N,4] h)
<float[N,4] h, float[4] v, float[] s, float[N,4] h>
{{
   v = Neg(w)
   h = Add(x, v)
   s = ReduceSum <keepdims = 0> (h)
   y = Mul(h, s)
}}
"""
FUNCTION = """
<domain: "local", opset_import: ["" : 20]>
twice (a) => (c) { b = Add(a, a)  c = Identity(b) }
"""


def as_bytes(proto: onnx.ModelProto) -> bytes:
    data: bytes = proto.SerializeToString(deterministic=True)
    return data


def facts(model: ir.Model) -> list[tuple[object, ...]]:
    """What a file does not hold: who gives and who reads each value, and what the graph knows it as."""
    graph = model.graph
    order = {node: place for place, node in enumerate(graph.all_nodes())}
    values = [*graph.inputs, *graph.initializers.values(), *graph.outputs]
    values += [value for node in order for value in (*node.outputs, *node.inputs) if value is not None]
    return [
        (
            value.name,
            None if value.producer() is None else order[value.producer()],
            value.index(),
            [(order[node], index) for node, index in value.uses()],
            (value.is_graph_input(), value.is_initializer(), value.is_graph_output()),
            (str(value.type), str(value.shape), value.doc_string, dict(value.metadata_props)),
            None if value.const_value is None else value.const_value.name,
        )
        for value in values
    ]


def check(proto: onnx.ModelProto) -> None:
    """Reading and writing give what onnx_ir gives, each on its own."""
    before = as_bytes(proto)
    wanted = as_bytes(ir.to_proto(ir.from_proto(proto)))
    assert as_bytes(ir.to_proto(read_model(proto))) == wanted
    assert facts(read_model(proto)) == facts(ir.from_proto(proto))
    assert as_bytes(write_model(ir.from_proto(proto))) == wanted
    assert as_bytes(write_model(read_model(proto))) == wanted
    annotated = bool(proto.graph.quantization_annotation)
    assert as_bytes(write_model(read_model(proto), annotated=annotated)) == wanted
    assert as_bytes(proto) == before


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_exported_graphs(name: str) -> None:
    check(onnx.load(MODELS / f"{name}.onnx"))


@pytest.mark.parametrize("name", ["pytorch/attention_adamw_clip", "jax/language_model", "ort/recurrent"])
def test_graphs_in_mixed_precision_with_a_loss_scale(name: str) -> None:
    result = gs.scale(MODELS / f"{name}.onnx", autocast="float16")
    assert isinstance(result.model, ir.Model)
    assert as_bytes(write_model(result.model)) == as_bytes(ir.to_proto(result.model))
    check(write_model(result.model))


def small(ir_version: int = 10) -> onnx.ModelProto:
    return onnx.parser.parse_model(SMALL.format(ir_version=ir_version))


def plain(proto: onnx.ModelProto) -> None:
    """As the text above, where `h` is an output and has a type of its own, twice."""


def denotations(proto: onnx.ModelProto) -> None:
    for info in (*proto.graph.input, *proto.graph.value_info):
        info.type.denotation = "TENSOR"
        for axis in info.type.tensor_type.shape.dim:
            axis.denotation = "DATA_BATCH"
    # The same dtype and shape without any.
    info = next(info for info in proto.graph.value_info if info.name == "v")
    info.type.ClearField("denotation")


def details_of_values(proto: onnx.ModelProto) -> None:
    for info in proto.graph.value_info:
        info.doc_string = f"about {info.name}"
        info.metadata_props.add(key="key", value=info.name)


def unknown_shapes_and_types(proto: onnx.ModelProto) -> None:
    infos = {info.name: info for info in proto.graph.value_info}
    infos["v"].type.tensor_type.ClearField("shape")
    infos["s"].ClearField("type")


def an_output_without_shape(proto: onnx.ModelProto) -> None:
    proto.graph.output[1].type.tensor_type.ClearField("shape")


def a_sequence(proto: onnx.ModelProto) -> None:
    proto.graph.node.add(op_type="SequenceConstruct", input=["v", "v"], output=["list"])
    info = proto.graph.value_info.add(name="list")
    info.type.sequence_type.elem_type.CopyFrom(proto.graph.input[1].type)


def quantization(proto: onnx.ModelProto, *names: str) -> None:
    for name in names or ("x", "v", "h"):
        annotation = proto.graph.quantization_annotation.add(tensor_name=name)
        annotation.quant_parameter_tensor_names.add(key="SCALE_TENSOR", value="s")


def quantization_of_an_output(proto: onnx.ModelProto) -> None:
    quantization(proto, "h")


def quantization_within(proto: onnx.ModelProto) -> None:
    quantization(proto, "v")


def left_out_outputs(proto: onnx.ModelProto) -> None:
    proto.graph.node.add(op_type="TopK", input=["v", "s"], output=["", "places"])
    proto.graph.node.add(op_type="TopK", input=["v", "s"], output=["largest", ""])


def a_typed_initializer(proto: onnx.ModelProto) -> None:
    for name, info in (("plain", None), ("typed", "about it")):
        proto.graph.initializer.add(name=name, dims=[2], data_type=1, float_data=[1.0, 2.0])
        if info is not None:
            shown = proto.graph.value_info.add(name=name, doc_string=info)
            shown.type.tensor_type.elem_type = 1
            shown.type.tensor_type.shape.dim.add(dim_param="two")
    proto.graph.initializer.add(name="w", dims=[4], data_type=1, float_data=[1.0] * 4)
    proto.graph.value_info.add(name="w", doc_string="of an input, which onnx_ir leaves out")


def a_branch(proto: onnx.ModelProto) -> None:
    body = onnx.parser.parse_graph("body () => (float[4] r) <float[4] h, float[4] r> { h = Abs(w)  r = Abs(h) }")
    node = proto.graph.node.add(op_type="If", input=["s"], output=["chosen"])
    for name in ("then_branch", "else_branch"):
        node.attribute.append(onnx.helper.make_attribute(name, body))


def a_function(proto: onnx.ModelProto) -> None:
    proto.functions.append(onnx.parser.parse_function(FUNCTION))
    proto.graph.node.add(op_type="twice", domain="local", input=["v"], output=["doubled"])
    # How PyTorch's exporter says the types of a function's values up to IR version 9.
    proto.graph.value_info.add(name="local::twice/b").type.CopyFrom(proto.graph.input[1].type)


def unsorted(proto: onnx.ModelProto) -> None:
    nodes = list(reversed(proto.graph.node))
    del proto.graph.node[:]
    proto.graph.node.extend(nodes)


def an_undeclared_operand(proto: onnx.ModelProto) -> None:
    proto.graph.node[1].input[1] = "nobody"
    proto.graph.value_info.add(name="nobody").type.CopyFrom(proto.graph.input[1].type)


def an_undeclared_output(proto: onnx.ModelProto) -> None:
    proto.graph.output.add(name="nobody").type.CopyFrom(proto.graph.input[1].type)


def details_of_nodes(proto: onnx.ModelProto) -> None:
    node = proto.graph.node[0]
    node.name, node.doc_string, node.overload = "first", "about it", "other"
    node.metadata_props.add(key="key", value="value")
    proto.graph.node[1].doc_string = ""


def metadata_of_a_node(proto: onnx.ModelProto) -> None:
    for key in ("b", "a"):
        proto.graph.node[0].metadata_props.add(key=key, value=f"value of {key}")


def types_of_nothing(proto: onnx.ModelProto) -> None:
    proto.graph.value_info.add(name="nowhere").type.CopyFrom(proto.graph.input[1].type)


@pytest.mark.parametrize("ir_version", [8, 9, 10])
@pytest.mark.parametrize(
    "change",
    [
        plain,
        denotations,
        details_of_values,
        unknown_shapes_and_types,
        an_output_without_shape,
        a_sequence,
        quantization,
        quantization_of_an_output,
        quantization_within,
        left_out_outputs,
        a_typed_initializer,
        a_branch,
        a_function,
        types_of_nothing,
        unsorted,
        an_undeclared_operand,
        an_undeclared_output,
        details_of_nodes,
        metadata_of_a_node,
    ],
)
def test_unusual_graphs(change: Callable[[onnx.ModelProto], None], ir_version: int) -> None:
    proto = small(ir_version)
    change(proto)
    check(proto)


def test_types_are_not_shared() -> None:
    """Who sets the dtype of one value does not set that of others; what is shared cannot be changed."""
    model = read_model(small())
    values = [value for node in model.graph for value in node.outputs]
    assert len({id(value.type) for value in values}) == len(values)
    values[0].dtype = ir.DataType.DOUBLE
    assert [value.dtype for value in values[1:]] == [ir.DataType.FLOAT] * 3
    shapes = [value.shape for value in values if value.shape is not None]
    assert len(shapes) == 3 and all(shape.frozen for shape in shapes)


def test_shapes_are_shared_unless_axes_have_denotations() -> None:
    proto = small()
    for name in ("v2", "v3", "v4"):
        proto.graph.node.add(op_type="Neg", input=["v"], output=[name])
        proto.graph.value_info.add(name=name).type.CopyFrom(proto.graph.input[1].type)
    for info in proto.graph.value_info[-2:]:
        info.type.tensor_type.shape.dim[0].denotation = "DATA_FEATURE"
    model = read_model(proto)
    one, other, third, fourth = (value for node in model.graph for value in node.outputs if value.name[0] == "v")
    assert one.shape is other.shape
    assert third.shape is not fourth.shape
    other.type = ir.TensorType(ir.DataType.FLOAT, denotation="TENSOR")
    third.shape = one.shape
    assert as_bytes(write_model(model)) == as_bytes(ir.to_proto(model))


def test_attributes_that_are_equal_numbers_are_shared() -> None:
    proto = small()
    axis = onnx.helper.make_attribute("axis", 1)
    about = onnx.helper.make_attribute("axis", 1, doc_string="about it")
    others = [onnx.helper.make_attribute("to", 1), onnx.helper.make_attribute("axis", 1.0), about]
    for i, attribute in enumerate([axis, axis, *others, axis]):
        proto.graph.node.add(op_type="Softmax", input=["v"], output=[f"v{i}"]).attribute.append(attribute)
    check(proto)
    model = read_model(proto)
    nodes = model.graph[-6:]
    one, other, *different, last = (attribute for node in nodes for attribute in node.attributes.values())
    assert one is other is last
    assert len({id(attribute) for attribute in (one, *different)}) == 4
    nodes[0].attributes["axis"] = ir.AttrInt64("axis", 0)
    assert [nodes[i].attributes["axis"].value for i in (0, 1, 5)] == [0, 1, 1]
    assert as_bytes(write_model(model)) == as_bytes(ir.to_proto(model))


def test_damaged_types_of_values_that_are_not_there() -> None:
    """They are passed over, as by onnx_ir; of a value that is there they are damage."""
    proto = small()
    for name in ("nobody", "", "v"):
        info = onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [2])
        info.type.tensor_type.elem_type = 99
        proto.graph.value_info.append(info)
    # The last one counts.
    proto.graph.value_info.append(onnx.helper.make_tensor_value_info("v", onnx.TensorProto.FLOAT, [2]))
    check(proto)
    proto.graph.value_info[-1].type.tensor_type.elem_type = 99
    with pytest.raises(ValueError, match=r"^99 is not a valid DataType$"):
        read_model(proto)
    with pytest.raises(ir.serde.SerdeError):
        ir.from_proto(proto)


def test_damaged_graphs_raise_what_onnx_ir_raises() -> None:
    proto = small()
    proto.graph.node.add(op_type="Neg", input=["w"], output=["v"])
    with pytest.raises(ir.serde.SerdeError, match="step"):
        read_model(proto)
    model = ir.from_proto(small())
    node = model.graph[0]
    node.op_type = 3  # type: ignore[assignment]
    with pytest.raises(ir.serde.SerdeError):
        write_model(model)


@pytest.mark.parametrize("rewrite", [gs.scale, gs.autocast], ids=["scale", "autocast"])
def test_rewritten_graphs_keep_their_annotations(rewrite: Callable[[onnx.ModelProto], gs.ScaledModel]) -> None:
    proto = onnx.load(MODELS / "pytorch/mlp_momentum.onnx")
    name = proto.graph.node[0].output[0]
    quantization(proto, name)
    model = rewrite(proto).model
    assert isinstance(model, onnx.ModelProto)
    assert [annotation.tensor_name for annotation in model.graph.quantization_annotation] == [name]
