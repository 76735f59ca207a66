"""Files that runtimes read differently from their graph: declared sizes, double definitions, IR versions, records."""

from __future__ import annotations

import base64
import copy
import functools
import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import helper, numpy_helper

import graphscale as gs
from graphscale.checks.verification import verify
from graphscale.checks.verification.verify_report import VerifyReport
from graphscale.errors import ModelFileError, UnsupportedModelError
from graphscale.graph.original import ORIGINAL_KEY
from tests.build import feeds_for, linear_step
from tests.conftest import MODELS

MOMENTUM, REGRESSION = "pytorch/mlp_momentum", "ort/gradbuilder_regression"
# With operators of ONNX Runtime in the domain of ONNX.
CONVOLUTIONS = "ort/conv"


@functools.cache
def _scaled(name: str) -> onnx.ModelProto:
    target = "ort-training" if name == CONVOLUTIONS else "onnx"
    return ir.to_proto(gs.scale(ir.load(MODELS / f"{name}.onnx"), target=target).model)


def _damaged(name: str, damage: Callable[[onnx.ModelProto], object]) -> onnx.ModelProto:
    model = copy.deepcopy(_scaled(name))
    damage(model)
    return model


def _verify(name: str, damage: Callable[[onnx.ModelProto], object], **options: bool) -> VerifyReport:
    return verify(ir.load(MODELS / f"{name}.onnx"), _damaged(name, damage), runs=0, **options)


def _detail(report: VerifyReport, name: str, status: str) -> str:
    (check,) = [check for check in report.checks if check.name == name]
    assert check.status == status, check
    return check.detail


@pytest.mark.parametrize("sizes", [(4, 3), ("batch", 3), ("n", 3)], ids=str)
def test_a_declared_size_is_one_that_can_be_inferred(sizes: tuple[int | str, ...]) -> None:
    """ONNX Runtime folds `Shape(mul_4)` where the file declares the shape of `mul_4`."""
    declared = helper.make_tensor_value_info("mul_4", onnx.TensorProto.FLOAT, sizes)
    report = _verify(REGRESSION, lambda model: model.graph.value_info.append(declared))
    if sizes[0] == "batch":
        assert report.verdict == "verified, exact"
    else:
        # A name is a claim, too: of two values that have it, one may get the buffer of the other.
        detail = _detail(report, "translation", "not proved")
        assert detail == f"'mul_4' is declared of shape [{sizes[0]},3], and should be of [batch,3]"


def test_a_name_of_the_original_stands_for_no_other_size() -> None:
    """Inference gives such names to sizes that it does not know."""
    original = linear_step(
        "at = NonZero(x) places = Cast <to = 1> (at) metric = ReduceSum <keepdims = 0> (places)",
        outputs="float[4,3] dw, float metric",
    )
    for value in original.graph.input[:2]:
        value.type.tensor_type.shape.dim[0].dim_param = "unk__0"
    scaled = gs.scale(original).model
    assert verify(original, scaled, runs=0).verdict == "verified, exact"
    scaled.graph.value_info.append(helper.make_tensor_value_info("places", onnx.TensorProto.FLOAT, [2, "unk__0"]))
    assert "'places' is declared of shape" in _detail(verify(original, scaled, runs=0), "translation", "not proved")


def test_a_type_that_no_runtime_infers() -> None:
    """ONNX Runtime crashes on its operators in ONNX's domain without it."""

    def damage(model: onnx.ModelProto) -> None:
        value = next(value for value in model.graph.value_info if value.name == "relu_6_grad")
        model.graph.value_info.remove(value)

    detail = _detail(_verify(CONVOLUTIONS, damage), "translation", "not proved")
    assert detail == "'relu_6_grad' lacks its type, FLOAT: no runtime infers it"


def test_sizes_by_shape_inference_are_no_difference() -> None:
    inferred = onnx.shape_inference.infer_shapes(_scaled(REGRESSION))
    assert len(inferred.graph.value_info) > len(_scaled(REGRESSION).graph.value_info)
    assert verify(ir.load(MODELS / f"{REGRESSION}.onnx"), inferred, runs=0).ok


def test_a_sparse_initializer_is_refused() -> None:
    """ONNX Runtime takes it in place of a dense one of its name."""

    def hide(model: onnx.ModelProto) -> None:
        sparse = model.graph.sparse_initializer.add(dims=[8, 10])
        sparse.values.CopyFrom(numpy_helper.from_array(np.full(1, 123, np.float32), "zeros_like"))
        sparse.indices.CopyFrom(numpy_helper.from_array(np.array([3]), "indices"))

    with pytest.raises(UnsupportedModelError, match=r"the sparse initializer 'zeros_like'; write"):
        _verify(MOMENTUM, hide)


def test_a_sparse_initializer_of_a_body_is_refused() -> None:
    def hide(model: onnx.ModelProto) -> None:
        body = onnx.GraphProto(name="body", sparse_initializer=[onnx.SparseTensorProto(dims=[2])])
        body.sparse_initializer[0].values.name = "inside"
        model.graph.node.append(helper.make_node("If", ["all_finite"], ["y"], then_branch=body, else_branch=body))

    with pytest.raises(UnsupportedModelError, match=r"the sparse initializer 'inside'"):
        _verify(MOMENTUM, hide)


@pytest.mark.parametrize("kind", ["function 'graphscale::UpdateLossScale'", "initializer 'scalar_tensor'"])
def test_double_definitions_are_refused(kind: str) -> None:
    def double(model: onnx.ModelProto) -> None:
        if kind.startswith("function"):
            model.functions.insert(0, copy.deepcopy(model.functions[0]))
            model.functions[0].node[0].op_type = "Sub"
        else:
            other = numpy_helper.from_array(np.float32(7), "scalar_tensor")
            model.graph.initializer.insert(0, other)

    with pytest.raises(ModelFileError, match=f"it has the {kind} twice"):
        _verify(MOMENTUM, double)


def test_an_ir_version_without_initial_values() -> None:
    """Before IR version 4, the initial value of an input is a constant."""
    with pytest.raises(ModelFileError, match="in initializer but not in graph input"):
        _verify(MOMENTUM, lambda model: setattr(model, "ir_version", 3))


def test_a_later_ir_version_is_no_difference() -> None:
    assert _verify(MOMENTUM, lambda model: setattr(model, "ir_version", 11)).ok


def _other_opset(record: onnx.ModelProto) -> str:
    record.opset_import[0].version -= 1
    return "the opsets of the original in the metadata are ai.onnx 19"


def _other_function(record: onnx.ModelProto) -> str:
    record.functions.add(name="Relu", domain="own", opset_import=[helper.make_opsetid("", 20)])
    return "the function own::Relu is neither the original's nor an inserted piece"


def _other_metadata(record: onnx.ModelProto) -> str:
    helper.set_model_props(record, {"graphscale.roles": "{}"})
    return "the metadata of the original has 'graphscale.roles'"


def _other_pair(record: onnx.ModelProto) -> str:
    record.training_info.add().update_binding.add(key="fc1.bias", value="fc2.bias.next")
    return "the training_info of the original is"


def _other_node(record: onnx.ModelProto) -> str:
    record.graph.node[0].op_type = "Tanh"
    return "'node_t' (Tanh)"


def test_the_record_of_a_model_by_another_writer_holds_trained_state(tmp_path: Path) -> None:
    """Its bytes are not those that the original gives again, and the state is what the session left."""
    original = linear_step(
        "u = Mul(dw, rate) w_next = Sub(w, u)", outputs="float[4,3] w_next", constants="float rate = {0.1}"
    )
    original.graph.initializer.append(numpy_helper.from_array(np.ones((4, 3), np.float32), "w"))
    onnx.save(original, tmp_path / "original.onnx")
    gs.scale(tmp_path / "original.onnx").save(tmp_path / "scaled.onnx")
    with gs.Session(tmp_path / "scaled.onnx") as session:
        session.step({name: array for name, array in feeds_for(original).items() if name != "w"})
        session.export(tmp_path / "trained.onnx")
    trained = verify(tmp_path / "original.onnx", tmp_path / "trained.onnx", runs=0, trained=True)
    assert trained.verdict == "verified, exact", trained


@pytest.mark.parametrize("forge", [_other_opset, _other_function, _other_metadata, _other_pair, _other_node])
def test_a_forged_record_of_the_original(forge: Callable[[onnx.ModelProto], str]) -> None:
    """`strip` would give another model than was scaled."""
    words = ""

    def damage(model: onnx.ModelProto) -> None:
        nonlocal words
        (entry,) = [entry for entry in model.metadata_props if entry.key == ORIGINAL_KEY]
        record = onnx.ModelProto.FromString(zlib.decompressobj().decompress(base64.b64decode(entry.value)))
        words = forge(record)
        entry.value = base64.b64encode(zlib.compress(record.SerializeToString())).decode()

    detail = _detail(_verify(MOMENTUM, damage), "metadata of the scaling", "fails")
    assert words in detail


def test_a_role_twice() -> None:
    """Readers take the first one."""

    def damage(model: onnx.ModelProto) -> None:
        (entry,) = [entry for entry in model.metadata_props if entry.key == "graphscale.report"]
        report = json.loads(entry.value)
        report["roles"].insert(0, {**report["roles"][0], "role": "kept"})
        entry.value = json.dumps(report)

    assert "name an input or output twice" in _detail(_verify(MOMENTUM, damage), "metadata of the scaling", "fails")


@pytest.mark.parametrize(
    ("name", "array", "words"),
    [
        ("current_loss_scale", np.array([2, 2], np.float32), "is FLOAT[2], and should be FLOAT[]"),
        ("current_loss_scale", np.array(2), "is INT64[], and should be FLOAT[]"),
        ("good_steps", np.array(5, np.float32), "is FLOAT[], and should be INT64[]"),
    ],
)
def test_trained_state_has_the_type_of_its_input(name: str, array: np.ndarray, words: str) -> None:
    def damage(model: onnx.ModelProto) -> None:
        (tensor,) = [tensor for tensor in model.graph.initializer if tensor.name == name]
        tensor.CopyFrom(numpy_helper.from_array(array, name))

    assert words in _detail(_verify(MOMENTUM, damage, trained=True), "initial values", "fails")


def _rename_key(key: str, text: str) -> Callable[[onnx.ModelProto], None]:
    def damage(model: onnx.ModelProto) -> None:
        (entry,) = [entry for entry in model.metadata_props if entry.key == f"graphscale.{key}"]
        entry.value = text.replace("OLD", entry.value[1:-1])

    return damage


@pytest.mark.parametrize(
    ("key", "text", "words"),
    [
        ("state", '{"fc1.bias": "fc2.bias.next", OLD}', "graphscale.state: it has 'fc1.bias' twice"),
        ("policy", '{"config": {}, OLD}', "graphscale.policy: it has 'config' twice"),
        ("names", "", "graphscale.names: Expecting value"),
        ("version", "", "graphscale.version has another form"),
        ("version", "9 or \x1b[31m", "graphscale.version has another form"),
        ("target", "", "graphscale.target has another form"),
    ],
)
def test_ambiguous_metadata_are_refused_by_the_name_of_the_property(key: str, text: str, words: str) -> None:
    with pytest.raises(ModelFileError, match=words):
        _verify(MOMENTUM, _rename_key(key, text))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"skipped_steps": "good_steps", OLD}', "call 'good_steps' the skipped_steps, and something else, too"),
        ('{"stuck": "good_steps", OLD}', "call 'good_steps' the stuck, and something else, too"),
    ],
)
def test_names_of_other_values_are_a_failure(text: str, words: str) -> None:
    report = _verify(MOMENTUM, _rename_key("names", text))
    assert words in _detail(report, "named values", "fails")


def test_the_loss_scale_is_no_count() -> None:
    def exchange(model: onnx.ModelProto) -> None:
        (entry,) = [entry for entry in model.metadata_props if entry.key == "graphscale.names"]
        names = json.loads(entry.value)
        entry.value = json.dumps(names | {"loss_scale": names["good_steps"], "good_steps": names["loss_scale"]})

    assert "is no float32" in _detail(_verify(MOMENTUM, exchange), "named values", "fails")


def test_the_result_of_a_body_has_a_type() -> None:
    """ONNX Runtime does not load it otherwise."""
    original = ir.load(MODELS / "jax/mlp_sgd.onnx")
    scaled = ir.to_proto(gs.scale(original, telemetry=True).model)
    node = next(node for node in scaled.graph.node if node.op_type == "If")
    node.attribute[0].g.output[0].ClearField("type")
    report = verify(ir.load(MODELS / "jax/mlp_sgd.onnx"), scaled, runs=0)
    assert "has no type" in _detail(report, "translation", "not proved")


def test_an_operand_of_a_body_has_a_type() -> None:
    """ONNX Runtime does not load it otherwise."""
    value = helper.make_tensor_value_info
    carried, going = value("s", onnx.TensorProto.FLOAT, []), value("going", onnx.TensorProto.BOOL, [])
    body = helper.make_graph(
        [helper.make_node("Add", ["s", "s"], ["twice"]), helper.make_node("Identity", ["going"], ["on"])],
        "doubling",
        [value("i", onnx.TensorProto.INT64, []), going, carried],
        [value("on", onnx.TensorProto.BOOL, []), value("twice", onnx.TensorProto.FLOAT, [])],
    )
    original = linear_step(outputs="float[4,3] dw, float metric", constants="int64 rounds = {3}")
    original.graph.node.append(helper.make_node("Loop", ["rounds", "", "loss"], ["metric"], body=body))
    scaled = gs.scale(original, roles={"metrics": ["metric"]}, loss="loss").model
    given: dict[str, Any] = {"runs": 0, "roles": {"metrics": ["metric"]}, "loss": "loss"}
    assert verify(original, scaled, **given).verdict == "verified, exact"
    loop = next(node for node in scaled.graph.node if node.op_type == "Loop")
    loop.attribute[0].g.input[1].ClearField("type")
    detail = _detail(verify(original, scaled, **given), "translation", "not proved")
    assert detail.startswith("the input 'going' of ") and detail.endswith(" has no type")
