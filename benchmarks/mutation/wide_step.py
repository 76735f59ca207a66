"""A step whose weights are large enough for every lowering pass, written down without shapes of its values."""

from __future__ import annotations

import onnx
import onnx.parser
import onnx_ir as ir

__all__ = ["wide_step"]

# SGD on one layer, momentum on the other, and a metric aside.
_TEXT = """
<ir_version: 8, opset_import: ["": 17]>
step (float[8, 128] x, float[8, 20] y, float[128, WIDTH] w1, float[WIDTH] b1, float[WIDTH, 20] w2, float[20] b2,
      float[WIDTH, 20] m2)
  => (float loss, float largest, float[128, WIDTH] w1_new, float[WIDTH] b1_new, float[WIDTH, 20] w2_new,
      float[20] b2_new, float[WIDTH, 20] m2_new)
  <float rate = {0.1}, float beta = {0.9}, float share = {0.0125}, int64[1] rows = {0}, float zero = {0.0}>
{
  hidden = MatMul(x, w1)
  shifted = Add(hidden, b1)
  active = Relu(shifted)
  scores = MatMul(active, w2)
  answer = Add(scores, b2)
  error = Sub(answer, y)
  square = Mul(error, error)
  loss = ReduceMean <keepdims = 0> (square)
  largest = ReduceMax <keepdims = 0> (square)
  d_answer = Mul(error, share)
  active_t = Transpose <perm = [1, 0]> (active)
  g_w2 = MatMul(active_t, d_answer)
  g_b2 = ReduceSum <keepdims = 0> (d_answer, rows)
  w2_t = Transpose <perm = [1, 0]> (w2)
  d_active = MatMul(d_answer, w2_t)
  is_on = Greater(shifted, zero)
  on = Cast <to = 1> (is_on)
  d_hidden = Mul(d_active, on)
  x_t = Transpose <perm = [1, 0]> (x)
  g_w1 = MatMul(x_t, d_hidden)
  g_b1 = ReduceSum <keepdims = 0> (d_hidden, rows)
  s_w1 = Mul(g_w1, rate)
  w1_new = Sub(w1, s_w1)
  s_b1 = Mul(g_b1, rate)
  b1_new = Sub(b1, s_b1)
  m2_kept = Mul(m2, beta)
  m2_new = Add(m2_kept, g_w2)
  s_w2 = Mul(m2_new, rate)
  w2_new = Sub(w2, s_w2)
  s_b2 = Mul(g_b2, rate)
  b2_new = Sub(b2, s_b2)
}
"""


def wide_step(width: int = 512) -> ir.Model:
    """Return the step, with a hidden layer of some width; with 96, its states are too small for a branch."""
    return ir.from_proto(onnx.parser.parse_model(_TEXT.replace("WIDTH", str(width))))
