"""The form of a file for verify: ONNX's rules, declarations of values, metadata of other readers."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper

import graphscale as gs
from graphscale.errors import ModelFileError
from graphscale.graph.order import check_order
from tests.conftest import MODELS

pytestmark = pytest.mark.static

Edit = Callable[[onnx.ModelProto], object]


@pytest.fixture(scope="module")
def original() -> onnx.ModelProto:
    return onnx.load(MODELS / "pytorch/mlp_momentum.onnx")


@pytest.fixture(scope="module")
def scaled(original: onnx.ModelProto) -> onnx.ModelProto:
    model = gs.scale(original, telemetry=True, autocast="float16").model
    assert isinstance(model, onnx.ModelProto)
    return model


def _body(model: onnx.ModelProto) -> onnx.GraphProto:
    node = next(node for node in model.graph.node if node.op_type == "If")
    return next(attribute.g for attribute in node.attribute if attribute.name == "else_branch")


def _read_early(model: onnx.ModelProto) -> None:
    nodes = _body(model).node
    nodes.append(nodes.pop(0))


def _shadow(model: onnx.ModelProto) -> None:
    """Give a value of a body the name of one around it, uses and all."""
    body, (outer,) = _body(model), model.graph.node[0].output
    old = body.node[0].output[0]
    for node in body.node:
        for names in (node.input, node.output):
            kept = [outer if name == old else name for name in names]
            del names[:]
            names.extend(kept)


def _take_later_name(model: onnx.ModelProto) -> None:
    """Give a result of a body the name of a value that is computed behind the body."""
    body, later = _body(model), model.graph.node[-1].output[0]
    old = body.output[0].name
    body.output[0].name = later
    for node in body.node:
        node.output[:] = [later if name == old else name for name in node.output]


def _property(model: onnx.ModelProto, key: str) -> onnx.StringStringEntryProto:
    return next(entry for entry in model.metadata_props if entry.key == f"graphscale.{key}")


def _in_report(change: Callable[[dict[str, Any]], object]) -> Edit:
    def edit(model: onnx.ModelProto) -> None:
        entry = _property(model, "report")
        report = json.loads(entry.value)
        change(report)
        entry.value = json.dumps(report)

    return edit


def _node(model: onnx.ModelProto, op_type: str) -> onnx.NodeProto:
    return next(node for node in model.graph.node if node.op_type == op_type)


def _constant(model: onnx.ModelProto) -> onnx.AttributeProto:
    return next(a for node in _body(model).node for a in node.attribute if a.t.raw_data)


EDITS: dict[str, tuple[Edit, str]] = {
    "a second value of an attribute": (lambda m: setattr(_node(m, "Cast").attribute[0], "f", 1.0), "mismatch"),
    "a result too many": (lambda m: _node(m, "ReduceSum").output.append(""), "output size 2"),
    "an operand too many": (lambda m: _body(m).node[0].input.append(""), "input size 1"),
    "a body that reads early": (_read_early, "topologically sorted"),
    "a body without its result": (
        lambda m: setattr(_body(m).output[0], "name", "nothing"),
        "is not an output of any node",
    ),
    "a body with a name from around it": (_shadow, "single static assignment"),
    "a body with a name of later on": (_take_later_name, "as the graph around it has"),
    "the long name of a domain in a body": (lambda m: setattr(_body(m).node[0], "domain", "ai.onnx"), "ai.onnx"),
    "a type of no value in a body": (lambda m: _body(m).value_info.add(name="nothing"), "describes 'nothing'"),
    "a result that is left out": (lambda m: _node(m, "IsNaN").output.append(""), "output size 2"),
    "an operand that is left out": (lambda m: _node(m, "ReduceSum").input.append(""), "values, and should read"),
    "a later IR version": (lambda m: setattr(m, "ir_version", 99), "the IR version is 99, and onnx loads up to"),
    "a number that is a bool": (_in_report(lambda r: r["inserted"]["check-finite"].update(Sum=True)), "is True"),
    "an IR version": (lambda m: setattr(m, "ir_version", 8), "the IR version of the graph is 8, and should be 10"),
    "a name twice": (lambda m: setattr(m.graph.node[0], "name", m.graph.node[1].name), "has two nodes named"),
    "no record": (lambda m: m.metadata_props.remove(_property(m, "original")), "record of the original is missing"),
    "a further property": (lambda m: m.metadata_props.add(key="graphscale.split", value="{}"), "'graphscale.split'"),
    "sparse initializers": (lambda m: m.graph.sparse_initializer.add(dims=[1]), "sparse initializer"),
    "a constant twice": (lambda m: _constant(m).t.float_data.append(1.0), "is there twice, as float_data and as raw"),
    "training_info": (lambda m: m.training_info.add(), "training_info"),
    "a pair": (_in_report(lambda r: r["roles"][2].update(pair="other")), "roles in graphscale.report"),
    "evidence that is no text": (_in_report(lambda r: r["roles"][0].update(evidence=1)), "its report is not one"),
    "certainty that is no bool": (_in_report(lambda r: r["roles"][0].update(certain="yes")), "its report is not one"),
    "an unknown key": (_in_report(lambda r: r["roles"][0].update(more=1)), "its report is not one"),
    "mixed precision": (_in_report(lambda r: r["autocast"].update(casts=0)), "'autocast': 'casts' is 0"),
    "a type that there is none of": (lambda m: setattr(_node(m, "Cast").attribute[0], "i", 1001), "no data type"),
}


@pytest.mark.parametrize("name", EDITS)
def test_edits_are_seen(original: onnx.ModelProto, scaled: onnx.ModelProto, name: str) -> None:
    edited = copy.deepcopy(scaled)
    edit, words = EDITS[name]
    edit(edited)
    try:
        report = gs.verify(original, edited, runs=0)
        assert not report.ok
        message = "; ".join(check.detail for check in report.checks)
    except gs.GraphscaleError as error:
        message = str(error)
    assert words in message


BEHIND: dict[str, tuple[Edit, str]] = {
    "a body that reads early": (_read_early, "topologically sorted"),
    "an attribute by another name": (lambda m: setattr(_constant(m), "name", "v"), "Unrecognized attribute: v"),
    "a result too many": (lambda m: _node(m, "Mul").output.append(""), "output size 2"),
}


@pytest.mark.parametrize("name", BEHIND)
def test_edits_behind_unknown_operators_are_seen(name: str) -> None:
    """ONNX's checker stops at the first operator of onnxruntime-training."""
    model = MODELS / "ort/conv.onnx"
    edited = gs.scale(model, target="ort-training", telemetry=True).model
    edited = edited if isinstance(edited, onnx.ModelProto) else ir.to_proto(edited)
    edit, words = BEHIND[name]
    edit(edited)
    with pytest.raises(ModelFileError, match=words):
        gs.verify(model, edited, runs=0)


def test_a_result_of_a_body_is_computed(scaled: onnx.ModelProto) -> None:
    """ONNX's checker looks for it in newer versions of the IR alone."""
    edited = copy.deepcopy(scaled)
    _body(edited).node.pop()
    with pytest.raises(ModelFileError, match="is computed by no node"):
        check_order(ir.from_proto(edited).graph)


def test_models_of_all_kinds_are_looked_at(original: onnx.ModelProto, scaled: onnx.ModelProto, tmp_path: Any) -> None:
    """A file's weights are not read for it, and the user's model is not changed."""
    before = scaled.SerializeToString()
    assert gs.verify(original, scaled, runs=0).ok
    assert scaled.SerializeToString() == before
    onnx.save(scaled, tmp_path / "scaled.onnx")
    assert gs.verify(original, tmp_path / "scaled.onnx", runs=0).ok
    _shadow(damaged := onnx.load(tmp_path / "scaled.onnx"))
    onnx.save(damaged, tmp_path / "damaged.onnx")
    with pytest.raises(gs.GraphscaleError, match=r"damaged.onnx is damaged: .*single static assignment"):
        gs.verify(original, tmp_path / "damaged.onnx", runs=0)


@pytest.fixture(scope="module")
def measured() -> onnx.ModelProto:
    """A step that divides its loss by the size of a value whose shape is known as it runs, and no sooner."""
    model = onnx.load(MODELS / "pytorch/mse_tanh.onnx")
    nodes = list(model.graph.node)
    at = next(i for i, node in enumerate(nodes) if node.output[0] == "loss")
    errors = nodes[at].input[0]
    made = [
        helper.make_node("Shape", [errors], ["sizes"]),
        helper.make_node("Abs", ["sizes"], ["same_sizes"]),
        helper.make_node("Reshape", [errors, "same_sizes"], ["errors"]),
        helper.make_node("Shape", ["errors"], ["counted"]),
        helper.make_node("Cast", ["counted"], ["counts"], to=TensorProto.FLOAT),
        helper.make_node("ReduceProd", ["counts"], ["count"], keepdims=0),
        helper.make_node("ReduceSum", ["errors"], ["total"], keepdims=0),
        helper.make_node("Div", ["total", "count"], ["loss"]),
    ]
    del model.graph.node[:]
    model.graph.node.extend([*nodes[:at], *made, *nodes[at + 1 :]])
    return model


def test_a_declared_shape_is_no_constant(measured: onnx.ModelProto) -> None:
    """A runtime that optimizes trusts declared sizes: this one changes the loss."""
    scaled = gs.scale(measured).model
    assert isinstance(scaled, onnx.ModelProto)
    assert gs.verify(measured, scaled, runs=0).ok
    scaled.graph.value_info.append(helper.make_tensor_value_info("errors", TensorProto.FLOAT, [7, 3]))
    report = gs.verify(measured, scaled, runs=0)
    assert report.verdict == "not proved; no numbers were compared"
    assert "'errors' is declared of shape [7,3], and should be of " in report.checks[0].detail


def test_what_an_inference_declares_is_accepted(measured: onnx.ModelProto) -> None:
    inferred = onnx.shape_inference.infer_shapes(gs.scale(measured, telemetry=True).model)
    assert gs.verify(measured, inferred, runs=0).ok


def test_one_invented_name_stands_for_one_size(measured: onnx.ModelProto) -> None:
    inferred = onnx.shape_inference.infer_shapes(gs.scale(measured).model)
    (value,) = (value for value in inferred.graph.value_info if value.name == "errors")
    first, second = value.type.tensor_type.shape.dim
    assert first.dim_param != second.dim_param
    second.dim_param = first.dim_param
    assert not gs.verify(measured, inferred, runs=0).ok


@pytest.mark.full
def test_the_declared_shape_changes_the_loss(measured: onnx.ModelProto) -> None:
    """As ONNX Runtime runs it; were it not so, the check would be for nothing."""
    with np.load(MODELS / "pytorch/mse_tanh.npz") as sample:
        batch = {name: sample[name] for name in ("x", "target")}
        state = {name: sample[name] for name in sample.files if name.startswith("fc")}
    losses = []
    for declared in (False, True):
        scaled = gs.scale(measured).model
        assert isinstance(scaled, onnx.ModelProto)
        if declared:
            scaled.graph.value_info.append(helper.make_tensor_value_info("errors", TensorProto.FLOAT, [7, 3]))
        with gs.Session(scaled) as session:
            feeds = {name: array for name, array in {**batch, **state}.items() if name in session.inputs}
            losses.append(float(session.step(feeds)["loss"]))
    assert losses[0] != losses[1]
