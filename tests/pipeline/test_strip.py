"""strip restores the original, byte for byte: all graphs of models/, all targets, functions, fused steps.

Models in onnx_ir's objects are compared in the form in which onnx_ir writes them, those of onnx as onnx writes them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx_ir.passes import InPlacePass, PassResult
from onnx_ir.passes.common import ShapeInferencePass

import graphscale as gs
from graphscale.cli.strip import strip as strip_file
from graphscale.errors import ModelFileError
from graphscale.files.training_info import to_proto
from graphscale.passes import Autocast, standard_passes
from graphscale.targets import TARGETS
from tests.analysis.recurrent import recurrent_step
from tests.analysis.test_control_flow import TestFunctions as WithFunctions
from tests.build import linear_step, step
from tests.conftest import MODEL_NAMES, MODELS
from tests.passes.test_lower_optimizers import OPTIMIZERS, model_of

pytestmark = [pytest.mark.static, pytest.mark.sample(1)]

EVERYTHING: dict[str, Any] = {"telemetry": True, "expose_scaled_loss": True, "autocast": "float16"}


def serialized(model: ir.Model | onnx.ModelProto) -> bytes:
    proto = to_proto(model) if isinstance(model, ir.Model) else model
    return proto.SerializeToString(deterministic=True)


@pytest.mark.cover(2)
@pytest.mark.sample(2)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", MODEL_NAMES)
def test_models_of_onnx(name: str, target: str) -> None:
    original = onnx.load(MODELS / f"{name}.onnx")
    mixed = gs.autocast(original).model
    assert gs.strip(gs.scale(original, target=target).model) == original
    assert wire(gs.strip(gs.scale(original, autocast="float16", target=target).model)) == wire(original)
    assert wire(gs.strip(gs.scale(mixed, target=target).model)) == wire(mixed)


def wire(model: onnx.ModelProto) -> bytes:
    return model.SerializeToString()


def with_properties_out_of_order(model: onnx.ModelProto) -> None:
    for key in ("z", "a", "m"):
        model.metadata_props.add(key=key, value=key)
        model.graph.metadata_props.add(key=key, value=key)
        model.graph.node[0].metadata_props.add(key=key, value=key)


def with_shapes_of_initializers(model: onnx.ModelProto) -> None:
    for tensor in reversed(model.graph.initializer):
        model.graph.value_info.append(onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
    del model.graph.value_info[::2]


def with_metadata_of_tensors(model: onnx.ModelProto) -> None:
    for tensor in model.graph.initializer:
        tensor.metadata_props.add(key="origin", value="a framework")


def with_quantization(model: onnx.ModelProto) -> None:
    for name in (model.graph.input[0].name, model.graph.node[0].output[0], model.graph.output[0].name):
        annotation = model.graph.quantization_annotation.add(tensor_name=name)
        annotation.quant_parameter_tensor_names.add(key="SCALE_TENSOR", value=model.graph.initializer[0].name)


def with_empty_texts(model: onnx.ModelProto) -> None:
    model.domain = model.doc_string = model.graph.doc_string = ""
    for node in model.graph.node:
        node.domain = node.doc_string = ""
    for tensor in model.graph.initializer:
        tensor.doc_string = ""


@pytest.mark.parametrize("target", ["onnx", "ort-cpu", "ort-training"])
@pytest.mark.parametrize(
    "change",
    [
        with_properties_out_of_order,
        with_shapes_of_initializers,
        with_metadata_of_tensors,
        with_quantization,
        with_empty_texts,
    ],
)
def test_forms_that_onnx_ir_does_not_write(
    change: Callable[[onnx.ModelProto], None], target: str, tmp_path: Path
) -> None:
    original = onnx.load(MODELS / "tensorflow/convnet_sgd.onnx")
    change(original)
    scaled = gs.scale(original, target=target).model
    assert wire(gs.strip(scaled)) == wire(original) != wire(normalized(original))
    scaled_file, stripped_file = tmp_path / "scaled.onnx", tmp_path / "stripped.onnx"
    scaled_file.write_bytes(wire(scaled))
    strip_file(scaled_file, stripped_file)
    assert stripped_file.read_bytes() == wire(original)


def normalized(model: onnx.ModelProto) -> onnx.ModelProto:
    """A model by hand as onnx_ir writes it: exporters' graphs are as it writes them, those of onnx's parser are not."""
    return to_proto(ir.from_proto(model))


def assert_strips(rewritten: ir.Model | onnx.ModelProto, original: ir.Model | onnx.ModelProto) -> None:
    """In memory, and out of a file's bytes."""
    before = serialized(rewritten)
    assert before != serialized(original)
    assert serialized(gs.strip(rewritten)) == serialized(original)
    assert serialized(rewritten) == before, "strip changed its argument"
    assert serialized(gs.strip(onnx.ModelProto.FromString(before))) == serialized(original)


@pytest.mark.cover(2)
@pytest.mark.sample(2)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", MODEL_NAMES)
def test_models(name: str, target: str) -> None:
    original = ir.load(MODELS / f"{name}.onnx")
    assert_strips(gs.scale(original, target=target).model, original)
    assert_strips(gs.scale(original, gs.presets.megatron(), target=target, **EVERYTHING).model, original)


@pytest.mark.full
@pytest.mark.parametrize("name", MODEL_NAMES)
def test_mixed_precision_and_fixed_scales(name: str) -> None:
    original = ir.load(MODELS / f"{name}.onnx")
    assert_strips(gs.autocast(original).model, original)
    assert_strips(gs.autocast(original, emulate=True).model, original)
    assert_strips(gs.autocast(original, "bfloat16", target="ort-cuda").model, original)
    assert_strips(gs.scale(original, 128.0).model, original)
    assert_strips(gs.scale(original, 128.0, skip_nonfinite=True, target="ort-training").model, original)


@pytest.mark.full
@pytest.mark.parametrize("name", ["pytorch/attention_adamw_clip", "ort/transformer", "ort/recurrent"])
@pytest.mark.parametrize("emulate", [False, True], ids=["typed", "emulated"])
def test_one_after_the_other(name: str, emulate: bool) -> None:
    original = ir.load(MODELS / f"{name}.onnx")
    mixed = gs.autocast(original, emulate=emulate).model
    scaled = gs.scale(mixed, "dynamic").model
    assert_strips(scaled, mixed)
    assert_strips(gs.strip(scaled), original)


@pytest.mark.parametrize("folder", ["digits_adamw_clip", "digits_adamw_ir14"])
def test_files_of_a_folder(folder: str, tmp_path: Path) -> None:
    original = MODELS / "ort" / "artifacts" / folder
    gs.scale_artifacts(original, tmp_path / "scaled", autocast="float16")
    strip_file(tmp_path / "scaled", tmp_path / "stripped")
    for path in original.glob("*.onnx"):
        assert (tmp_path / "stripped" / path.name).read_bytes() == path.read_bytes()


@pytest.mark.full
@pytest.mark.parametrize("target", ["onnx", "ort-training"])
@pytest.mark.parametrize("folder", sorted(path.name for path in (MODELS / "ort" / "artifacts").iterdir()))
def test_fused_steps(folder: str, target: str) -> None:
    original = gs.fuse(MODELS / "ort" / "artifacts" / folder).model
    assert_strips(gs.scale(original, target=target).model, original)
    assert_strips(gs.scale(original, autocast="float16", target=target).model, original)


WRITTEN: dict[str, Callable[[], onnx.ModelProto]] = {
    **{name: functools.partial(model_of, name) for name in OPTIMIZERS},
    **{kind: functools.partial(recurrent_step, kind) for kind in ("Scan", "Loop")},
    "functions": WithFunctions().model,
    "names that were taken": lambda: linear_step("all_finite = Neg(dw)", outputs="float[4,3] all_finite"),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_graphs_by_hand(name: str) -> None:
    """Operators that are spelled out, bodies, functions that are inlined."""
    original = normalized(WRITTEN[name]())
    before = serialized(original)
    assert_strips(gs.scale(original).model, original)
    assert_strips(gs.scale(original, telemetry=True, expose_scaled_loss=True).model, original)
    for emulate in (False, True):
        assert_strips(gs.scale(original, autocast=Autocast(emulate=emulate)).model, original)
    assert serialized(original) == before, "the model given was changed"


def test_constants_keep_their_encoding() -> None:
    """Constants that autocast rounds are restored in their encoding: float_data, with a description."""
    original = step(layer="b = Tanh(h) a = Mul(b, half)", constants="float half = {0.3}")
    half = next(tensor for tensor in original.graph.initializer if tensor.name == "half")
    half.CopyFrom(onnx.helper.make_tensor("half", onnx.TensorProto.FLOAT, [], [0.3]))
    half.doc_string = "a constant"
    mixed = gs.autocast(original).model
    assert next(t for t in mixed.graph.initializer if t.name == "half").data_type == onnx.TensorProto.FLOAT16
    assert_strips(mixed, original)


def test_later_weights_are_kept() -> None:
    scaled = gs.scale(MODELS / "ort/gradbuilder_mlp.onnx", target="ort-training").model
    weight = next(v for v in scaled.graph.initializers.values() if v.shape is not None and len(v.shape) == 2)
    trained = np.full(tuple(weight.shape.numpy()), 7, dtype=np.float32)
    weight.const_value = ir.tensor(trained, name=weight.name)
    found = gs.strip(scaled).graph.initializers[weight.name].const_value
    assert (found.numpy() == trained).all()


def test_nothing_to_strip() -> None:
    path = MODELS / "pytorch/two_losses.onnx"
    with pytest.raises(ModelFileError, match=r"two_losses\.onnx has nothing to strip"):
        gs.strip(path)


@pytest.mark.parametrize("damage", ["record", "base64", "input", "weight", "shape"])
def test_a_model_that_was_changed_since(damage: str) -> None:
    model = gs.scale(onnx.load(MODELS / "pytorch/mlp_momentum.onnx")).model
    record = next(entry for entry in model.metadata_props if entry.key == "graphscale.original")
    if damage == "record":
        record.value = record.value[:40]
    elif damage == "base64":
        record.value = "not base64"
    elif damage == "input":
        next(value for value in model.graph.input if value.name == "x").name = "another"
    else:
        weight = next(tensor for tensor in model.graph.initializer if len(tensor.dims) == 2)
        if damage == "weight":
            model.graph.initializer.remove(weight)
        else:
            weight.dims[0], weight.dims[1] = weight.dims[1], weight.dims[0]
    with pytest.raises(ModelFileError, match="cannot be stripped: it was changed"):
        gs.strip(model)


def test_what_was_added_since_is_not_in_the_original() -> None:
    original = ir.load(MODELS / "pytorch/mlp_momentum.onnx")
    model = gs.scale(original).model
    loss = next(value for value in model.graph.outputs if value.name == "loss")
    model.graph.append(ir.node("Identity", [loss], name="mine", outputs=[ir.Value(name="copy")]))
    assert_strips(model, original)


@pytest.mark.full
@pytest.mark.parametrize("name", ["pytorch/mlp_momentum", "jax/attention", "ort/digits_mlp"])
def test_passes_in_a_sequence_of_ones_own(name: str) -> None:
    """The passes record their changes if no caller does."""
    original = ir.load(MODELS / f"{name}.onnx")
    model = original.clone()
    ir.passes.Sequential(*standard_passes(Autocast()))(model)
    mixed = original.clone()
    Autocast()(mixed)
    assert_strips(model, mixed)
    assert_strips(gs.strip(model), original)


@pytest.mark.parametrize("name", ["pytorch/mlp_momentum", "jax/attention", "ort/digits_mlp"])
def test_what_others_passes_changed_in_between(name: str) -> None:
    """The order of nodes, and types and shapes that were not known: the original's own come back."""
    original = ir.load(MODELS / f"{name}.onnx")
    for node in original.graph:
        for value in node.outputs:
            if not value.is_graph_output():
                value.type = value.shape = None

    class Tell(InPlacePass):
        """Move the last node that can be moved up by one, and infer types and shapes."""

        def call(self, model: ir.Model) -> PassResult:
            nodes = list(model.graph)
            above, node = next(
                (above, node)
                for above, node in zip(reversed(nodes[:-1]), reversed(nodes[1:]), strict=True)
                if not {*above.outputs} & {*node.inputs}
            )
            model.graph.remove(node)
            model.graph.insert_before(above, node)
            assert ShapeInferencePass()(model).modified
            return PassResult(model, modified=True)

    model = original.clone()
    first, *others = standard_passes()
    ir.passes.Sequential(first, Tell(), *others)(model)
    assert_strips(model, original)
