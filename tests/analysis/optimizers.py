"""Optimizers on the gradients dw1 and dw2 of `tests.build.step`, in ONNX's text form."""

from __future__ import annotations

from tests.expressions import nodes

NUMBERS = """
    float rate = {0.1}, float decay = {0.002}, float keep = {0.9999}, float zero = {0}, float low = {-0.01},
    float high = {0.01}, float max_norm = {0.25}, float epsilon = {1e-6},
    float beta1 = {0.9}, float rest1 = {0.1}, float beta2 = {0.99}, float rest2 = {0.01}
"""
NEXT = "float[4,5] w1_next, float[5,3] w2_next"

# From g1 and g2.
SGD = nodes("w1_next = w1 - g1 * rate; w2_next = w2 - g2 * rate")

CLIP_BY_NORM = nodes("""
    norm = Sqrt(ReduceSum(dw1 * dw1, keepdims=0) + ReduceSum(dw2 * dw2, keepdims=0))
    factor = Min(max_norm / norm, one)
    g1 = dw1 * factor
    g2 = dw2 * factor
""")

# Of w1 alone, with m, v and count.
MOMENTS = "float[4,5] m, float[4,5] v, float count"
NEXT_MOMENTS = "float[4,5] w1_next, float[4,5] m_next, float[4,5] v_next, float count_next"
ADAM = nodes("""
    count_next = count + one
    m_next = m * beta1 + dw1 * rest1
    v_next = v * beta2 + dw1 * dw1 * rest2
    m_hat = m_next / (one - beta1 ** count_next)
    v_hat = v_next / (one - beta2 ** count_next)
    w1_next = w1 - m_hat / (Sqrt(v_hat) + epsilon) * rate
""")
