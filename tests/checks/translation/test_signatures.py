"""Signatures of nodes depend on their computations."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import external_data_helper as external
from onnx import numpy_helper
from onnx.parser import parse_model as parse

from graphscale.checks.translation.signatures import sign_nodes
from graphscale.files.model_files import load

pytestmark = pytest.mark.static

TEXT = """<ir_version: 10, opset_import: ["" : 20]> g (float[n] x) => (float[n] y)
{ p = Mul(empty, x) q = Add(p, x) y = Sub(x, w) }"""


def sign(folder: Path, *, outside: bool, content: float = 3, rows: int = 0) -> list[bytes]:
    """Return the signatures of a reader of an empty initializer, of its own reader, and of a reader of another one."""
    model = parse(TEXT)
    for name, tensor in (("empty", np.zeros((rows, 0))), ("w", np.full(2, content))):
        model.graph.initializer.append(numpy_helper.from_array(np.float32(tensor), name))
    if outside:
        external.convert_model_to_external_data(model, location="weights", size_threshold=0)
    onnx.save(model, folder / "model.onnx")
    return [*sign_nodes(load(folder / "model.onnx").graph).values()]


def test_an_initializer_is_the_same_in_another_file(tmp_path: Path) -> None:
    """An empty one has no bytes that could be mapped into memory."""
    assert sign(tmp_path, outside=True) == sign(tmp_path, outside=False)
    assert (tmp_path / "weights").stat().st_size == 8


def test_elements_and_shapes_count(tmp_path: Path) -> None:
    plain = sign(tmp_path, outside=False)
    other, shaped = sign(tmp_path, outside=False, content=4), sign(tmp_path, outside=False, rows=1)
    assert [a == b for a, b in zip(plain, other, strict=True)] == [True, True, False]
    assert [a == b for a, b in zip(plain, shaped, strict=True)] == [False, False, True]
