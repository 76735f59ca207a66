"""The comparison of an exported step: it excuses numbers that rounding decides, and no others."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from graphscale.errors import ExportError
from graphscale.exporters.comparison import Comparison, OwnStep
from tests.conftest import Arrays

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


def compare(change: Any, *draws: Any, loss: Any = LOSS) -> Comparison:
    """Compare a step that makes a change with one that subtracts the update; a draw has another loss and update."""
    own = iter([(LOSS, UPDATE), *draws])

    def run(number: int, batch: Arrays, state: Arrays, gradients: Arrays) -> Arrays:
        found, update = next(own, (None, None))
        if update is None:
            raise ExportError("no other draw")
        return {"loss": found, "w.next": state["w"] - update}

    comparison = Comparison(adder(), OwnStep("JAX", run, {"w.next": "w"}, ["loss"]))
    feeds = {"change": np.asarray(change, np.float32), "given": np.asarray(loss, np.float32)}
    comparison.compare([feeds], {"w": W})
    return comparison


def flipped(*places: tuple[int, int]) -> Any:
    """The update in the other direction at some places."""
    update = UPDATE.copy()
    for place in places:
        update[place] *= -1
    return update


def test_a_number_that_rounding_decides_is_excused() -> None:
    change = -flipped((3, 4))
    found = compare(change, (LOSS, flipped()), (LOSS, flipped((3, 4))))
    assert found.notes == ["decided by rounding, in JAX as well: 1 of 512 numbers of w.next"]
    assert found.excused == {"w.next": (1, 512)} and found.errors == {"loss": 0.0}
    with pytest.raises(
        ExportError, match=r"another w\.next than JAX in step 1: off by 2\.0e\+00 of its largest change"
    ):
        compare(change, (LOSS, flipped((4, 3))))


@pytest.mark.parametrize("factor", [0, 1, -2, -1.001], ids=["none", "sign", "size", "a little"])
def test_a_wrong_update_is_refused_where_rounding_decides_one_number_of_it(factor: float) -> None:
    with pytest.raises(ExportError, match=r"another w\.next than"):
        compare(factor * UPDATE, (LOSS, flipped((3, 4))))


def test_numbers_that_rounding_decides_have_a_limit() -> None:
    change = -UPDATE
    change[3, 4] += 5 * UPDATE[3, 4]
    with pytest.raises(ExportError, match=r"4e\+00 is allowed"):
        compare(change, (LOSS, flipped((3, 4))))


def test_a_loss_is_never_excused() -> None:
    with pytest.raises(ExportError, match="another loss than JAX in step 1"):
        compare(-UPDATE, (np.float32(0.6), UPDATE), loss=0.6)


def test_a_draw_of_another_loss_does_not_count() -> None:
    with pytest.raises(ExportError, match=r"another w\.next than"):
        compare(-flipped((3, 4)), (np.float32(0.6), flipped((3, 4))))


def test_infinity_and_nan_are_other_numbers() -> None:
    for number in (np.inf, np.nan):
        change = -UPDATE
        change[3, 4] = number
        with pytest.raises(ExportError, match="off by inf"):
            compare(change, (LOSS, flipped((3, 4))))
