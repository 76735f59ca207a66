"""Models that two readers read in two ways are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from onnx.parser import parse_model as parse

from graphscale.errors import ModelFileError, UnsupportedModelError
from graphscale.files.ambiguous import refuse_ambiguous
from graphscale.files.model_files import from_proto, load

pytestmark = pytest.mark.static

TEXT = """<ir_version: 10, opset_import: ["" : 20, "own" : 1]> g (float[2] x, bool b) => (float[2] y)
<float[2] w = {1, 2}> {
    c = Constant <value = float[2] {3, 4}> ()
    p = Add(w, c) q = own.scaled <by = 2.0> (p) r = Sub(q, x)
    y = If(b) <then_branch = t () => (float[2] u) { u = Neg(r) }, else_branch = e () => (float[2] v) { v = Abs(r) }>
}
<domain: "own", opset_import: ["" : 20]> scaled <by> (a) => (z) {
    k = Constant <value_float: float = @by> () z = Mul(a, k)
}"""

Damage = Callable[[onnx.ModelProto], object]


def tensors(model: onnx.ModelProto) -> list[onnx.TensorProto]:
    return [model.graph.initializer[0], model.graph.node[0].attribute[0].t, model.functions[0].node[0].attribute[0].t]


def inner(model: onnx.ModelProto) -> onnx.GraphProto:
    return model.graph.node[-1].attribute[0].g


def put_outside(**entries: str) -> Damage:
    def damage(model: onnx.ModelProto) -> None:
        tensor = tensors(model)[0]
        for field in ("raw_data", "float_data"):
            tensor.ClearField(field)
        tensor.data_location = onnx.TensorProto.EXTERNAL
        for key, value in {"location": "weights", **entries}.items():
            tensor.external_data.add(key=key.rstrip("_"), value=value)

    return damage


def hold_twice(tensor: onnx.TensorProto) -> None:
    tensor.raw_data = np.float32([5, 6]).tobytes()
    tensor.float_data[:] = [7, 8]


def declare(graph: onnx.GraphProto) -> None:
    graph.value_info.append(helper.make_tensor_value_info("u", onnx.TensorProto.FLOAT, [2]))
    graph.value_info.append(helper.make_tensor_value_info("u", onnx.TensorProto.FLOAT16, [2]))


DAMAGED: dict[str, tuple[Damage, str]] = {
    "opset": (lambda m: m.opset_import.add(domain="ai.onnx", version=19), "the opset 'ai.onnx' twice"),
    "opset of a function": (lambda m: m.functions[0].opset_import.add(version=19), "the opset 'ai.onnx' twice"),
    "property": (
        lambda m: [m.metadata_props.add(key="k", value=value) for value in "ab"],
        "the metadata property 'k' twice",
    ),
    "function": (lambda m: m.functions.append(m.functions[0]), "the function 'own::scaled' twice"),
    "parameter": (
        lambda m: m.functions[0].attribute_proto.append(helper.make_attribute("by", 1.0)),
        "the function 'scaled' has the attribute 'by' twice",
    ),
    "value of a reference": (
        lambda m: setattr(m.functions[0].node[0].attribute[0], "f", 9.0),
        "the attribute 'value_float' of node '' has a value, and refers to another",
    ),
    "type": (lambda m: declare(m.graph), "the type of value 'u' twice"),
    "type of an input": (
        lambda m: m.graph.value_info.append(helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT16, [2])),
        "the type of value 'x' twice",
    ),
    "type in a body": (lambda m: declare(inner(m)), "the type of value 'u' twice"),
    "initializer": (lambda m: m.graph.initializer.append(m.graph.initializer[0]), "the initializer 'w' twice"),
    "content": (
        lambda m: hold_twice(tensors(m)[0]),
        "the content of tensor 'w' is there twice, as float_data and as raw_data",
    ),
    "content of a constant": (lambda m: hold_twice(tensors(m)[1]), "is there twice, as float_data and as raw_data"),
    "content in a body": (
        lambda m: hold_twice(inner(m).initializer.add(name="i", dims=[2], data_type=1)),
        "the content of tensor 'i' is there twice",
    ),
    "a file beside the content": (
        lambda m: tensors(m)[0].external_data.add(key="location", value="weights"),
        " and as external_data",
    ),
    "content beside a file": (
        lambda m: (put_outside()(m), setattr(tensors(m)[0], "raw_data", bytes(8))),
        " and as external_data",
    ),
    "a bool that is neither 0 nor 1": (
        lambda m: m.graph.initializer.add(name="i", data_type=onnx.TensorProto.BOOL, int32_data=[256]),
        "the content of tensor 'i' has the number 256, which its type does not hold",
    ),
    "a float16 of more bits": (
        lambda m: m.graph.initializer.add(name="i", data_type=onnx.TensorProto.FLOAT16, int32_data=[2**16]),
        "has the number 65536",
    ),
    "an int8 below its least": (
        lambda m: m.graph.initializer.add(name="i", data_type=onnx.TensorProto.INT8, dims=[2], int32_data=[1, -129]),
        "has the number -129",
    ),
    "a uint32 of more bits": (
        lambda m: m.graph.initializer.add(name="i", data_type=onnx.TensorProto.UINT32, uint64_data=[2**32]),
        "has the number 4294967296",
    ),
    "no content": (lambda m: tensors(m)[0].ClearField("float_data"), "the content of tensor 'w' is not there"),
    "half bytes": (
        lambda m: m.graph.initializer.add(name="i", data_type=onnx.TensorProto.INT4, dims=[4], raw_data=b"!"),
        "has 1 bytes for 4 numbers of half a byte",
    ),
    "no type of elements": (
        lambda m: m.graph.value_info.add(name="p").type.tensor_type.SetInParent(),
        "the value 'p' is declared without a type of its elements",
    ),
    "a result without a name": (
        lambda m: m.graph.node[-1].output.append(""),
        "the last output of If '' has no name, which it needs",
    ),
    "key of a file": (put_outside(location_="other"), "by 'location', 'location'"),
    "key that nobody knows": (put_outside(basepath="/etc"), "by 'location', 'basepath'"),
    "digits of another script": (put_outside(offset="\u0661"), "has the offset '\u0661'"),
    "digits with underscores": (put_outside(length="2_048"), "has the length '2_048'"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged(name: str) -> None:
    model = parse(TEXT)
    damage, words = DAMAGED[name]
    damage(model)
    with pytest.raises(ModelFileError) as caught:
        from_proto(model)
    assert words in str(caught.value)


@pytest.mark.parametrize(("domain", "name"), [("", "Relu"), ("com.microsoft", "QuickGelu"), ("ai.onnx.ml", "Scaler")])
def test_a_function_with_the_name_of_an_operator(domain: str, name: str) -> None:
    """ONNX Runtime runs its kernel, and not the function."""
    model = parse(TEXT)
    model.functions[0].domain, model.functions[0].name = domain, name
    with pytest.raises(UnsupportedModelError, match=f"a function {domain or 'ai.onnx'}::{name}, and runtimes may"):
        from_proto(model)


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_segment_of_a_tensor(place: int) -> None:
    """ONNX Runtime reads it as the whole tensor; onnx does not read it."""
    model = parse(TEXT)
    tensors(model)[place].segment.end = 2
    with pytest.raises(UnsupportedModelError, match=r"has a segment of the tensor '.*' alone; write it whole"):
        from_proto(model)


@pytest.mark.parametrize("place", ["graph", "body", "function"])
def test_nodes_for_several_devices(place: str) -> None:
    model = parse(TEXT)
    places = {"graph": model.graph, "body": inner(model), "function": model.functions[0]}
    places[place].node[0].device_configurations.add()
    with pytest.raises(UnsupportedModelError, match=r"spreads node '.*' over devices"):
        from_proto(model)


def test_what_is_said_twice_alike_is_accepted() -> None:
    model = parse(TEXT)
    model.opset_import.add(domain="ai.onnx", version=20)
    for holder in (model.graph, inner(model)):
        holder.value_info.extend([helper.make_tensor_value_info("u", onnx.TensorProto.FLOAT, [2])] * 2)
    tensors(model)[0].CopyFrom(numpy_helper.from_array(np.float32([1, 2]), "w"))
    refuse_ambiguous(model, "it")
    model = parse(TEXT)
    put_outside(offset="0", length="8", checksum="x")(model)
    refuse_ambiguous(model, "it")


@pytest.mark.parametrize(
    "name", ["BOOL", "INT8", "UINT8", "INT16", "UINT16", "INT32", "FLOAT16", "BFLOAT16", "FLOAT8E5M2", "INT4", "UINT4"]
)
def test_numbers_as_onnx_writes_them_are_accepted(name: str) -> None:
    dtype = getattr(onnx.TensorProto, name)
    numbers = [0, 1] if name == "BOOL" else [0, 1, 3, 6] if name.startswith("U") else [-8, -1, 0, 5]
    tensor = helper.make_tensor("i", dtype, [len(numbers)], numbers)
    assert tensor.int32_data
    model = parse(TEXT)
    model.graph.initializer.append(tensor)
    refuse_ambiguous(model, "it")


def test_a_file_of_two_formats(tmp_path: Path) -> None:
    """ONNX Runtime reads it as a file of its own, and protobuf passes over a field without a meaning."""
    path = tmp_path / "model.onnx"
    field = bytes([11 << 3 | 2, 6])  # number 11, of six bytes
    path.write_bytes(field + b"..ORTM" + parse(TEXT).SerializeToString())
    assert onnx.load(path).graph == parse(TEXT).graph
    with pytest.raises(ModelFileError, match=r"is in the format of ONNX Runtime itself \(\.ort\); pass the ONNX file"):
        load(path)
