"""Backward passes that compute activations from other values than the forward pass: implicit and reversible layers."""

from __future__ import annotations

import onnx
import pytest

import graphscale as gs
from graphscale.errors import SeedNotFoundError
from tests.build import assert_same_step, feeds_for, parse
from tests.cases.steps import assert_enters
from tests.expressions import nodes

CONSTANTS = "float one = {1}, float half = {0.5}, float k = {0.0625}, float rate = {0.125}"

# A step of each kind: its weights, its nodes, its activations, and values of its backward pass.
STEPS = {
    # One more step of the fixed point, and the cotangent through it alone.
    "implicit, sigmoid": (
        "float[4,4] w, float[4] b",
        """
        z = Sigmoid(x @ w + b); d = z - t; loss = ReduceMean(d * d, keepdims=0); g = d * k
        h = Sigmoid(Gemm(z, w, b) + x); v = g * (h * (one - h)); dw = z.T @ v; db = ReduceSum(v, axis, keepdims=0)
        w_next = w - dw * rate; b_next = b - db * rate
        """,
        ("z", "d", "h"),
        ("v", "dw", "db"),
    ),
    "implicit, a kink": (
        "float[4,4] w",
        """
        z = Relu(x @ w); d = z - t; loss = ReduceMean(d * d, keepdims=0); g = d * k
        p = z @ w + x; v = Where(Greater(p, zero), g, zero); dw = z.T @ v; w_next = w - dw * rate
        """,
        ("z", "d", "p"),
        ("v", "dw"),
    ),
    # The linear system of the cotangent by two steps of its own fixed point.
    "implicit, solved": (
        "float[4,4] w",
        """
        z = Tanh(x @ w); d = z - t; loss = ReduceMean(d * d, keepdims=0); g = d * k
        h = Tanh(z @ w + x); s = one - h * h
        u1 = g + (g * s) @ w.T; u2 = g + (u1 * s) @ w.T; dw = z.T @ (u2 * s); w_next = w - dw * rate
        """,
        ("z", "d", "h", "s"),
        ("u1", "u2", "dw"),
    ),
    # The cotangent of a differential equation: the state is integrated in reversed time.
    "adjoint": (
        "float[4,4] w",
        """
        z1 = x + half * Tanh(x @ w); z2 = z1 + half * Tanh(z1 @ w); d = z2 - t; loss = ReduceMean(d * d, keepdims=0)
        a2 = d * k; h2 = Tanh(z2 @ w); q2 = (a2 * (one - h2 * h2)) * half; y1 = z2 - half * h2; a1 = a2 + q2 @ w.T
        h1 = Tanh(y1 @ w); q1 = (a1 * (one - h1 * h1)) * half; y0 = y1 - half * h1
        dw = y1.T @ q2 + y0.T @ q1; w_next = w - dw * rate
        """,
        ("z1", "z2", "h2", "y1", "h1", "y0"),
        ("q2", "a1", "q1", "dw"),
    ),
    "reversible, kinks": (
        "float[4,4] f, float[4,4] g, float[4,4] p",
        """
        x2 = x * half; y1 = x + Relu(x2 @ f); y2 = x2 + Relu(y1 @ g); y3 = y1 + Relu(y2 @ p)
        d = y3 - t; loss = ReduceMean(d * d, keepdims=0);
        c3 = d * k; m3 = Cast(Greater(y2 @ p, zero), to=1); e3 = c3 * m3; dp = y2.T @ e3; c2 = e3 @ p.T
        r1 = y3 - Relu(y2 @ p); n2 = r1 @ g; r2 = y2 - Relu(n2); e2 = c2 * Cast(Greater(n2, zero), to=1); dg = r1.T @ e2
        c1 = c3 + e2 @ g.T; n1 = r2 @ f; e1 = c1 * Cast(Greater(n1, zero), to=1); df = r2.T @ e1
        f_next = f - df * rate; g_next = g - dg * rate; p_next = p - dp * rate
        """,
        ("y3", "r1", "n2", "r2", "n1"),
        ("dp", "c2", "dg", "c1", "df"),
    ),
    # Couplings with a factor, as in normalizing flows.
    "reversible, factors": (
        "float[4,4] f, float[4,4] g, float[4,4] s",
        """
        y1 = x * Exp(Tanh(t @ f)); y2 = t + Tanh(y1 @ g); y3 = y1 + Tanh(y2 @ s)
        e = y3 - half; loss = ReduceMean(e * e, keepdims=0)
        c3 = e * k; h3 = Tanh(y2 @ s); q3 = c3 * (one - h3 * h3); ds = y2.T @ q3; c2 = q3 @ s.T; r1 = y3 - h3
        h2 = Tanh(r1 @ g); q2 = c2 * (one - h2 * h2); dg = r1.T @ q2; c1 = c3 + q2 @ g.T; r2 = y2 - h2
        h1 = Tanh(r2 @ f); q1 = (c1 * r1) * (one - h1 * h1); df = r2.T @ q1
        f_next = f - df * rate; g_next = g - dg * rate; s_next = s - ds * rate
        """,
        ("y3", "h3", "r1", "h2", "r2", "h1"),
        ("ds", "c2", "dg", "c1", "df"),
    ),
}


def step(weights: str, text: str) -> onnx.ModelProto:
    nexts = ", ".join(f"{weight}_next" for weight in weights.split(", "))
    return parse(f"""
        <ir_version: 10, opset_import: ["" : 20]>
        step (float[8,4] x, float[8,4] t, {weights}) => (float loss, {nexts})
        <{CONSTANTS}, float zero = {{0}}, int64[1] axis = {{0}}> {{ {nodes(text)} }}
    """)


@pytest.mark.parametrize("name", STEPS)
def test_a_reconstruction_is_no_backward_pass(name: str) -> None:
    weights, text, activations, backward = STEPS[name]
    model = step(weights, text)
    report = assert_same_step(model)
    assert (report.coverage, report.missed) == (1, ())
    assert len(report.gradients) == weights.count("float")
    assert_enters(model, feeds_for(model), activations, backward)
    assert gs.verify(model, gs.scale(model).model, runs=0).ok


def test_a_cotangent_that_is_squashed_is_no_reconstruction() -> None:
    """It leads to the rest by a non-linear function alone, but it reads a cotangent."""
    text = """
        h = Tanh(x @ f); d = h @ g - t; loss = ReduceMean(d * d, keepdims=0); dy = d * k; dg = h.T @ dy
        dh = Tanh(dy @ g.T); df = x.T @ (dh * (one - h * h)); f_next = f - df * rate; g_next = g - dg * rate
    """
    with pytest.raises(SeedNotFoundError, match="does not differentiate"):
        gs.inspect(step("float[4,4] f, float[4,4] g", text))


def test_a_bound_in_the_backward_pass_is_no_reconstruction() -> None:
    text = """
        h = Tanh(x @ f); d = h @ g - t; loss = ReduceMean(d * d, keepdims=0); dy = d * k; dg = h.T @ dy
        dh = Clip(dy @ g.T, zero, one); df = x.T @ (dh * (one - h * h)); f_next = f - df * rate; g_next = g - dg * rate
    """
    report = gs.inspect(step("float[4,4] f, float[4,4] g", text))
    assert (report.contractions, report.missed) == (3, ())
