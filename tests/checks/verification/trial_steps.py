"""Steps for the trial of `scale`: a right one, penalties, a slow one; and the text of a trial."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

import graphscale as gs
from tests.build import parse

# A momentum step with a penalty towards fed weights, whose gradient is added to the update.
BEGIN = """<ir_version: 8, opset_import: ["" : 17]>
g (float[4,3] x, float[4,2] t, float[3,2] w, float[3,2] anchor{inputs}) => (float loss, float[3,2] w_next{outputs})
<float half = {{0.5}}, float n = {{0.25}}, float rate = {{0.1}}, int64[1] first = {{0}}>
{{
  y = MatMul(x, w)
  d = Sub(y, t)
  dd = Mul(d, d)
  fit = ReduceMean<keepdims=0>(dd)
  dy = Mul(d, n)
  xt = Transpose(x)
  gw = MatMul(xt, dy)
  u = Mul(gw, rate)
"""
PENALTY = """
  off = Sub(w, anchor)
  oo = Mul(off, off)
  far = ReduceSum<keepdims=0>(oo)
  pull = Mul(far, half)
  loss = Add(fit, pull)
"""
# Updates that add the gradient of the penalty to the weight.
BEHIND = {
    "behind the update": "  w1 = Sub(w, u)\n  p = Mul(off, rate)\n  w_next = Sub(w1, p)\n",
    "before the update": "  p = Mul(off, rate)\n  w1 = Sub(w, p)\n  w_next = Sub(w1, u)\n",
}
FREE = "  loss = Identity(fit)\n  w_next = Sub(w, u)\n"


def write(rest: str, inputs: str = "", outputs: str = "") -> onnx.ModelProto:
    return parse(BEGIN.format(inputs=inputs, outputs=outputs) + rest + "}")


def free() -> onnx.ModelProto:
    """A right step."""
    return write(FREE)


def tried(model: onnx.ModelProto, **options: Any) -> str:
    trial = gs.scale(model, trial=True, **options).report.trial
    assert trial is not None
    return trial


def node_of(model: onnx.ModelProto, output: str) -> onnx.NodeProto:
    return next(node for node in model.graph.node if output in node.output)


def give(model: onnx.ModelProto, output: str, op_type: str, *inputs: str, **attributes: Any) -> None:
    """Compute an output by another node."""
    node_of(model, output).CopyFrom(helper.make_node(op_type, inputs, [output], **attributes))


def slow(rounds: int) -> onnx.ModelProto:
    from fuzz.hostile.growth import _loop

    model = free()
    model.graph.initializer.append(numpy_helper.from_array(np.int64(rounds), "rounds"))
    model.graph.initializer.append(numpy_helper.from_array(np.asarray(True), "yes"))
    model.graph.initializer.append(numpy_helper.from_array(np.zeros((), np.float32), "zero"))
    model.graph.node.insert(8, _loop("slow", [helper.make_node("Neg", ["k"], ["k2"])], ["zero"], ["k"], ["k2"]))
    give(model, "loss", "Add", "fit", "slow0")
    return model
