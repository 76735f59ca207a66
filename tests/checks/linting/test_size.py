"""Large graphs: the work grows with the graph, and weights are not read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import graphscale as gs
from tests.checks.drawing.graphs import deep_network
from tests.counting import calls

pytestmark = pytest.mark.static


def damaged(model: ir.Model) -> ir.Model:
    """Every second gradient is not unscaled, and every second guard a constant."""
    for mark, operator in (("unscale-gradients", "Div"), ("guard-updates", "Where")):
        nodes = [n for n in model.graph if n.metadata_props.get("graphscale.pass") == mark and n.op_type == operator]
        for node in nodes[::2]:
            value = node.inputs[0] if operator == "Div" else node.inputs[1]
            assert value is not None
            if operator == "Div":
                node.outputs[0].replace_all_uses_with(value)
            else:
                node.replace_input_with(2, value)
    return model


@pytest.mark.full
@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["unscaled", "onnx", "ort-training", "damaged"])
def test_the_work_grows_with_the_graph(kind: str) -> None:
    costs = []
    for layers in (50, 200):
        model = ir.from_proto(deep_network(layers))
        if kind != "unscaled":
            scaled = gs.scale(model, target="onnx" if kind == "damaged" else kind).model
            assert isinstance(scaled, ir.Model)
            model = damaged(scaled) if kind == "damaged" else scaled
        costs.append(calls(lambda model=model: gs.lint(model)))  # type: ignore[misc]
    assert costs[1] < 5 * costs[0]


def test_weights_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = deep_network(2)
    for i in range(2):
        weight = onnx.helper.make_tensor(f"w{i}", onnx.TensorProto.FLOAT, [8, 8], np.zeros(64))
        weight.ClearField("float_data")
        weight.data_location = onnx.TensorProto.EXTERNAL
        for key, value in (("location", "weights.bin"), ("offset", str(256 * i)), ("length", "256")):
            weight.external_data.add(key=key, value=value)
        model.graph.initializer.append(weight)
    (tmp_path / "weights.bin").write_bytes(bytes(512))
    path = tmp_path / "deep.onnx"
    path.write_bytes(model.SerializeToString())
    gs.scale(path).save(tmp_path / "scaled.onnx")

    def refuse(self: ir.ExternalTensor, *arguments: Any) -> None:
        raise AssertionError(f"{self.name} was read")

    for method in ("numpy", "tobytes", "_load", "__array__"):
        monkeypatch.setattr(ir.ExternalTensor, method, refuse)
    for file in (path, tmp_path / "scaled.onnx"):
        assert gs.lint(file).findings == ()
