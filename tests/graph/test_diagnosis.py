"""Unexpected errors: for a damaged model, one line on the damage; for a sound one, the error itself."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest

import graphscale as gs
from graphscale.errors import ModelFileError
from graphscale.graph.damage import name_damage
from graphscale.graph.diagnosis import find_damage, find_model_damage, find_rejection
from tests.conftest import MODELS

pytestmark = pytest.mark.static

STEP = MODELS / "pytorch/mlp_momentum.onnx"


@pytest.mark.sample(6)
@pytest.mark.parametrize("path", sorted(MODELS.rglob("*.onnx")), ids=lambda path: path.relative_to(MODELS).as_posix())
def test_sound_models(path: Path) -> None:
    assert find_model_damage(onnx.load(path)) is None


def test_the_models_of_a_scaled_folder_are_sound(tmp_path: Path) -> None:
    gs.scale_artifacts(MODELS / "ort/artifacts/digits_sgd", tmp_path / "scaled")
    assert find_damage([tmp_path / "scaled"]) is None


@pytest.mark.parametrize("target", ["onnx", "ort-training"])
def test_scaled_models_are_sound(target: str) -> None:
    scaled = gs.scale(onnx.load(STEP), gs.presets.deepspeed(), target=target, telemetry=True, autocast="float16").model
    assert find_model_damage(scaled) is None


def _node(model: onnx.ModelProto, op_type: str) -> onnx.NodeProto:
    return next(node for node in model.graph.node if node.op_type == op_type)


def _shorten(model: onnx.ModelProto) -> None:
    tensor = next(tensor for tensor in model.graph.initializer if tensor.raw_data)
    tensor.raw_data = tensor.raw_data[:-1]


def _untype(model: onnx.ModelProto) -> None:
    model.graph.initializer[0].data_type = 0


DAMAGE: dict[str, tuple[Callable[[onnx.ModelProto], object], str]] = {
    "operand": (lambda model: _node(model, "Sub").input.pop(), "Sub node 'node_.*' lacks an operand"),
    "result": (lambda model: _node(model, "Where").ClearField("output"), "has no result"),
    "content": (_shorten, "the content of tensor .* does not fit"),
    "type": (_untype, "has no data type"),
    "attribute": (lambda model: _node(model, "LogSoftmax").attribute[0].ClearField("type"), "has no type"),
    "twice": (lambda model: model.graph.output.append(model.graph.output[0]), "is there twice"),
    "order": (lambda model: model.graph.node.append(model.graph.node.pop(3)), "topological"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage(kind: str) -> None:
    model = onnx.load(STEP)
    damage, message = DAMAGE[kind]
    damage(model)
    found = find_model_damage(model)
    assert found is not None
    assert "\n" not in found
    with pytest.raises(ModelFileError, match=f"the model is damaged: .*{message}"):
        _fails(model)


def test_names_in_a_message_of_the_checker_are_no_message() -> None:
    """Its messages on unknown operators are no damage."""
    model = onnx.load(STEP)
    tensors = [
        onnx.helper.make_tensor(name, kind, [1], [0])
        for name, kind in (("keys", onnx.TensorProto.INT64), ("No Op registered", onnx.TensorProto.FLOAT))
    ]
    tensors[1].raw_data = bytes(4)
    tables = {"keys_tensor": tensors[0], "values_tensor": tensors[1]}
    label = next(iter(model.graph.input)).name
    model.graph.node.append(onnx.helper.make_node("LabelEncoder", [label], ["labels"], domain="ai.onnx.ml", **tables))
    model.opset_import.add(domain="ai.onnx.ml", version=4)
    found = find_rejection(model)
    assert found is not None and "(tensor name: No Op registered) should contain one and only one value field" in found


@name_damage
def _fails(model: onnx.ModelProto | Path) -> None:
    raise IndexError(model)


def test_a_defect_of_our_own_stays_what_it_is() -> None:
    with pytest.raises(IndexError):
        _fails(onnx.load(STEP))


def test_paths_and_folders(tmp_path: Path) -> None:
    model = onnx.load(STEP)
    _untype(model)
    onnx.save(model, tmp_path / "bad.onnx")
    for argument in (tmp_path, tmp_path / "bad.onnx"):
        with pytest.raises(ModelFileError, match=r"bad\.onnx is damaged: tensor .* has no data type"):
            _fails(argument)


def test_a_pipe_in_a_folder_is_not_read(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe.onnx"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_bytes, args=(b"x",), daemon=True)
    writer.start()
    assert find_damage([tmp_path]) is None
    writer.join(0.2)
    assert writer.is_alive(), "it waits for a reader"
    assert pipe.read_bytes() == b"x"
    writer.join()
