"""Pieces of steps with a loss scale of their own."""

from __future__ import annotations

import onnx
import onnx_ir as ir

from graphscale.analysis.own_scale import OwnScale, find_own_scale
from models.zoo import pack
from tests.build import BACKWARD, step

SCALED = BACKWARD.replace("dy = Mul(d, two_over_n)", "dy0 = Mul(d, two_over_n) dy = Mul(dy0, scale)")
UNSCALE = "g1 = Div(dw1, scale) g2 = Div(dw2, scale)"
NORM = "s1 = ReduceSumSquare<keepdims = 0>({0}1) s2 = ReduceSumSquare<keepdims = 0>({0}2) ss = Add(s1, s2) n = Sqrt(ss)"
TEST = f"{NORM} bad1 = IsInf(n) bad2 = IsNaN(n) bad = Or(bad1, bad2) ok = Not(bad)"
SGD = "u1 = Mul(rate, g1) u2 = Mul(rate, g2) v1 = Sub(w1, u1) v2 = Sub(w2, u2)"
GUARD = "w1_next = Where(ok, v1, w1) w2_next = Where(ok, v2, w2)"
RULE = """
    more = Add(good, one) full = GreaterOrEqual(more, period) double = Mul(scale, two) half = Mul(scale, point5)
    grown = Where(full, double, scale) scale_next = Where(ok, grown, half)
    reset = Where(full, zero, more) good_next = Where(ok, reset, zero)
"""
NUMBERS = "float rate = {0.1}, float two = {2}, float point5 = {0.5}, float zero = {0}, float period = {2000}"
WEIGHTS = "float[4,5] w1_next, float[5,3] w2_next"
CARRIED = "float scale, float good"


def brought(
    *more: str, inputs: str = CARRIED, outputs: str = "float scale_next, float good_next", **options: str
) -> onnx.ModelProto:
    """A step with `scale` on its seed; `more` divides it out again."""
    constants = f"{NUMBERS}, {options.pop('constants')}" if "constants" in options else NUMBERS
    outputs = f"{WEIGHTS}, {outputs}" if outputs else WEIGHTS
    options = {"backward": SCALED, **options}
    return step("\n".join(more), inputs=inputs, outputs=outputs, constants=constants, **options)  # type: ignore[arg-type]


def fed(*more: str, inputs: str = "float scale", **options: str) -> onnx.ModelProto:
    """A step whose seed is multiplied by the input `scale`, without an update rule."""
    return brought(*more, "w1_next = Identity(v1) w2_next = Identity(v2)", inputs=inputs, outputs="", **options)


def find(model: onnx.ModelProto) -> OwnScale | None:
    return find_own_scale(ir.from_proto(model).graph)


def with_constant(model: onnx.ModelProto, **numbers: float) -> onnx.ModelProto:
    """Store numbers in place of inputs."""
    for name, number in numbers.items():
        value = next((value for value in model.graph.input if value.name == name), None)
        if value is not None:
            model.graph.input.remove(value)
        model.graph.initializer.append(onnx.helper.make_tensor(name, onnx.TensorProto.FLOAT, [], [number]))
    return model


def keras_with_scaled_loss() -> onnx.ModelProto:
    """The packed step of Keras's LossScaleOptimizer, whose script does not scale the loss, with `scale_loss`."""
    model = onnx.load_from_string(pack.read("keras-loss-scale.momentum")[0])
    scale = next(value.name for value in model.graph.input if value.name.endswith("dynamic_scale"))
    index, node = next((i, node) for i, node in enumerate(model.graph.node) if "div_out_1" in node.output)
    node.output[0] = "unscaled_seed"
    model.graph.node.insert(index + 1, onnx.helper.make_node("Mul", ["unscaled_seed", scale], ["div_out_1"]))
    return model


ROUNDS = """
    sum1, sum2 = Loop(rounds, yes, zeros1, zeros2) <body = round (int64 i, bool c, float[4,5] in1, float[5,3] in2)
        => (bool c2, float[4,5] out1, float[5,3] out2) {
            c2 = Identity(c) wide = Mul(dh, scale) p1 = MatMul(xt, wide) out1 = Add(in1, p1)
            wide2 = Mul(dy, scale) p2 = MatMul(at, wide2) out2 = Add(in2, p2)
        }
    >
    g1 = Div(sum1, scale) g2 = Div(sum2, scale)
"""
ROUND_CONSTANTS = (
    f"int64 rounds = {{2}}, bool yes = {{1}}, float[4,5] zeros1 = {{{', '.join('0' * 20)}}}, "
    f"float[5,3] zeros2 = {{{', '.join('0' * 15)}}}"
)
