"""Scaled graphs with equal results that do not do what a loss scale is for."""

from __future__ import annotations

import onnx
import pytest

import graphscale as gs
from tests.cases.asked import linear
from tests.conftest import MODELS

pytestmark = pytest.mark.static

COVERED, SEEDS = "backward contractions scaled", "scale enters at seeds"


def scaled() -> onnx.ModelProto:
    model = gs.scale(linear()).model
    assert isinstance(model, onnx.ModelProto)
    return model


def statuses(model: onnx.ModelProto) -> dict[str, str]:
    return {check.name: check.status for check in gs.verify(linear(), model, runs=0, exact=False).checks}


def insert(model: onnx.ModelProto, op: str, value: str) -> None:
    """Insert an operator with the scale before the readers of a value."""
    at = next(i for i, node in enumerate(model.graph.node) if value in node.output) + 1
    for node in model.graph.node:
        node.input[:] = [f"{value}.inserted" if name == value else name for name in node.input]
    model.graph.node.insert(at, onnx.helper.make_node(op, [value, "current_loss_scale"], [f"{value}.inserted"]))


def drop(model: onnx.ModelProto, value: str) -> None:
    """Make the operator of a value the identity of its first operand."""
    node = next(node for node in model.graph.node if value in node.output)
    node.op_type, node.domain = "Identity", ""
    del node.input[1:]


def test_the_file_itself_holds() -> None:
    found = statuses(scaled())
    assert found[COVERED] == found[SEEDS] == found["equal to the original"] == "holds"


def test_a_contraction_behind_the_division() -> None:
    model = scaled()
    insert(model, "Div", "dp")
    drop(model, "gw.unscaled")
    found = statuses(model)
    assert found["equal to the original"] == "holds"
    assert (found[COVERED], found[SEEDS]) == ("fails", "holds")


def multiply(original: onnx.ModelProto, value: str) -> dict[str, str]:
    """Multiply a value by the scale in the scaled graph, and divide it again."""
    model = gs.scale(original).model
    assert isinstance(model, onnx.ModelProto)
    insert(model, "Mul", value)
    at = next(i for i, node in enumerate(model.graph.node) if f"{value}.inserted" in node.output)
    product = model.graph.node[at].output[0] = f"{value}.product"
    division = onnx.helper.make_node("Div", [product, "current_loss_scale"], [f"{value}.inserted"])
    model.graph.node.insert(at + 1, division)
    return {check.name: check.status for check in gs.verify(original, model, runs=0, exact=False).checks}


def test_an_activation_with_the_scale() -> None:
    found = multiply(onnx.load(MODELS / "pytorch/mlp_momentum.onnx"), "relu")
    assert (found["equal to the original"], found[SEEDS]) == ("holds", "not proved")


def test_a_residual_with_the_scale() -> None:
    """It is the cotangent of a squared error, but for a factor."""
    found = multiply(linear(), "d")
    assert (found["equal to the original"], found[SEEDS]) == ("holds", "holds")
