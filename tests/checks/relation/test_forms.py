"""Spellings that the relation joins, and those that it must tell apart: both sides of each row are run."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import onnx.reference
import onnx_ir as ir
import pytest

from graphscale.checks.relation.relate import Relation

pytestmark = pytest.mark.static

INPUTS = "float[2,3] x, float[2,3] z, float[3,4] w, float[4] b, float16[2,3] h, bool f, float[] s, float[N,3] many"
CONSTANTS = {
    "one": np.array(1, np.float32),
    "ones": np.ones((2, 3), np.float32),
    "two": np.array(2, np.float32),
    "w0": np.arange(6, dtype=np.float32).reshape(3, 2),
    "half": np.array(0.5, np.float32),
    "twos": np.full((2, 3), 2, np.float32),
    "six": np.array(6, np.float32),
    "threehalves": np.array(1.5, np.float32),
    "flat_": np.array([-1], np.int64),
    "rest": np.array([-1, 3], np.int64),
    "three": np.array(3, np.float32),
    "third": np.array(1 / 3, np.float32),
    "yes": np.array(True),
    "axis": np.array([1], np.int64),
    "flat": np.array([6], np.int64),
    "turned": np.array([3, 2], np.int64),
    "square": np.array([2, 3], np.int64),
    "nowhere": np.array([0, -1, -1], np.int64),
    "size": np.array([2**15, 2**15], np.int64),
    "far": np.array([9], np.int64),
    "column": np.array([3, 1], np.int64),
    "zero_": np.array([0], np.int64),
    "one_": np.array([1], np.int64),
    "two_": np.array([2], np.int64),
    "row": np.array([1, 2, 3], np.float32),
    "nothing": np.array(0, np.float32),
    "none": np.array(-1, np.int64),
    "last": np.array(1, np.int64),
    "unit": np.array([2, 1, 3, 1], np.int64),
    "units": np.array([1, 2, 1, 3], np.int64),
    "odd": np.array([0, 1, 2, 0], np.int64),
    "even": np.array([1, 0, 0, 2], np.int64),
    "both": np.array([0, 2], np.int64),
    "more": np.array([1, 3], np.int64),
    "parts": np.array([1, 2], np.int64),
    "whole": np.array(1, np.int64),
}

SAME = {
    "a copy": ("y = Relu(x)", "t = Identity(x) y = Relu(t)"),
    "a sum of one": ("y = Relu(x)", "t = Sum(x) y = Relu(t)"),
    "a sum of two": ("y = Add(x, z)", "y = Sum(x, z)"),
    "another order": ("y = Add(x, z)", "y = Add(z, x)"),
    "a common subexpression": ("a = Relu(x) c = Relu(x) y = Add(a, c)", "a = Relu(x) y = Add(a, a)"),
    "a default attribute": ("y = Softmax(x)", "y = Softmax<axis=-1>(x)"),
    "a cast to the same type": ("y = Relu(x)", "t = Cast<to=1>(x) y = Relu(t)"),
    "a cast there and back": ("y = Relu(h)", "a = Cast<to=1>(h) c = Cast<to=10>(a) y = Relu(c)"),
    "a cast like another": ("y = Cast<to=10>(x)", "y = CastLike(x, h)"),
    "a known selection": ("y = Relu(x)", "t = Where(yes, x, z) y = Relu(t)"),
    "a selection of equals": ("y = Relu(x)", "t = Where(f, x, x) y = Relu(t)"),
    "a negated selection": ("y = Where(f, x, z)", "c = Not(f) y = Where(c, z, x)"),
    "two negations": ("y = Where(f, x, z)", "a = Not(f) c = Not(a) y = Where(c, x, z)"),
    "a contradiction": ("y = Relu(z)", "a = Not(f) c = And(a, f) t = Where(c, x, z) y = Relu(t)"),
    "a tautology": ("y = Relu(x)", "a = Not(f) c = Or(f, a) t = Where(c, x, z) y = Relu(t)"),
    "a neutral flag": ("y = Where(f, x, z)", "c = And(yes, f) y = Where(c, x, z)"),
    "a factor of one": ("y = Relu(x)", "t = Mul(x, one) y = Relu(t)"),
    "a divisor of ones": ("y = Relu(x)", "t = Div(x, ones) y = Relu(t)"),
    "a folded constant": ("y = Mul(x, two)", "t = Add(one, one) y = Mul(x, t)"),
    "a branch that is known": (
        "y = Relu(x)",
        "y = If(yes) <then_branch = g () => (float[2,3] p) {p = Relu(x)}, "
        "else_branch = e () => (float[2,3] q) {q = Neg(x)}>",
    ),
}
LAYOUTS = {
    "a known shape": ("y = Reshape(x, square)", "t = Shape(z) y = Reshape(x, t)"),
    "two reshapes": ("y = Reshape(x, flat)", "t = Reshape(x, turned) y = Reshape(t, flat)"),
    "an axis and no axis": ("y = Relu(x)", "a = Unsqueeze(x, axis) c = Squeeze(a, axis) y = Relu(c)"),
    "an expansion of nothing": ("y = Relu(x)", "t = Expand(x, square) y = Relu(t)"),
    "two transpositions": ("y = Relu(x)", "a = Transpose(x) c = Transpose<perm=[1,0]>(a) y = Relu(c)"),
    "a transposed unit axis": (
        "t = Unsqueeze(x, axis) y = Squeeze(t, axis)",
        "t = Unsqueeze(x, axis) a = Transpose<perm=[1,0,2]>(t) y = Reshape(a, square)",
    ),
    "a part of a transposition": (
        "t = Transpose(x) y = Slice(t, one_, two_, axis)",
        "t = Slice(x, one_, two_, zero_) y = Transpose(t)",
    ),
    "a transposition above an operator": (
        "t = Add(x, z) y = Transpose(t)",
        "a = Transpose(x) c = Transpose(z) y = Add(a, c)",
    ),
    "a transposition above a row": (
        "t = Mul(x, row) y = Transpose(t)",
        "a = Transpose(x) c = Reshape(row, column) y = Mul(a, c)",
    ),
    "a view above an operator": (
        "t = Add(x, z) y = Reshape(t, flat)",
        "a = Reshape(x, flat) c = Reshape(z, flat) y = Add(a, c)",
    ),
    "an element and a part": ("y = Gather<axis=1>(x, last)", "t = Slice(x, one_, two_, axis) y = Squeeze(t, axis)"),
    "an element from the end": ("y = Gather<axis=1>(x, none)", "t = Slice(x, two_, far, axis) y = Squeeze(t, axis)"),
    "a part of all": ("y = Relu(x)", "t = Slice(x, zero_, far, axis) y = Relu(t)"),
    "a split and parts": (
        "a, c = Split<axis=1>(x, parts) y = Neg(c)",
        "t = Slice(x, one_, far, axis) y = Neg(t)",
    ),
    "a split of a transposition": (
        "t = Transpose(x) a, c = Split<axis=0>(t, parts) y = Neg(c)",
        "a, c = Split<axis=1>(x, parts) t = Neg(c) y = Transpose(t)",
    ),
    "a part of units": (
        "t = Reshape(x, unit) a = Slice(t, one_, two_, two_) y = Neg(a)",
        "t = Slice(x, one_, two_, axis) a = Neg(t) c = Unsqueeze(a, two_) y = Unsqueeze(c, one_)",
    ),
    "an operator on units": (
        "t = Reshape(x, unit) a = Reshape(z, unit) y = Add(t, a)",
        "t = Reshape(x, units) a = Reshape(z, units) c = Add(t, a) y = Reshape(c, unit)",
    ),
    "a padded transposition": (
        "t = Transpose(x) y = Pad(t, odd)",
        "t = Pad(x, even) y = Transpose(t)",
    ),
    "a join of a join": ("t = Concat<axis=0>(x, z) y = Concat<axis=0>(t, x)", "y = Concat<axis=0>(x, z, x)"),
    "a size that is not known": (
        "t = Shape(many) y = Reshape(many, t)",
        "t = Reshape(many, flat_) y = Reshape(t, rest)",
    ),
    "equal elements": ("y = Add(x, twos)", "y = Add(x, two)"),
    "a negated selection behind a view": (
        "c = Greater(x, z) a = Not(c) t = Unsqueeze(a, zero_) y = Where(t, x, z)",
        "c = Greater(x, z) t = Unsqueeze(c, zero_) y = Where(t, z, x)",
    ),
    "a known number of elements": ("t = Size(x) a = Cast<to=1>(t) y = Mul(x, a)", "y = Mul(x, six)"),
    "a whole divisor of one": ("t = Size(x) y = Div(t, t)", "t = Size(x) a = Div(t, whole) y = Div(a, t)"),
    "a view that a folded shape gives": ("t = Shape(x) y = Reshape(z, t)", "y = Reshape(z, square)"),
}
ROUNDED = {
    "a sum of products": ("y = Gemm(x, w, b)", "t = MatMul(x, w) y = Add(t, b)"),
    "a transposed factor": ("t = Transpose(w) y = Gemm<transB=1>(x, t)", "y = MatMul(x, w)"),
    "a factor of a product": ("y = Gemm<alpha=0.5>(x, w)", "t = MatMul(x, w) y = Mul(t, half)"),
    "a factor of a bias": ("y = Gemm<beta=0.5>(x, w, b)", "t = MatMul(x, w) c = Mul(b, half) y = Add(t, c)"),
    "a term of zero": ("y = Relu(x)", "t = Add(nothing, x) y = Relu(t)"),
    "a sum over units": (
        "t = Reshape(x, unit) a = ReduceSum(t, more) y = Neg(a)",
        "t = Reshape(x, unit) y = Neg(t)",
    ),
    "a sum of a transposition": (
        "t = Transpose(x) y = ReduceSum<keepdims=0>(t, zero_)",
        "y = ReduceSum<keepdims=0>(x, one_)",
    ),
    "a mean that keeps its axes": (
        "t = Transpose(x) y = ReduceMean(t, one_)",
        "a = ReduceMean(x, zero_) y = Transpose(a)",
    ),
    "a product of many rows": (
        "t = Unsqueeze(x, axis) y = MatMul(t, w)",
        "t = MatMul(x, w) y = Unsqueeze(t, axis)",
    ),
    "two factors": ("t = Mul(x, three) y = Mul(t, half)", "y = Mul(x, threehalves)"),
    "a quotient by a constant": ("y = Div(x, third)", "y = Mul(x, three)"),
    "a reciprocal": ("y = Div(x, z)", "t = Reciprocal(z) y = Mul(x, t)"),
    "a quotient of one": ("y = Div(x, s)", "t = Div(one, s) y = Mul(t, x)"),
}
OTHER = {
    "a difference turned": ("y = Sub(x, z)", "y = Sub(z, x)"),
    "a rounded value": ("y = Relu(x)", "a = Cast<to=10>(x) c = Cast<to=1>(a) y = Relu(c)"),
    "another axis": ("y = Softmax<axis=1>(x)", "y = Softmax<axis=0>(x)"),
    "another selection": ("y = Where(f, x, z)", "y = Where(f, z, x)"),
    "the other branch": ("y = Relu(z)", "t = Where(yes, x, z) y = Relu(t)"),
    "a view for a transposition": ("y = Transpose(x)", "y = Reshape(x, turned)"),
    "another part": ("y = Slice(x, zero_, one_, axis)", "y = Slice(x, one_, two_, axis)"),
    "a row for a column": ("t = Reshape(x, turned) y = Mul(t, w0)", "t = Transpose(x) y = Mul(t, w0)"),
    "another order of parts": ("y = Concat<axis=0>(x, z)", "y = Concat<axis=0>(z, x)"),
    "a bias that is left out": ("y = Gemm(x, w, b)", "y = Gemm<beta=0.0>(x, w, b)"),
    "a factor of two": ("y = Relu(x)", "t = Mul(x, two) y = Relu(t)"),
    "a row that spreads": ("t = ReduceSum(s) y = Add(t, one)", "a = Mul(s, ones) t = ReduceSum(a) y = Add(t, one)"),
    "another join": ("t = Concat<axis=1>(x, z) y = Neg(t)", "t = Concat<axis=0>(x, z) y = Neg(t)"),
    "other elements": ("y = Add(x, ones)", "y = Add(x, two)"),
    "another element": ("y = Gather<axis=1>(x, last)", "t = Slice(x, two_, far, axis) y = Squeeze(t, axis)"),
    "the other part of a split": ("y, t = Split<axis=1>(x, parts)", "t, y = Split<axis=1>(x, parts)"),
    "another axis of a sum": ("y = ReduceSum(x, zero_)", "t = Transpose(x) y = ReduceSum(t, zero_)"),
    "another margin": ("t = Transpose(x) y = Pad(t, odd)", "t = Pad(x, odd) y = Transpose(t)"),
    "a square of a sum over units": (
        "t = Reshape(x, unit) a = ReduceSumSquare(t, more) y = Neg(a)",
        "t = Reshape(x, unit) y = Neg(t)",
    ),
    "a reciprocal of the other": ("y = Div(x, z)", "t = Reciprocal(x) y = Mul(z, t)"),
    "another constant": ("y = Mul(x, two)", "y = Mul(x, half)"),
    "carried values exchanged": (
        "n, y = Loop(, yes, x, z) <body = l (int64 i, bool c, float[2,3] p, float[2,3] q) => "
        "(bool d, float[2,3] r, float[2,3] t) {k = Identity(i) d = Not(c) r = Add(p, p) t = Mul(q, p)}>",
        "n, y = Loop(, yes, x, z) <body = l (int64 i, bool c, float[2,3] p, float[2,3] q) => "
        "(bool d, float[2,3] r, float[2,3] t) {k = Identity(i) d = Not(c) r = Add(p, p) t = Mul(q, q)}>",
    ),
}


def model(body: str, *, is_sound: bool = True) -> ir.Model:
    text = f'<ir_version: 10, opset_import: ["": 20]> g ({INPUTS}) => (y) {{ {body} }}'
    parsed = onnx.parser.parse_model(text)
    parsed.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in CONSTANTS.items())
    return ir.serde.deserialize_model(onnx.shape_inference.infer_shapes(parsed) if is_sound else parsed)


def run(body: ir.Model) -> np.ndarray:
    draw = np.random.default_rng(0)
    sizes = {"x": (2, 3), "z": (2, 3), "w": (3, 4), "b": (4,), "h": (2, 3), "s": (), "many": (5, 3)}
    feeds = {name: draw.normal(size=size).astype(np.float32) for name, size in sizes.items()}
    feeds |= {"h": feeds["h"].astype(np.float16), "f": np.array(False)}
    (result,) = onnx.reference.ReferenceEvaluator(ir.serde.serialize_model(body)).run(None, feeds)
    return np.asarray(result)


def differences(one: ir.Model, other: ir.Model, *, rounds: bool) -> list[str]:
    return list(Relation(one, other, rounds=rounds).find_differences())


@pytest.mark.parametrize("name", SAME)
def test_equal_spellings(name: str) -> None:
    one, other = map(model, SAME[name])
    assert differences(one, other, rounds=False) == differences(other, one, rounds=False) == []
    assert run(one).tobytes() == run(other).tobytes()


@pytest.mark.parametrize("name", LAYOUTS)
def test_other_layouts(name: str) -> None:
    one, other = map(model, LAYOUTS[name])
    assert differences(one, other, rounds=True) == differences(other, one, rounds=True) == []
    assert run(one).tobytes() == run(other).tobytes()


@pytest.mark.parametrize("name", ROUNDED)
def test_spellings_that_round_differently(name: str) -> None:
    one, other = map(model, ROUNDED[name])
    assert differences(one, other, rounds=True) == differences(other, one, rounds=True) == []
    assert len(differences(one, other, rounds=False)) == 1
    np.testing.assert_allclose(run(one), run(other), rtol=1e-5)


@pytest.mark.parametrize("name", OTHER)
def test_other_computations(name: str) -> None:
    one, other = map(model, OTHER[name])
    (found,) = differences(one, other, rounds=True)
    assert found.startswith("'y' is computed in another way: by ")
    assert differences(other, one, rounds=True)
    results = run(one), run(other)
    assert results[0].shape != results[1].shape or not np.allclose(*results)


def test_draws_are_no_copies() -> None:
    twice = model("a = RandomNormalLike(x) c = RandomNormalLike(x) y = Sub(a, c)")
    once = model("a = RandomNormalLike(x) y = Sub(a, a)")
    assert differences(twice, once, rounds=True) and not differences(twice, twice, rounds=False)


def test_a_difference_names_both_sides() -> None:
    one, other = model("t = Tanh(x) y = Exp(t)"), model("u = Sigmoid(x) y = Exp(u)")
    (found,) = differences(one, other, rounds=False)
    assert found == "'y' is computed in another way: by Sigmoid of 'x' at 'u', and should be by Tanh of 'x' at 't'"


@pytest.mark.parametrize(
    "body",
    [
        "t = Add(x, w) y = Relu(t)",
        "t = Transpose<perm=[4,7]>(x) y = Relu(t)",
        "t = Reshape(x, nowhere) y = Relu(t)",
        "t = Squeeze(x, far) y = Relu(t)",
        "t = Where(f) y = Relu(t)",
        "y = Mul(x)",
    ],
)
def test_a_damaged_node_is_in_no_normal_form(body: str) -> None:
    """A file with such a node differs from others, and raises no error."""
    damaged, sound = model(body, is_sound=False), model("y = Relu(x)")
    assert differences(sound, damaged, rounds=True) and not differences(damaged, damaged, rounds=True)


def test_a_large_expansion_is_not_folded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fold of this one would take 4 GiB."""
    folded = list[str]()

    class Recorder(onnx.reference.ReferenceEvaluator):
        def __init__(self, node: onnx.NodeProto, **options: object) -> None:
            folded.append(node.op_type)
            raise ValueError("not evaluated")

    monkeypatch.setattr(onnx.reference, "ReferenceEvaluator", Recorder)
    large = model("t = Expand(one, size) c = Add(one, two) y = ReduceMax<keepdims=0>(t)")
    assert not differences(large, large, rounds=True)
    assert set(folded) == {"Add"}
