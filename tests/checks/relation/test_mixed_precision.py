"""Steps in mixed precision against their float32 originals: rounding where autocast allows it, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable

import onnx
import onnx_ir as ir
import pytest

import graphscale as gs
from graphscale.checks.verification.verify_report import Check
from tests.conftest import MODELS

pytestmark = pytest.mark.static

MODEL = MODELS / "pytorch" / "mlp_momentum.onnx"
HALF, FLOAT = onnx.TensorProto.FLOAT16, onnx.TensorProto.FLOAT


def scaled(**settings: object) -> onnx.ModelProto:
    model = gs.autocast(MODEL, "float16", loss_scale="dynamic", **settings).model
    return model if isinstance(model, onnx.ModelProto) else ir.to_proto(model)


def check(model: onnx.ModelProto) -> Check:
    report = gs.verify(MODEL, model, exact=False, runs=0)
    return next(each for each in report.checks if each.name == "equal to the float32 original")


def round_where(model: onnx.ModelProto, is_place: Callable[[onnx.NodeProto], int | None]) -> onnx.ModelProto:
    """Round the operand of the first node that has a place for it."""
    index, node, place = next(
        (i, node, place) for i, node in enumerate(model.graph.node) if (place := is_place(node)) is not None
    )
    model.graph.node.insert(index, onnx.helper.make_node("Cast", ["rounded.low"], ["rounded"], "up", to=FLOAT))
    model.graph.node.insert(index, onnx.helper.make_node("Cast", [node.input[place]], ["rounded.low"], "down", to=HALF))
    model.graph.node[index + 2].input[place] = "rounded"
    return model


def reads(op_type: str, output: str, place: int) -> Callable[[onnx.NodeProto], int | None]:
    return lambda node: place if node.op_type == op_type and output in node.output[0] else None


def takes(op_type: str, end: str) -> Callable[[onnx.NodeProto], int | None]:
    def find(node: onnx.NodeProto) -> int | None:
        places = (i for i, name in enumerate(node.input) if name.endswith(end))
        return next(places, None) if node.op_type == op_type else None

    return find


WRONG = {
    "a next weight": reads("Where", ".next", 1),
    "an old weight in the update": reads("Sub", "", 0),
    "an unscaled gradient in the update": takes("Add", ".unscaled"),
    "a checked quotient": takes("Mul", ".unscaled"),
    "the scale where it enters": takes("Mul", "current_loss_scale"),
    "the scale where it leaves": takes("Div", "current_loss_scale"),
}


@pytest.mark.parametrize(("settings", "count"), [({}, 7), ({"emulate": True}, 12)])
def test_roundings_are_counted(settings: dict[str, bool], count: int) -> None:
    model = scaled(**settings)
    casts = [a.i for node in model.graph.node if node.op_type == "Cast" for a in node.attribute if a.name == "to"]
    found = check(model)
    assert casts.count(HALF) == count
    assert (found.status, found.detail) == ("holds", f"up to rounding to float16 at {count} values")


@pytest.mark.parametrize("name", WRONG)
def test_a_value_that_stays_float32(name: str) -> None:
    found = check(round_where(scaled(), WRONG[name]))
    assert found.status == "not proved"
    assert "'down' rounds a value that should stay float32" in found.detail


def test_a_loss_that_is_rounded() -> None:
    model = scaled()
    loss = model.graph.output[0].name
    node = next(node for node in model.graph.node if loss in node.output)
    node.output[0] = "exact"
    model.graph.node.append(onnx.helper.make_node("Cast", ["exact"], ["low"], "down", to=HALF))
    model.graph.node.append(onnx.helper.make_node("Cast", ["low"], [loss], "up", to=FLOAT))
    found = check(model)
    assert found.status == "not proved" and "'down' rounds a value that should stay float32" in found.detail


def test_a_gradient_that_is_divided_in_float16() -> None:
    model = scaled()
    index, node = next(
        (i, node) for i, node in enumerate(model.graph.node) if node.op_type == "Div" and "unscaled" in node.output[0]
    )
    operands, result = list(node.input), node.output[0]
    node.input[:], node.output[0] = ["low.0", "low.1"], "low.quotient"
    model.graph.node.insert(index + 1, onnx.helper.make_node("Cast", ["low.quotient"], [result], "up", to=FLOAT))
    for i, name in enumerate(operands):
        model.graph.node.insert(index, onnx.helper.make_node("Cast", [name], [f"low.{i}"], f"down.{i}", to=HALF))
    found = check(model)
    assert found.status == "not proved" and "rounds a value that should stay float32" in found.detail


def test_a_computation_that_is_another_one() -> None:
    model = scaled()
    node = next(node for node in model.graph.node if node.op_type == "Relu")
    node.op_type = "Abs"
    found = check(model)
    assert found.status == "not proved" and "Abs of" in found.detail
