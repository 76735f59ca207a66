"""The proof of a finite check, against the results of its runs."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from graphscale.checks.verification.finite_check import find_tested_values
from tests.build import parse
from tests.conftest import run_once

ZEROED = "s = ReduceSum<keepdims = 0>(z) n = IsNaN(s) ok = Not(n)"
# The nodes from a gradient g to the flag, and whether every NaN and infinity of g is noticed for certain.
CHECKS = {
    "zeroed-and-summed": (f"z = Mul(g, zero) {ZEROED}", True),
    "zero-on-the-left": (f"z = Mul(zero, g) {ZEROED}", True),
    "cast-first": (
        "h = Cast<to = 11>(g) z = Mul(h, wide) s = ReduceSum<keepdims = 0>(z) f = Cast<to = 1>(s) n = IsNaN(f) "
        "ok = Not(n)",
        True,
    ),
    "moved-first": (f"a = Transpose(g) b = Neg(a) z = Mul(b, zero) {ZEROED}", True),
    "of-a-sum-with-decay": (f"a = Add(g, one) z = Mul(a, zero) {ZEROED}", True),
    "nan-or-infinite": ("s = ReduceSum<keepdims = 0>(g) n = IsNaN(s) i = IsInf(s) bad = Or(n, i) ok = Not(bad)", True),
    "both-good": (
        "s = ReduceSum<keepdims = 0>(g) n = IsNaN(s) a = Not(n) i = IsInf(s) b = Not(i) ok = And(a, b)",
        True,
    ),
    "nan-alone": ("s = ReduceSum<keepdims = 0>(g) n = IsNaN(s) ok = Not(n)", False),
    "one-infinity-alone": (
        "s = ReduceSum<keepdims = 0>(g) n = IsNaN(s) i = IsInf<detect_negative = 0>(s) bad = Or(n, i) ok = Not(bad)",
        False,
    ),
    "either-good": (
        "s = ReduceSum<keepdims = 0>(g) n = IsNaN(s) a = Not(n) i = IsInf(s) b = Not(i) ok = Or(a, b)",
        False,
    ),
    "inverted": ("z = Mul(g, zero) s = ReduceSum<keepdims = 0>(z) ok = IsNaN(s)", False),
    "clipped": (f"c = Clip(g, low, high) z = Mul(c, zero) {ZEROED}", False),
    "one-element": (f"c = Slice(g, at, to) z = Mul(c, zero) {ZEROED}", False),
    "through-an-integer": (f"c = Cast<to = 7>(g) d = Cast<to = 1>(c) z = Mul(d, zero) {ZEROED}", False),
    "times-one": (f"z = Mul(g, one) {ZEROED}", False),
    "repeated": (f"t = Constant<value_ints = [2]>() c = Tile(g, t) z = Mul(c, zero) {ZEROED}", True),
    "repeated-not-once": (f"t = Constant<value_ints = [0]>() c = Tile(g, t) z = Mul(c, zero) {ZEROED}", False),
    "expanded": (
        f"a = Unsqueeze(g, axis) t = Constant<value_ints = [3, 1]>() c = Expand(a, t) z = Mul(c, zero) {ZEROED}",
        True,
    ),
    "expanded-by-a-joined-shape": (
        f"a = Unsqueeze(g, axis) t = Concat<axis = 0>(to, axis) c = Expand(a, t) z = Mul(c, zero) {ZEROED}",
        True,
    ),
    "repeated-not-once-in-a-joined-shape": (
        "a = Unsqueeze(g, axis) u = Constant<value_ints = [1]>() t = Concat<axis = 0>(u, at) c = Tile(a, t) "
        f"z = Mul(c, zero) {ZEROED}",
        False,
    ),
    "as-int32": (f"c = Cast<to = 6>(g) d = Cast<to = 1>(c) z = Mul(d, zero) {ZEROED}", False),
    "dot-product": (f'c = Einsum<equation = "i,i->">(g, ones) z = Mul(c, zero) {ZEROED}', True),
    "diagonal": (
        "r = Unsqueeze(g, at) o = Unsqueeze(ones, at) m = Concat<axis = 0>(o, r, o) "
        f'c = Einsum<equation = "ii,i->">(m, ones) z = Mul(c, zero) {ZEROED}',
        False,
    ),
    "matrix-product": (f"c = MatMul(g, ones) z = Mul(c, zero) {ZEROED}", True),
    "matrix-product-with-zeros": ("z = MatMul(zeros, g) n = IsNaN(z) ok = Not(n)", True),
    "matrix-product-with-zeros-on-the-right": ("z = MatMul(g, zeros) n = IsNaN(z) ok = Not(n)", True),
    "dot-product-with-zeros": ('z = Einsum<equation = "i,i->">(g, zeros) n = IsNaN(z) ok = Not(n)', True),
    "matrix-product-with-some-zeros": ("z = MatMul(some, g) n = IsNaN(z) ok = Not(n)", False),
    "positive-part": (f"c = Relu(g) z = Mul(c, zero) {ZEROED}", False),
}
CONSTANTS = (
    "float[3] ones = {1, 1, 1}, float[3] zeros = {0, 0, 0}, float[3] some = {0, 1, 0}, int64[1] axis = {1}, "
    "float zero = {0}, double wide = {0}, float one = {1}, float low = {-9}, float high = {9}, int64[1] at = {0}, "
    "int64[1] to = {1}"
)


def checked(nodes: str) -> onnx.ModelProto:
    return parse(f'<ir_version: 10, opset_import: ["" : 18]> g (float[3] g) => (bool ok) <{CONSTANTS}> {{ {nodes} }}')


@pytest.mark.parametrize("case", CHECKS)
def test_what_is_proved(case: str) -> None:
    nodes, proved = CHECKS[case]
    model = checked(nodes)
    graph = ir.from_proto(model).graph
    assert (graph.inputs[0] in find_tested_values(graph.outputs[0])) == proved
    noticed = []
    for number in (np.nan, np.inf, -np.inf):
        for place in range(3):
            gradient = np.ones(3, np.float32)
            gradient[place] = number
            noticed.append(not run_once(model, {"g": gradient})[0]["ok"])
    finite = run_once(model, {"g": np.ones(3, np.float32)})[0]["ok"]
    assert (all(noticed) and bool(finite)) == proved


def test_the_kernel() -> None:
    model = parse(
        '<ir_version: 10, opset_import: ["" : 18, "com.microsoft" : 1]> g (float[3] g, float[3] h) => (bool ok)'
        " { ok = com.microsoft.IsAllFinite(g, h) }"
    )
    graph = ir.from_proto(model).graph
    assert find_tested_values(graph.outputs[0]) == set(graph.inputs)


@pytest.mark.parametrize("product", ["Mul", "MatMul"])
def test_nothing_is_noticed_of_a_product_with_an_empty_tensor(product: str) -> None:
    nodes = f"a = Unsqueeze(g, axis) e = Constant<value = float[1,0] {{}}>() c = {product}(a, e) z = Mul(c, zero)"
    graph = ir.from_proto(checked(f"{nodes} {ZEROED}")).graph
    assert graph.inputs[0] not in find_tested_values(graph.outputs[0])
