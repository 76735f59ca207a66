"""Outputs of an exported step."""

from __future__ import annotations

import onnx.parser
import onnx_ir as ir
import pytest

from graphscale.exporters.step_file import remove_outputs

pytestmark = pytest.mark.static

STEP = """<ir_version: 8, opset_import: ["" : 17]>
step (float[2] w) => (float[2] loss, float[2] w_gradient, float[2] w_next) {
    loss = Neg(w)
    w_gradient = Exp(w)
    w_next = Sub(w, loss)
}"""


def test_an_output_is_removed_with_its_nodes() -> None:
    model = ir.from_proto(onnx.parser.parse_model(STEP))
    remove_outputs(model, ["w_gradient"])
    assert [value.name for value in model.graph.outputs] == ["loss", "w_next"]
    assert [node.op_type for node in model.graph] == ["Neg", "Sub"]
