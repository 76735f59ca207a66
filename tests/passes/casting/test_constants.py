"""Constants: an infinite mask is exact and changes no choice; a number outside of float16 keeps its node in float32."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import graphscale as gs
from tests.build import BACKWARD, feeds_for, step
from tests.conftest import Level, run_once
from tests.passes.casting.borders import assert_well_cast, dtypes_in
from tests.passes.casting.test_choice import cast, ops, reasons

FLOAT, FLOAT16 = onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16
_SLOPE = BACKWARD.replace("aa = Mul(a, a)", "").replace("slope = Sub(one, aa)", "").replace("Mul(da, slope)", "OP")
FLOAT_MIN = float(np.finfo(np.float32).min)


# Readers of a mask: a softmax, or an operator in float16 that tells an infinity from a large number.
SOFTMAX, DIFFERENCE = "a = Softmax(kept)", "none = Sub(kept, kept) a = Add(none, h)"


def masked(fill: str, constants: str, behind: str = SOFTMAX) -> onnx.ModelProto:
    """`kept` is `h` where `mask` is true, else what the nodes in `fill` give under the name `big`."""
    layer = f"{fill} kept = Where(mask, h, big) {behind}"
    constants = ", ".join(filter(None, [constants, "float zero = {0}"]))
    backward = _SLOPE.replace("OP", "Where(mask, da, zero)")
    return step(layer=layer, backward=backward, inputs="bool[8,5] mask", constants=constants)


def feeds_of(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    """One row is masked out whole: a finite mask gives a uniform softmax, an infinite one NaN."""
    mask = np.random.default_rng(0).random((8, 5)) < 0.5
    mask[0] = False
    return feeds_for(model, mask=mask)


LARGE = {
    "initializer": ("big = Identity(number)", "float number = {NUMBER}"),
    "expanded": ("shape = Shape(h) big = Expand(number, shape)", "float number = {NUMBER}"),
    "reshaped": (
        "wide = Unsqueeze(number, axes) big = Reshape(wide, axes1)",
        "float number = {NUMBER}, int64[1] axes = {0}, int64[1] axes1 = {1}",
    ),
    "filled": ("shape = Shape(h) big = ConstantOfShape<value = float[1] {NUMBER}>(shape)", ""),
    "constant node": ("big = Constant<value = float {NUMBER}>()", ""),
    "chosen": ("big = Where(mask, nought, number)", "float number = {NUMBER}, float nought = {0}"),
    "joined": (
        "part = Concat<axis = 0>(one_of, one_of) big = Slice(part, begin, end)",
        "float[1] one_of = {NUMBER}, int64[1] begin = {0}, int64[1] end = {1}",
    ),
    "of float64": ("big = Cast<to = 1>(number)", "double number = {NUMBER}"),
    "of an integer": ("big = Cast<to = 1>(number)", "int64 number = {-1000000000}"),
    "negated": ("big = Neg(number)", "float number = {MINUS}"),
    "multiplied": ("m0 = Cast<to = 1>(mask) m1 = Sub(one, m0) big = Mul(m1, number)", "float number = {NUMBER}"),
}


@pytest.mark.parametrize("name", ["initializer", "expanded", "filled", "constant node", "chosen"])
def test_an_infinite_mask_is_exact(name: str) -> None:
    """It is a float16 number: nothing is reported, and the node runs in float16 where its neighbours do."""
    model = masked(*(text.replace("NUMBER", "-1") for text in LARGE[name]))
    with_infinity(model)
    result = cast(model)
    assert result.report.constants == ()
    assert ops(result)["Softmax"] == (0, 1)
    actual, _ = run_once(gs.autocast(model, emulate=True).model, feeds_of(model), Level.ORT_ENABLE_ALL)
    expected, _ = run_once(model, feeds_of(model))
    np.testing.assert_allclose(actual["dw2"], expected["dw2"], rtol=0, atol=2e-3)


def with_infinity(model: onnx.ModelProto) -> None:
    """Put minus infinity, which ONNX's text form has no word for, in place of -1."""
    tensors = list(model.graph.initializer)
    tensors += [a.t for node in model.graph.node for a in node.attribute if a.name == "value"]
    for tensor in tensors:
        array = onnx.numpy_helper.to_array(tensor)
        if array.dtype == np.float32 and (array == -1).any():
            tensor.CopyFrom(onnx.numpy_helper.from_array(np.where(array == -1, -np.inf, array), tensor.name))


def test_a_node_between_products_with_an_infinity_runs_in_float16() -> None:
    layer = "kept = Where(mask, h, number) a = Max(kept, h)"
    backward = _SLOPE.replace("OP", "Identity(da)")
    model = step(layer=layer, backward=backward, inputs="bool[8,5] mask", constants="float number = {-1}")
    with_infinity(model)
    result = cast(model)
    assert ops(result)["Where"] == (1, 0)
    assert dtypes_in(result.model)["kept"] == FLOAT16
    feeds = feeds_of(model)
    actual, _ = run_once(gs.autocast(model, emulate=True).model, feeds)
    expected, _ = run_once(model, feeds)
    np.testing.assert_allclose(actual["dw2"], expected["dw2"], rtol=0, atol=2e-3)


@pytest.mark.sample(6)
@pytest.mark.parametrize("behind", [SOFTMAX, DIFFERENCE], ids=["softmax", "difference"])
@pytest.mark.parametrize("number", ["-1e9", str(FLOAT_MIN)])
@pytest.mark.parametrize("name", LARGE)
def test_a_large_finite_mask_stays_finite(name: str, number: str, behind: str) -> None:
    """Masked scores stay float32: a row that is masked whole stays uniform."""
    fill, constants = LARGE[name]
    minus = number.removeprefix("-")
    model = masked(*(text.replace("NUMBER", number).replace("MINUS", minus) for text in (fill, constants)), behind)
    expected, _ = run_once(model, feeds_of(model))
    for options in ({}, {"emulate": True}):
        result = gs.autocast(model, **options)
        assert_well_cast(model, result)
        actual, _ = run_once(result.model, feeds_of(model), Level.ORT_DISABLE_ALL)
        assert np.isfinite(expected["dw2"]).all()
        np.testing.assert_allclose(actual["dw2"], expected["dw2"], rtol=0, atol=2e-3, err_msg=str(options))


def test_numbers_chosen_beside_a_constant_are_not_its_own() -> None:
    fill, constants = LARGE["initializer"]
    result = cast(masked(fill, constants.replace("NUMBER", "-1e9"), DIFFERENCE))
    assert "it reads the result of a float32 operator" in reasons(result, "Sub")
    assert not any("cannot hold" in reason for reason in reasons(result, "Sub"))


@pytest.mark.parametrize("name", ["initializer", "constant node", "filled", "multiplied"])
def test_it_is_reported(name: str) -> None:
    fill, constants = LARGE[name]
    report = cast(masked(*(text.replace("NUMBER", "-1e9") for text in (fill, constants)))).report
    (line,) = report.constants
    assert "-1e+09" in line
    assert "float16 cannot hold" in line


def test_ten_thousand_fits() -> None:
    model = masked("big = Identity(number)", "float number = {-1e4}")
    assert cast(model).report.constants == ()


SMALL = {
    "added": "s = Add(h, small) a = Sqrt(s)",
    "the larger": "a = Max(h, small)",
    "divided": "s = Div(h, small) a = Mul(s, small)",
}


@pytest.mark.parametrize("name", SMALL)
def test_a_small_constant_keeps_its_node(name: str) -> None:
    """1e-12, which would be zero, as an epsilon is; in bfloat16, which has it, nothing is kept."""
    backward = _SLOPE.replace("OP", "Identity(da)")
    model = step(layer=SMALL[name], backward=backward, constants="float small = {1e-12}")
    result = cast(model)
    (line,) = result.report.constants
    assert "'small' holds 1e-12" in line
    assert sum(count for op in result.report.ops for why, count in op.reasons.items() if why == line) >= 1
    assert gs.autocast(model, "bfloat16", emulate=True).report.constants == ()


def test_a_contraction_with_a_large_constant_stays_wide() -> None:
    """A product with a matrix that holds 1e6; what is only small in a frozen matrix may become zero."""
    backward = _SLOPE.replace("OP", "Identity(da)")
    for number, low in (("1e6", 0), ("1e-12", 1), ("-65504", 1), ("65520", 0)):
        matrix = ", ".join([number, *["1"] * 24])
        layer = "[odd] a = MatMul(h, matrix)"
        result = cast(step(layer=layer, backward=backward, constants=f"float[5,5] matrix = {{{matrix}}}"))
        kept = reasons(result, "MatMul")
        assert (sum(kept.values()) == 0) == bool(low), number
        assert bool(result.report.constants) == (not low)


def test_a_weight_is_no_constant() -> None:
    """An initializer that is also an input can be anything: it is cast as all weights are."""
    backward = _SLOPE.replace("OP", "Identity(da)")
    model = step(layer="a = Mul(h, gain)", backward=backward, inputs="float[5] gain")
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.full(5, 1e6, np.float32), "gain"))
    result = cast(model)
    assert result.report.constants == ()
    assert ops(result)["Mul"][0] == 1


def test_bfloat16_holds_what_float32_holds_but_for_the_largest() -> None:
    for number, kept in (("-1e9", 0), ("-1e38", 0), (str(FLOAT_MIN), 1)):
        model = masked("big = Identity(number)", f"float number = {{{number}}}")
        report = gs.autocast(model, "bfloat16", emulate=True).report
        assert len(report.constants) == kept
