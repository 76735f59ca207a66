"""Sums by places: ONNX Runtime computes them as numpy does, in float16 and at equal places too."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from graphscale.exporters.export_report import make_runner
from graphscale.exporters.scattered_sums import rewrite_scattered_sums
from graphscale.files import saving

# The shape of the data, and that of the places, whose last axis has as many indices as they count axes of the data.
PLACES: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "rows": ((5, 3), (9, 1)),
    "rows by a matrix of places": ((5, 3), (4, 2, 1)),
    "numbers": ((7,), (20, 1)),
    "matrices": ((5, 2, 3), (9, 1)),
    "numbers of a matrix": ((3, 4), (30, 2)),
    "rows of matrices": ((3, 4, 2), (5, 6, 2)),
}
SUMS = {"add": np.add, "mul": np.multiply, "max": np.maximum, "min": np.minimum}


def write(tmp_path: Any, operator: str, operands: list[np.ndarray[Any, Any]], reduction: str, is_free: bool) -> Any:
    """Write a model of one node; return its function."""
    inputs = [
        ir.val(name, ir.DataType.from_numpy(array.dtype), [name, *array.shape[1:]] if is_free else array.shape)
        for name, array in zip("xiu", operands, strict=True)
    ]
    node = ir.node(operator, inputs, attributes={"reduction": reduction}, name="node")
    node.outputs[0].name, node.outputs[0].dtype, node.outputs[0].shape = "y", inputs[0].dtype, inputs[0].shape
    graph = ir.Graph(inputs, node.outputs, nodes=[node], opset_imports={"": 18}, name="graph")
    model = ir.Model(graph, ir_version=9)
    rewrite_scattered_sums(model)
    saving.save(model, tmp_path / "model.onnx")
    return model, make_runner(tmp_path / "model.onnx")


@pytest.mark.parametrize("case", PLACES)
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_rows_are_added_by_their_places(case: str, dtype: Any, tmp_path: Any) -> None:
    shape, places = PLACES[case]
    draw = np.random.default_rng(0)
    index = draw.integers(0, shape[: places[-1]], places)
    index -= draw.integers(0, 2, places) * np.array(shape[: places[-1]])  # counted from the end
    # Whole numbers, which float16 adds exactly.
    data = draw.integers(-3, 4, shape).astype(dtype)
    updates = draw.integers(1, 3, (*places[:-1], *shape[places[-1] :])).astype(dtype)
    for name, ufunc in SUMS.items():
        wanted = data.copy()
        ufunc.at(wanted, tuple(np.moveaxis(index, -1, 0)), updates)
        for is_free in (False, True):
            model, run = write(tmp_path, "ScatterND", [data, index, updates], name, is_free)
            assert not [node for node in model.graph if node.op_type == "ScatterND"]
            (got,) = run({"x": data, "i": index, "u": updates}).values()
            assert got.dtype == dtype
            np.testing.assert_array_equal(got, wanted, name)


def test_single_numbers_are_added_in_float16(tmp_path: Any) -> None:
    data = np.zeros((2, 3), np.float16)
    updates = np.full((4, 3), 0.5, np.float16)
    index = np.array([[0, 1, 1], [0, 0, 1], [-1, 0, 1], [0, 0, 0]])
    _, run = write(tmp_path, "ScatterElements", [data, index, updates], "add", False)
    np.testing.assert_array_equal(run({"x": data, "i": index, "u": updates})["y"], [[1.5, 1.5, 0.5], [0.5, 0.5, 1.5]])


def test_no_sum_is_left_as_it_is(tmp_path: Any) -> None:
    operands = [np.zeros((3, 2), np.float16), np.array([[0], [2]]), np.ones((2, 2), np.float16)]
    model, _ = write(tmp_path, "ScatterND", operands, "none", False)
    assert [node.op_type for node in model.graph] == ["ScatterND"]
