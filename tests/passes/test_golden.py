"""Each pass's work as text: golden/PASS/CASE.before.onnxtxt becomes golden/PASS/CASE.after.onnxtxt.

After a wanted change: `UPDATE_GOLDEN=1 python -m pytest tests/passes/test_golden.py`, and read the difference.
"""

from __future__ import annotations

import os
from pathlib import Path

import onnx
import onnx.parser
import onnx.printer
import onnx_ir as ir
import pytest

from graphscale.graph.builder import PASS_KEY
from graphscale.graph.original import ORIGINAL_KEY
from tests.passes.cases import CASES, Case

pytestmark = pytest.mark.static

GOLDEN = Path(__file__).parent / "golden"


def text_of(model: ir.Model) -> str:
    """A model in ONNX's text form, without the types of intermediate values, and without what it takes to strip it."""
    proto = ir.serde.serialize_model(model)
    kept = [entry for entry in proto.metadata_props if entry.key != ORIGINAL_KEY]
    del proto.metadata_props[:]
    proto.metadata_props.extend(kept)
    del proto.graph.value_info[:]
    for function in proto.functions:
        del function.value_info[:]
    return onnx.printer.to_text(proto).rstrip() + "\n"


def compare(path: Path, model: ir.Model) -> None:
    text = text_of(model)
    if os.environ.get("UPDATE_GOLDEN"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    # Through the parser, so that another version of ONNX may print in another way.
    expected = onnx.printer.to_text(onnx.parser.parse_model(path.read_text(encoding="utf-8")))
    assert onnx.printer.to_text(onnx.parser.parse_model(text)) == expected


def before(case: Case) -> ir.Model:
    model = ir.serde.deserialize_model(case.graph())
    for earlier in case.passes()[0]:
        earlier(model)
    return model


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_before_and_after(case: Case) -> None:
    """As the texts have it; in place, each new node with the name of the pass; and valid, with types as inferred."""
    model = before(case)
    compare(GOLDEN / f"{case.name}.before.onnxtxt", model)
    graph, nodes, inputs = model.graph, list(model.graph), list(model.graph.inputs)
    result = case.passes()[1](model)
    assert result.modified
    compare(GOLDEN / f"{case.name}.after.onnxtxt", model)
    assert result.model is model
    assert model.graph is graph
    assert list(graph.inputs)[: len(inputs)] == inputs
    name = case.name.partition("/")[0]
    gone, added = (set(nodes) - set(graph), set(graph) - set(nodes))
    assert [node.op_type for node in gone] == {"lower-optimizers": ["Momentum"], "split-gemm": ["Gemm", "Gemm"]}.get(
        name, []
    )
    assert {node.metadata_props[PASS_KEY] for node in added} <= {name}
    proto = ir.serde.serialize_model(model)
    onnx.checker.check_model(proto)
    onnx.shape_inference.infer_shapes(proto, check_type=True, strict_mode="com.microsoft" not in model.opset_imports)


def test_no_text_without_a_case() -> None:
    names = {path.relative_to(GOLDEN).as_posix() for path in GOLDEN.rglob("*") if path.is_file()}
    assert names == {f"{case.name}.{when}.onnxtxt" for case in CASES for when in ("before", "after")}
