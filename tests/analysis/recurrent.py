"""A recurrent network and its backpropagation through time, as Scan and as Loop, in ONNX's text form."""

from __future__ import annotations

import onnx

from tests.build import numbers, parse
from tests.expressions import nodes

# One step forward: from h_in and x_t to h_out. One step back: from dh to dh_prev, du and dv.
_FORWARD = nodes("z = x_t @ u + h_in @ v; h_out = Tanh(z); before = Identity(h_in); after = Identity(h_out)")
_BACKWARD = nodes("""
    slope = one - after_t * after_t
    dz = dh * slope
    du_out = du_in + x_t.T @ dz
    dv_out = dv_in + before_t.T @ dz
    dh_prev = dz @ v.T
""")
_SCAN = f"""
    last, befores, afters = Scan(h0, x) <num_scan_inputs = 1, body = forward
        (float[2,4] h_in, float[2,3] x_t) => (float[2,4] h_out, float[2,4] before, float[2,4] after)
        {{ {_FORWARD} }}>
    LOSS
    dh0, du, dv = Scan(dlast, no_du, no_dv, befores, afters, x)
        <num_scan_inputs = 3, scan_input_directions = [1, 1, 1], body = backward
        (float[2,4] dh, float[3,4] du_in, float[4,4] dv_in, float[2,4] before_t, float[2,4] after_t, float[2,3] x_t)
        => (float[2,4] dh_prev, float[3,4] du_out, float[4,4] dv_out)
        {{ {_BACKWARD} }}>
"""
_LOOP = f"""
    last, befores, afters = Loop(steps, go, h0) <body = forward
        (int64 i, bool more, float[2,4] h_in)
        => (bool more_out, float[2,4] h_out, float[2,4] before, float[2,4] after)
        {{ more_out = Identity(more) x_t = Gather<axis = 0>(x, i) {_FORWARD} }}>
    LOSS
    dh0, du, dv = Loop(steps, go, dlast, no_du, no_dv) <body = backward
        (int64 i, bool more, float[2,4] dh, float[3,4] du_in, float[4,4] dv_in)
        => (bool more_out, float[2,4] dh_prev, float[3,4] du_out, float[4,4] dv_out)
        {{
            more_out = Identity(more)
            j = Sub(final, i)
            x_t = Gather<axis = 0>(x, j)
            before_t = Gather<axis = 0>(befores, j)
            after_t = Gather<axis = 0>(afters, j)
            {_BACKWARD}
        }}>
"""
_LOSS = nodes("d = last - t; loss = ReduceMean(d * d, keepdims=0); dlast = d * two_over_n")
_ZEROS = {"initializers": "", "computed": nodes("no_du = ConstantOfShape(Shape(u)); no_dv = ConstantOfShape(Shape(v))")}


def recurrent_step(kind: str, zeros: str = "initializers", more: str = "", outputs: str = "") -> onnx.ModelProto:
    """Five steps of a recurrent network, the loss on the last; gradients of u, v and the first state.

    Args:
        kind: "Scan" or "Loop".
        zeros: origin of the sums of gradients: "initializers", or zeros that are "computed".
        more: nodes after the backward pass.
        outputs: more outputs.
    """
    body = {"Scan": _SCAN, "Loop": _LOOP}[kind].replace("LOSS", _LOSS)
    values = "float two_over_n = {0.25}, float one = {1}, int64 steps = {5}, int64 final = {4}, bool go = {1}"
    if zeros == "initializers":
        values += f", float[3,4] no_du = {numbers(12)}, float[4,4] no_dv = {numbers(16)}"
    return parse(f"""
        <ir_version: 10, opset_import: ["" : 20]>
        recurrent (float[5,2,3] x, float[2,4] t, float[2,4] h0, float[3,4] u, float[4,4] v)
            => (float loss, float[3,4] du, float[4,4] dv, float[2,4] dh0{", " + outputs if outputs else ""}) <{values}>
        {{ {_ZEROS[zeros]} {body} {more} }}
    """)
