"""Gradients that become finite before the finite check: for the whole step, and for the check alone."""

from __future__ import annotations

import pytest

from tests.checks.linting.hand import STEP, changed, codes, report

pytestmark = pytest.mark.static

TYPES = {"int8": 3, "uint8": 2, "int16": 5, "int32": 6, "int64": 7, "bool": 9, "text": 8} | {
    "float8e4m3fn": 17,
    "float8e4m3fnuz": 18,
    "float8e5m2": 19,
    "float8e5m2fnuz": 20,
}
BOUNDED = ["Tanh", "Sigmoid", "Sign", "Atan", "Softsign", "Erf", "HardSigmoid"]
ACTIVATIONS = [*BOUNDED, "Relu", "Elu", "Softplus", "Exp", "Softmax"]
CHOICE = (
    "{} = If(wanted) <then_branch = a () => (float[4,3] o1) {{ i = Cast<to = 6>({}) o1 = Cast<to = 1>(i) }}, "
    "else_branch = b () => (float[4,3] o2) {{ o2 = Identity({}) }}>"
)
LOOP = (
    "dw = Loop(times, always, {}) <body = a (int64 n, bool go, float[4,3] c) => (bool go2, float[4,3] c2) "
    "{{ go2 = Identity(go) i = Cast<to = 6>({}) c2 = Cast<to = 1>(i) }}>"
)
# Between the unscaled gradient `raw` and the one that is tested and applied, `dw`.
HIDDEN = {
    **{f"cast to {name}": f"low = Cast<to = {to}>(raw) dw = Cast<to = 1>(low)" for name, to in TYPES.items()},
    "cast like a count": "low = CastLike(raw, good) dw = CastLike(low, w)",
    "quantized": "low = QuantizeLinear(raw, one, point) dw = DequantizeLinear(low, one, point)",
    "quantized without a zero point": "low = QuantizeLinear(raw, one) dw = DequantizeLinear(low, one)",
    "quantized by its range": "low, s, p = DynamicQuantizeLinear(raw) dw = DequantizeLinear(low, s, p)",
    "clipped": "low = Neg(one) dw = Clip(raw, low, one)",
    "clipped by Min and Max": "cut = Min(raw, one) low = Neg(one) dw = Max(cut, low)",
    "bounded on one side": "dw = Max(raw, zero)",
    "clipped while it is scaled": "top = Mul(two, scale) c = Clip(dw_scaled, zero, top) dw = Div(c, scale)",
    **{f"by {op}": f"dw = {op}(raw)" for op in ACTIVATIONS},
    "no infinity": "wrong = IsInf(raw) dw = Where(wrong, zero, raw)",
    "no NaN": "wrong = IsNaN(raw) dw = Where(wrong, zero, raw)",
    "neither": "nan = IsNaN(raw) inf = IsInf(raw) e = Or(nan, inf) right = Not(e) dw = Where(right, raw, zero)",
    "no large number": "size = Abs(raw) right = Less(size, two) dw = Where(right, raw, zero)",
    "nothing that differs from itself": "copy = Identity(raw) right = Equal(copy, raw) dw = Where(right, copy, zero)",
    "zeros for one NaN": "p = Mul(raw, zero) s = ReduceSum<keepdims = 0>(p) n = IsNaN(s) dw = Where(n, zero, raw)",
    "in a branch": CHOICE.format("dw", "raw", "raw"),
    "in a loop that carries it": LOOP.format("raw", "c"),
    "in a loop that reads it": LOOP.format("w", "raw"),
}
# Between the gradient and the test alone, with the codes: of these, many are no replacement of single numbers.
ALONE = {
    **{name: (f"low = Cast<to = {to}>(dw) probed = Cast<to = 1>(low)", "GS306") for name, to in TYPES.items()},
    **{f"by {op}": (f"probed = {op}(dw)", "GS303") for op in ACTIVATIONS},
    "in a branch": (CHOICE.format("probed", "dw", "dw"), "GS306"),
    "under a mask": ("mask = Greater(w, zero) probed = Where(mask, dw, zero)", "GS306"),
    "repeated zero times": ("probed = Tile(dw, none_of_it)", "GS301"),
    "repeated as often as is fed": ("probed = Tile(dw, fed)", "GS301"),
    "expanded to nothing": ("row = Unsqueeze(dw, axis) probed = Expand(row, empty)", "GS301"),
    "times nothing": ("row = Unsqueeze(dw, axis) e = ConstantOfShape(empty) probed = Mul(row, e)", "GS301"),
    "no rows": ("probed = Slice(dw, axis, axis)", "GS301"),
    "one row": ("probed = Gather(dw, axis)", "GS301"),
    "small ones": ("s = Abs(dw) l = Less(s, two) f = Reshape(l, all) probed = Compress(dw, f)", "GS301"),
    "the least": ("probed = ReduceMin<keepdims = 0>(dw)", "GS303"),
    "the greatest": ("probed = ReduceMax<keepdims = 0>(dw)", "GS303"),
    "its place": ("place = ArgMax(dw) probed = Cast<to = 1>(place)", "GS303"),
}
CONSTANTS = (
    "bool always = {1}, int64 times = {2}, int8 point = {0}, int64[2] none_of_it = {0, 1}, int64[1] axis = {0}, "
    "int64[3] empty = {0, 4, 3}, int64[1] all = {-1}"
)
FED = {"inputs": "bool wanted, int64[2] fed", "constants": CONSTANTS}
RIGHT = {
    "rounded to float16": "low = Cast<to = 10>(raw) dw = Cast<to = 1>(low)",
    "cast to float8 without saturation": "low = Cast<to = 17, saturate = 0>(raw) dw = Cast<to = 1>(low)",
    "masked by a weight": "mask = Greater(w, zero) dw = Where(mask, raw, zero)",
    "times flags": "wrong = IsNaN(raw) right = Not(wrong) f = Cast<to = 1>(right) dw = Mul(raw, f)",
    "clipped by its norm": "n = ReduceL2<keepdims = 0>(raw) q = Div(one, n) r = Min(q, one) dw = Mul(raw, r)",
    "centred": "m = ReduceMean(raw) dw = Sub(raw, m)",
    "in a branch": CHOICE.format("dw", "raw", "raw").replace("Cast<to = 6>", "Cast<to = 10>"),
    "in a loop": LOOP.format("raw", "c").replace("Cast<to = 6>", "Cast<to = 10>"),
}


@pytest.mark.sample(10)
@pytest.mark.parametrize("name", HIDDEN)
def test_hidden_from_the_check(name: str) -> None:
    text = changed(STEP, dw=f"raw = Div(dw_scaled, scale) {HIDDEN[name]}", **FED)
    found = [finding.code for finding in report(text).findings]
    assert found == ["GS304" if name == "cast to bool" else "GS306"]


@pytest.mark.parametrize("name", ALONE)
def test_lost_for_the_check_alone(name: str) -> None:
    nodes, code = ALONE[name]
    found = codes(changed(STEP, zeroed=f"{nodes} zeroed = Mul(probed, zero)", **FED))
    # A flag of each number that is not zero is no test of it: then there is none.
    assert ("GS304" if name == "bool" else code) in found


@pytest.mark.parametrize("name", RIGHT)
def test_not_hidden(name: str) -> None:
    assert codes(changed(STEP, dw=f"raw = Div(dw_scaled, scale) {RIGHT[name]}", **FED)) == []


@pytest.mark.parametrize(
    "nodes",
    [
        {"dy": "e = Mul(seed, scale) low = Cast<to = 17>(e) dy = Cast<to = 1>(low)"},
        {"dy": "e = Mul(seed, scale) dy = Tanh(e)"},
    ],
    ids=["float8", "tanh"],
)
def test_hidden_within_the_backward_pass(nodes: dict[str, str]) -> None:
    """There it bends the scaled gradient, too."""
    assert codes(changed(STEP, **nodes)) == ["GS205", "GS306"]


@pytest.mark.parametrize("change", ["low = Neg(one) cut = Clip(dw, low, one)", "cut = Sign(dw)"])
def test_behind_the_check(change: str) -> None:
    assert codes(changed(STEP, change=f"{change} change = Mul(cut, rate)")) == []
