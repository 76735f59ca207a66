"""Forward graphs that `generate_artifacts` rewrites before it differentiates them, and operators that few can run."""

from __future__ import annotations

# By a name: the opset, the inputs, the nodes that compute `y`, and the constants.
Pattern = tuple[int, str, str, str]

PATTERNS: dict[str, Pattern] = {
    "Gelu spelled out": (
        17,
        "float[2,4] x",
        "h = Div(x, root) e = Erf(h) o = Add(e, one) p = Mul(x, o) y = Mul(p, half)",
        "float root = {1.4142135}, float one = {1.0}, float half = {0.5}",
    ),
    "BiasGelu spelled out": (
        17,
        "float[2,4] x, float[4] b",
        "s = Add(x, b) h = Div(s, root) e = Erf(h) o = Add(e, one) p = Mul(s, o) y = Mul(p, half)",
        "float root = {1.4142135}, float one = {1.0}, float half = {0.5}",
    ),
    "FastGelu spelled out": (
        17,
        "float[2,4] x",
        "a = Pow(x, three) b = Mul(a, c) d = Add(x, b) e = Mul(d, s) f = Tanh(e) g = Add(f, one) h = Mul(x, half) "
        "y = Mul(h, g)",
        "float three = {3.0}, float c = {0.044715}, float s = {0.7978845834732056}, float one = {1.0}, "
        "float half = {0.5}",
    ),
    "QuickGelu spelled out": (17, "float[2,4] x", "a = Mul(x, s) b = Sigmoid(a) y = Mul(x, b)", "float s = {1.702}"),
    "LayerNormalization spelled out": (
        17,
        "float[2,3,4] x, float[4] w, float[4] b",
        "m = ReduceMean<axes=[-1]>(x) d = Sub(x, m) p = Pow(d, two) v = ReduceMean<axes=[-1]>(p) e = Add(v, eps) "
        "r = Sqrt(e) n = Div(d, r) s = Mul(n, w) y = Add(s, b)",
        "float two = {2.0}, float eps = {0.00001}",
    ),
    "RMSNorm spelled out": (
        17,
        "float[2,3,4] x, float[4] w",
        "p = Pow(x, two) v = ReduceMean<axes=[-1]>(p) e = Add(v, eps) r = Sqrt(e) n = Div(x, r) y = Mul(n, w)",
        "float two = {2.0}, float eps = {0.00001}",
    ),
    "QuantizeLinear, DequantizeLinear": (
        17,
        "float[2,4] x",
        "q = QuantizeLinear(x, s, z) y = DequantizeLinear(q, s, z)",
        "float s = {0.1}, uint8 z = {128}",
    ),
    "IsInf, ReduceSum": (
        17,
        "float[2,4] x",
        "i = IsInf(x) c = Cast<to=1>(i) r = ReduceSum<keepdims=0>(c) g = Greater(r, zero) k = Cast<to=1>(g) "
        "y = Mul(x, k)",
        "float zero = {0.0}",
    ),
    "a sum of quotients": (
        17,
        "float[2,4] a, float[2,4] b",
        "p = Div(a, s) q = Div(b, t) y = Add(p, q)",
        "float s = {2.0}, float t = {3.0}",
    ),
    "Gather of a range": (
        17,
        "float[2,6] x",
        "r = Range(s, e, o) y = Gather<axis=1>(x, r)",
        "int64 s = {1}, int64 e = {4}, int64 o = {1}",
    ),
    "MatMulBnb4": (
        17,
        "float[2,32] x, uint8[512] w",
        "y = com.microsoft.MatMulBnb4<K=32, N=32, block_size=32, quant_type=1, training_mode=1>(x, w, s)",
        f"float[32] s = {{{', '.join(['1.0'] * 32)}}}",
    ),
    "MegatronF": (17, "float[2,4] x", "y = com.microsoft.MegatronF(x)", ""),
    "MegatronG": (17, "float[2,4] x", "y = com.microsoft.MegatronG(x)", ""),
    "Recv": (
        17,
        "bool s, int64 r, float[2,4] x",
        "z, q = com.microsoft.Recv<tag=1, element_types=[1]>(s, r) y = Mul(x, q)",
        "",
    ),
    "Send": (
        17,
        "bool s, int64 r, float[2,4] x",
        "z = com.microsoft.Send<tag=1, element_types=[1]>(s, r, x) y = Neg(x)",
        "",
    ),
    "PythonOp": (
        17,
        "float[2,4] x",
        'c, y = com.microsoft.PythonOp<func_name="a.b", input_convention="d", input_tensor_types=[1], '
        "input_tensor_ranks=[2], output_tensor_types=[1], output_tensor_ranks=[2], input_requires_grads=[1], "
        "safe_run_mode=1>(x)",
        "",
    ),
}
