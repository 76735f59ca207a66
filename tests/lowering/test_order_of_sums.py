"""The order in which ONNX Runtime forms the sums of operands: each while its operand is in the caches."""

from __future__ import annotations

import json
from pathlib import Path

import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

import graphscale as gs
from graphscale.graph.values import Use, operand_at
from graphscale.lowering.lower_model import lower_step
from graphscale.session.loading import open_model
from tests.build import feeds_for, step
from tests.conftest import Arrays, Level
from tests.lowering.test_small_gradients import COTANGENTS, HIDDEN_BACKWARD, inserted
from tests.session.plain import ALWAYS, options


@pytest.mark.parametrize("rate", ["rate", "1"])
def test_operands_are_summed_up_while_they_are_in_the_caches(rate: str, tmp_path: Path) -> None:
    """Of the forward pass, before the first cotangent; of the backward pass, before the first gradient is formed."""
    optimizer = " ".join(f"u{i} = Mul({rate}, dw{i}) w{i}_next = Sub(w{i}, u{i})" for i in (1, 2))
    optimizer = optimizer if rate == "rate" else "w1_next = Sub(w1, dw1) w2_next = Sub(w2, dw2)"
    model = step(
        optimizer,
        inputs="float rate" if rate == "rate" else "",
        outputs="float[4,5] w1_next, float[5,3] w2_next",
        backward=HIDDEN_BACKWARD.format(
            nodes=f"at = Transpose <perm = [1, 0]> (a) dw2 = MatMul(at, dy) {COTANGENTS['a product']}"
        ),
    )
    for node in model.graph.node:
        node.name = f"{node.output[0]}.node"
    model = onnx.shape_inference.infer_shapes(model, strict_mode=True)
    result = gs.scale(model, gs.DynamicLossScale(1024.0, 3), updates={"w1_next": "w1", "w2_next": "w2"})
    scaled = open_model(result)[0].clone()
    lower_step(scaled, "cpu", ALWAYS)
    sums = {node.name: operand_at(Use(node, 0)).name for node in inserted(scaled.graph, "ReduceL1")}
    assert sorted(sums.values()) == ["a", "dh", "dy", "x"]
    ran = run_order(ir.to_proto(scaled), feeds_for(model), tmp_path)

    def first(start: str) -> int:
        """Fused nodes are called after those that they come from."""
        return next(i for i, name in enumerate(ran) if name.startswith(start))

    at = {operand: ran.index(name) for name, operand in sums.items()}
    assert at["x"] < at["a"] < first("dy.node")
    assert max(at["dy"], at["dh"]) < min(first("dw1.node"), first("dw2.node"))


def run_order(model: onnx.ModelProto, feeds: Arrays, folder: Path) -> list[str]:
    """The nodes of one run, as they began."""
    made = options(Level.ORT_ENABLE_ALL)
    made.enable_profiling, made.profile_file_prefix = True, str(folder / "run")
    session = ort.InferenceSession(model.SerializeToString(), made, providers=["CPUExecutionProvider"])
    first = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    session.run(None, {value.name: feeds.get(value.name, first.get(value.name)) for value in session.get_inputs()})
    events = json.loads(Path(session.end_profiling()).read_text(encoding="utf-8"))
    kernels = [event for event in events if event["name"].endswith("_kernel_time")]
    return [event["name"].removesuffix("_kernel_time") for event in sorted(kernels, key=lambda event: event["ts"])]
