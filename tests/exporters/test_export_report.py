"""The comparison of an exported step: it excuses numbers that rounding decides, and no others."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from graphscale.errors import ExportError
from graphscale.exporters.export_report import compare_steps

pytest.importorskip("onnxruntime", reason="needs onnxruntime")

RNG = np.random.default_rng(0)
W = RNG.normal(size=(16, 32), scale=0.25).astype(np.float32)
UPDATE = np.where(RNG.normal(size=W.shape) > 0, 0.01, -0.01).astype(np.float32)
LOSS = np.float32(0.5)


def adder() -> ir.Model:
    """A step whose loss is an input, and whose weights change by one."""
    names = {"change": W.shape, "given": (), "w": W.shape}
    change, given, w = (
        ir.Value(name=name, type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(shape))
        for name, shape in names.items()
    )
    nodes = [ir.node("Add", [w, change]), ir.node("Identity", [given])]
    for node, name, value in zip(nodes, ("w.next", "loss"), (w, given), strict=True):
        node.outputs[0].name, node.outputs[0].type, node.outputs[0].shape = name, value.type, value.shape
    outputs = [node.outputs[0] for node in nodes]
    graph = ir.Graph([change, given, w], outputs, nodes=nodes, opset_imports={"": 21}, name="step")
    return ir.Model(graph, ir_version=10)


def compare(change: Any, *draws: Any, loss: Any = LOSS) -> float:
    """Compare a step that makes a change with one that subtracts the update; a draw has other weights."""
    expected = [{"loss": LOSS, "w.next": W - UPDATE}]
    drawn = [[{"loss": value, "w.next": weights}] for value, weights in draws]
    feeds = {"change": np.asarray(change, np.float32), "given": np.asarray(loss, np.float32)}
    errors = compare_steps(adder(), feeds, {"w": W}, {"w.next": "w"}, expected, ["loss"], drawn)
    return errors["w.next"]


def flipped(*places: tuple[int, int]) -> Any:
    """Weights with the update in the other direction at some places."""
    weights = W - UPDATE
    for place in places:
        weights[place] = W[place] + UPDATE[place]
    return weights


def test_a_number_that_rounding_decides_is_excused() -> None:
    change = -UPDATE
    change[3, 4] *= -1
    assert compare(change, (LOSS, flipped()), (LOSS, flipped((3, 4)))) > 1e-2
    with pytest.raises(ExportError, match=r"another w\.next than the framework in step 1: off by 2\.0e-02"):
        compare(change, (LOSS, flipped((4, 3))))


@pytest.mark.parametrize("factor", [0, 1, -2], ids=["none", "sign", "size"])
def test_a_wrong_update_is_refused_where_rounding_decides_one_number_of_it(factor: float) -> None:
    with pytest.raises(ExportError, match=r"another w\.next than"):
        compare(factor * UPDATE, (LOSS, flipped((3, 4))))


def test_numbers_that_rounding_decides_have_a_limit() -> None:
    change = -UPDATE
    change[3, 4] += 5 * UPDATE[3, 4]
    with pytest.raises(ExportError, match=r"4e-02 is allowed"):
        compare(change, (LOSS, flipped((3, 4))))


def test_a_loss_of_the_first_step_is_never_excused() -> None:
    with pytest.raises(ExportError, match="another loss than the framework in step 1"):
        compare(-UPDATE, (np.float32(0.6), flipped()), loss=0.6)


def test_a_draw_of_another_loss_does_not_count() -> None:
    change = -UPDATE
    change[3, 4] *= -1
    with pytest.raises(ExportError, match=r"another w\.next than"):
        compare(change, (np.float32(0.6), flipped((3, 4))))


def test_infinity_and_nan_are_other_numbers() -> None:
    for number in (np.inf, np.nan):
        change = -UPDATE
        change[3, 4] = number
        with pytest.raises(ExportError, match="off by inf"):
            compare(change, (LOSS, flipped((3, 4))))
