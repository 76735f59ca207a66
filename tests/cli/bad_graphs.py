"""Training graphs that lead to refusals or questions, and graphs for refusals of wrong options."""

from __future__ import annotations

import onnx
import onnx_ir as ir

import graphscale as gs
from tests.build import BACKWARD, FORWARD, linear_step, parse, step

_SGD = """
    u1 = Mul(dw1, rate)
    w1_next = Sub(w1, u1)
    u2 = Mul(dw2, rate)
    w2_next = Sub(w2, u2)
"""
_NEXT = "float[4,5] w1_next, float[5,3] w2_next"


def sgd(more: str = "", inputs: str = "", outputs: str = "", constants: str = "") -> onnx.ModelProto:
    """The two-layer step with SGD inside."""
    return step(
        _SGD + more,
        inputs=inputs,
        outputs=", ".join(filter(None, [_NEXT, outputs])),
        constants=", ".join(filter(None, ["float rate = {0.1}", constants])),
    )


def inference() -> onnx.ModelProto:
    """A forward pass whose only output is a matrix."""
    return parse("""
        <ir_version: 10, opset_import: ["" : 20]>
        classify (float[8,4] x, float[4,5] w1, float[5,3] w2) => (float[8,3] p) {
            h = MatMul(x, w1)
            a = Tanh(h)
            y = MatMul(a, w2)
            p = Softmax(y)
        }
    """)


def inference_with_scalar() -> onnx.ModelProto:
    """An evaluation graph: predictions and their loss, no gradients."""
    return step(backward="", outputs="float[8,3] y")


def ambiguous_ema() -> onnx.ModelProto:
    """SGD, and the average of the old average and the new weight, one half of each."""
    nodes = """
        kept = Mul(half, ema)
        added = Mul(half, w1_next)
        ema_next = Add(kept, added)
    """
    return sgd(nodes, "float[4,5] ema", "float[4,5] ema_next", "float half = {0.5}")


def two_next_values() -> onnx.ModelProto:
    """A step down and a look-ahead step of the same weight, both outputs."""
    return sgd("w1_ahead = Sub(w1_next, u1)", outputs="float[4,5] w1_ahead")


def moment_without_decay() -> onnx.ModelProto:
    """Momentum with beta1 = 0: the next moment is the gradient, next to an optimizer."""
    nodes = """
        m_kept = Mul(beta1, m)
        m_next = Add(m_kept, dw1)
    """
    return sgd(nodes, "float[4,5] m", "float[4,5] m_next", "float beta1 = {0}")


def squared_moment_without_decay() -> onnx.ModelProto:
    """A second moment with beta2 = 0, folded: the squared gradient, which does not depend on its own input."""
    return sgd("squared = Mul(dw1, dw1)", "float[4,5] v", "float[4,5] squared")


def gradient_penalty() -> onnx.ModelProto:
    """The mean squared error of a linear map, and in its gradient that of sum(log cosh(d loss / d x)) too.

    The penalty's derivative is the tanh of a gradient: no scale of the loss comes out of that as a factor.
    """
    backward = """
        dy = Mul(d, two_over_n)
        wt = Transpose<perm = [1, 0]>(w)
        dx = MatMul(dy, wt)
        [penalty_slope] slope = Tanh(dx)
        [second_order] ddy = MatMul(slope, w)
        ddd = Mul(ddy, two_over_n)
        back = Add(dy, ddd)
        xt = Transpose<perm = [1, 0]>(x)
        through_y = MatMul(xt, back)
        slopet = Transpose<perm = [1, 0]>(slope)
        through_w = MatMul(slopet, dy)
        dw = Add(through_y, through_w)
    """
    return linear_step(backward=backward)


def unknown_operator() -> onnx.ModelProto:
    """A hand-written gradient kernel in the backward pass."""
    backward = BACKWARD.replace("dh = Mul(da, slope)", "[tanh_grad] dh = acme.FastTanhGrad(da, a)")
    return step(backward=backward, domains=["acme"])


def scaled() -> ir.Model | onnx.ModelProto:
    """A step that carries a loss scale already."""
    return gs.scale(step()).model


def scaled_without_metadata() -> onnx.ModelProto:
    """A scaled step without its metadata."""
    model = gs.scale(step()).model
    assert isinstance(model, onnx.ModelProto)
    del model.metadata_props[:]
    return model


def with_training_info() -> onnx.ModelProto:
    """A step that also describes its training in `training_info`."""
    model = step()
    info = model.training_info.add()
    info.algorithm.CopyFrom(model.graph)
    return model


def unsorted() -> onnx.ModelProto:
    """A step whose backward pass stands before its forward pass."""
    return step(forward=BACKWARD, backward=FORWARD)


def dangling_input() -> onnx.ModelProto:
    """A step with a node that reads a value which does not exist."""
    model = step()
    model.graph.node[0].input[0] = "ghost"
    return model


def dangling_output() -> onnx.ModelProto:
    """A step with an output that nothing computes."""
    return step(outputs="float[4,5] dw1, float[5,3] dw2, float[4,5] ghost")


def named_seed() -> onnx.ModelProto:
    """A step whose seed's node has a name."""
    return step(backward=BACKWARD.replace("dy = Mul", "[seed] dy = Mul"))
