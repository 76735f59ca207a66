"""The original in the metadata of a rewritten model, to the byte as onnx_ir writes it, and its damage."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest

import graphscale as gs
from graphscale.errors import ModelFileError
from graphscale.graph.original import ORIGINAL_KEY, record_original
from graphscale.graph.restored import restore_original
from tests.build import step
from tests.conftest import MODELS

pytestmark = pytest.mark.static

SMALL = """
<ir_version: 10, opset_import: ["" : 20, "local" : 1]>
step (float[N,4] x, float[4] w) => (float[N,4] y, float[N,4] h)
<float[N,4] h, float[4] v, float[] s, float[N,4] h>
{
   v = Neg(w)
   h = Add(x, v)
   s = ReduceSum <keepdims = 0> (h)
   y = Mul(h, s)
}
"""
FUNCTION = """
<domain: "local", opset_import: ["" : 20]>
twice (a) => (c) { b = Add(a, a)  c = Identity(b) }
"""


def as_bytes(proto: onnx.ModelProto) -> bytes:
    data: bytes = proto.SerializeToString(deterministic=True)
    return data


def plain(proto: onnx.ModelProto) -> None:
    """As the text above, where `h` is an output and has a type of its own, twice."""
    proto.metadata_props.add(key="author", value="somebody")


def quantization(proto: onnx.ModelProto, *names: str) -> None:
    """Of an input, a value within, and an output."""
    for name in names or ("x", "v", "h"):
        annotation = proto.graph.quantization_annotation.add(tensor_name=name)
        annotation.quant_parameter_tensor_names.add(key="SCALE_TENSOR", value="s")


def a_typed_initializer(proto: onnx.ModelProto) -> None:
    for name in ("plain", "typed"):
        proto.graph.initializer.add(name=name, dims=[2], data_type=1, float_data=[1.0, 2.0])
    shown = onnx.helper.make_tensor_value_info("typed", 1, ["two"], doc_string="about it")
    proto.graph.value_info.append(shown)
    proto.graph.initializer.add(name="w", dims=[4], data_type=1, float_data=[1.0] * 4)
    proto.graph.value_info.add(name="w", doc_string="of an input, which onnx_ir leaves out")


def a_function(proto: onnx.ModelProto) -> None:
    proto.functions.append(onnx.parser.parse_function(FUNCTION))
    proto.graph.node.add(op_type="twice", domain="local", input=["v"], output=["doubled"])
    # PyTorch's exporter gives the types of a function's values like this up to IR version 9.
    proto.graph.value_info.add(name="local::twice/b").type.CopyFrom(proto.graph.input[1].type)


def an_undeclared_operand(proto: onnx.ModelProto) -> None:
    proto.graph.node[1].input[1] = "nobody"
    proto.graph.value_info.add(name="nobody").type.CopyFrom(proto.graph.input[1].type)


@pytest.mark.parametrize("ir_version", [9, 10])
@pytest.mark.parametrize("change", [plain, quantization, a_typed_initializer, a_function, an_undeclared_operand])
def test_unusual_graphs(change: Callable[[onnx.ModelProto], None], ir_version: int) -> None:
    proto = onnx.parser.parse_model(SMALL)
    proto.ir_version = ir_version
    change(proto)
    before, wanted = as_bytes(proto), as_bytes(ir.to_proto(ir.from_proto(proto)))
    for source in (proto, None):
        model = ir.from_proto(proto)
        with record_original(model, source):
            model.graph.outputs.clear()
            model.graph.remove(tuple(model.graph))
            model.metadata_props["more"] = "of it"
        assert as_bytes(ir.to_proto(restore_original(model))) == wanted
        assert as_bytes(proto) == before


def weights() -> onnx.ModelProto:
    """A model with three initializers: raw, in float_data, and described."""
    proto = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 20]> step (float[2] x) => (float[2] y)'
        " <float[2] raw = {1, 2}, float[2] fields = {3, 4}, float[2] constant = {5, 6}>"
        " { a = Add(x, raw)  b = Add(a, fields)  y = Add(b, constant) }"
    )
    proto.graph.initializer[0].CopyFrom(onnx.numpy_helper.from_array(np.float32([1, 2]), "raw"))
    proto.graph.initializer[2].doc_string = "a constant"
    return proto


def test_content_is_taken_from_where_it_is() -> None:
    """Initializers that are kept, renamed, replaced and removed; of the first two, what was learned since."""
    proto = weights()
    proto.graph.initializer.add(name="gone", dims=[1], data_type=1, float_data=[7.0])
    model = ir.from_proto(proto)
    with record_original(model):
        held = model.graph.initializers
        held["fields"].name = "fields.renamed"
        held["constant"].const_value = ir.tensor(np.float16([5, 6]), name="constant")
        del held["gone"]
    for name in ("raw", "fields.renamed"):
        held[name].const_value = ir.tensor(np.float32([8, 9]), name=name)
    restored = restore_original(model)
    content = {name: list(value.const_value.numpy()) for name, value in restored.graph.initializers.items()}
    assert content == {"raw": [8, 9], "fields": [8, 9], "constant": [5, 6], "gone": [7]}
    assert restored.graph.initializers["constant"].const_value.doc_string == "a constant"
    assert len(model.metadata_props[ORIGINAL_KEY]) < 600


def test_tensors_that_two_initializers_share() -> None:
    """Each is what the initializer of its own name is now."""
    model = ir.from_proto(weights())
    held = model.graph.initializers
    held["raw"].const_value = held["fields"].const_value
    with record_original(model):
        pass
    held["raw"].const_value = ir.tensor(np.float32([8, 9]), name="raw")
    restored = restore_original(model).graph.initializers
    assert [list(restored[name].const_value.numpy()) for name in ("raw", "fields")] == [[8, 9], [3, 4]]


def test_weights_on_disk_that_were_rounded(tmp_path: Path) -> None:
    """The record holds the content of an external constant that the rewritten model does not refer to any more."""
    ir.save(ir.from_proto(weights()), tmp_path / "step.onnx", external_data="step.data", size_threshold_bytes=0)
    model = ir.load(tmp_path / "step.onnx")
    assert isinstance(model.graph.initializers["constant"].const_value, ir.ExternalTensor)
    with record_original(model):
        model.graph.initializers["constant"].const_value = ir.tensor(np.float16([5, 6]), name="constant")
    (tmp_path / "step.data").rename(tmp_path / "elsewhere.data")
    restored = restore_original(model).graph.initializers
    assert list(restored["constant"].const_value.numpy()) == [5, 6]
    assert isinstance(restored["raw"].const_value, ir.ExternalTensor)


def test_nothing_is_recorded_of_a_rewrite_that_fails() -> None:
    model = ir.from_proto(weights())
    with pytest.raises(RuntimeError), record_original(model):
        raise RuntimeError
    assert not model.metadata_props
    with record_original(model):
        model.graph.name = "another"
    assert restore_original(model).graph.name == "step"


def damaged(record: bytes) -> onnx.ModelProto:
    """A scaled model with another record."""
    model = gs.scale(onnx.load(MODELS / "pytorch/mlp_momentum.onnx")).model
    entry = next(entry for entry in model.metadata_props if entry.key == ORIGINAL_KEY)
    entry.value = base64.b64encode(record).decode()
    return model


@pytest.mark.full
@pytest.mark.parametrize(
    "make_record",
    [
        lambda: zlib.compress(bytes(2**28), 9),
        lambda: zlib.compress(b"no model")[:-6],
        lambda: zlib.compress(b"\xff" * 9),
        lambda: zlib.compress(onnx.ModelProto().SerializeToString()),
        bytes,
    ],
    ids=["bomb", "truncated", "no message", "empty", "nothing"],
)
def test_damaged_records(make_record: Callable[[], bytes]) -> None:
    with pytest.raises(ModelFileError, match="the model cannot be stripped: it was changed"):
        gs.strip(damaged(make_record()))


def test_references_to_nothing() -> None:
    original = onnx.load(MODELS / "pytorch/mlp_momentum.onnx")
    reference = original.graph.initializer.add(name="w", data_type=1, data_location=onnx.TensorProto.EXTERNAL)
    for _ in ("no location", "a location without a file"):
        with pytest.raises(ModelFileError, match="cannot be stripped"):
            gs.strip(damaged(zlib.compress(original.SerializeToString())))
        reference.external_data.add(key="location", value="nobody")


@pytest.mark.parametrize("rewrite", [gs.scale, gs.autocast], ids=["scale", "autocast"])
def test_rewritten_graphs_keep_their_annotations(rewrite: Callable[[onnx.ModelProto], gs.ScaledModel]) -> None:
    proto = onnx.load(MODELS / "pytorch/mlp_momentum.onnx")
    name = proto.graph.node[0].output[0]
    quantization(proto, name)
    model = rewrite(proto).model
    assert isinstance(model, onnx.ModelProto)
    assert [annotation.tensor_name for annotation in model.graph.quantization_annotation] == [name]


def test_the_model_given_keeps_its_names() -> None:
    """An output that is an initializer gets another name inside; its tensor is that of the model given."""
    model = step(outputs="float[4,5] dw1, float[5,3] dw2, float one")
    before = model.SerializeToString()
    scaled = gs.scale(model)
    assert model.SerializeToString() == before
    assert gs.strip(scaled.model) == model
    gs.verify(model, scaled, runs=0)
    assert model.SerializeToString() == before
