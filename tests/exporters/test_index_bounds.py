"""Bounds of indices: no float makes ONNX Runtime refuse a step, a negative index of the batch does."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from graphscale.errors import ExportError
from graphscale.exporters.tensorflow.index_bounds import bound_indices
from tests.conftest import Arrays

# Readings of `table` [3, 4] by `index`, a cast of `place`.
READS = {
    "an axis": "y = Gather <axis = 0> (table, index)",
    "the last axis": "y = Gather <axis = -1> (table, index)",
    "elements": "i = Reshape (index, column)\n y = GatherElements <axis = 0> (table, i)",
    "places": "i = Reshape (index, column)\n y = GatherND (table, i)",
    "places in a batch": "i = Reshape (index, column)\n y = GatherND <batch_dims = 1> (table, i)",
    "sums": "i = Reshape (index, column)\n y = ScatterElements <axis = 0, reduction = 'add'> (table, i, ones)",
}
PLACES = np.array([2, 0, 1], np.float32)


def step(read: str, kind: str = "int64", rows: str = "N", place: str = "Neg (p)") -> ir.Model:
    text = f"""
        <ir_version: 9, opset_import: ["" : 18]>
        step (float[3] p, float[{rows}, 4] table) => (y)
        <int64[2] column = {{3, 1}}, int64[1] flat = {{-1}}, float[3, 1] ones = {{1, 1, 1}}>
        {{
            place = {place}
            index = Cast <to = {7 if kind == "int64" else 6}> (place)
            {read.replace("'", '"')}
        }}
    """
    return ir.from_onnx_text(text)


def run(model: ir.Model, places: np.ndarray) -> np.ndarray:
    feeds: Arrays = {"p": -places, "table": np.arange(12, dtype=np.float32).reshape(3, 4)}
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    result: np.ndarray = session.run(None, feeds)[0]
    return result


# ONNX has GatherND of int64 alone.
READS_BY_KIND = [
    (name, kind) for name in READS for kind in ("int64", "int32") if kind == "int64" or "place" not in name
]


@pytest.mark.parametrize("rows", ["N", "3"])
@pytest.mark.parametrize(("name", "kind"), READS_BY_KIND)
def test_computed_indices_are_in_range_for_all_numbers(name: str, kind: str, rows: str) -> None:
    plain, bounded = step(READS[name], kind, rows), step(READS[name], kind, rows)
    bound_indices(bounded)
    for places in (PLACES, np.array([-1, 1, -2], np.float32)):
        np.testing.assert_array_equal(run(bounded, places), run(plain, places))
    for wrong in (np.nan, np.inf, -np.inf, 7, -9):
        places = np.array([0, wrong, 1], np.float32)
        assert np.isfinite(run(bounded, places)).all()
        with pytest.raises(Exception, match=r"(?i)out of|invalid ind"):
            run(plain, places)


@pytest.mark.parametrize("place", ["Identity (p)", "Reshape (p, flat)"])
@pytest.mark.parametrize(("name", "kind"), READS_BY_KIND)
def test_fed_indices_are_refused_where_they_are_negative(name: str, kind: str, place: str) -> None:
    plain, bounded = step(READS[name], kind, place=place), step(READS[name], kind, place=place)
    bound_indices(bounded)
    np.testing.assert_array_equal(run(bounded, -PLACES), run(plain, -PLACES))
    assert np.isfinite(run(plain, np.array([0, 1, 0], np.float32))).all(), "ONNX counts from the end"
    for wrong in (-1, -3, -9, 7):
        with pytest.raises(Exception, match=r"(?i)out of|invalid ind"):
            run(bounded, -np.array([0, wrong, 1], np.float32))


def test_constant_indices_and_those_of_shapes_stay() -> None:
    for read in ("y = Gather (table, flat)", "s = Shape (table)\n y = Gather (table, s)"):
        model = step(read)
        count = len(model.graph)
        bound_indices(model)
        assert len(model.graph) == count, read


def test_an_index_into_axes_that_are_not_known_is_refused() -> None:
    with pytest.raises(ExportError, match="GatherND by computed indices, has operands of unknown shapes"):
        bound_indices(step("s = NonZero (table)\n i = Expand (index, s)\n y = GatherND (table, i)"))
