"""Lint has no findings in the scaled steps of models/zoo, but finds small changes of them."""

from __future__ import annotations

import onnx
import onnx_ir as ir
import pytest

import graphscale as gs
from models.zoo import check_trial, pack
from tests.checks.linting.hand import HALF, STEP, changed, codes

pytestmark = pytest.mark.static

# Whole steps in the body of a loop, which cannot be scaled, and steps that adjust a loss scale of their own.
REFUSED = {"jax-scanned-epoch.momentum", "steps-in-loop.shuffled", "steps-in-scan.momentum-names"} | {
    "field-credit-scoring.masters",
    "half-precision-mixer.adamw",
}
# Steps that carry float16 state, which lint finds behind the guards alone, not in the original.
FLOAT16_STATE = pytest.mark.xfail(strict=True, reason="GS607 is true of the original, too, and not found there")
CARRYING = {"wrap-moments-float16.momentum"}
STEPS = [
    pytest.param(name, marks=FLOAT16_STATE if name in CARRYING else ()) for name in sorted(set(pack.names()) - REFUSED)
]


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", STEPS)
def test_a_scaled_step_has_no_finding(name: str) -> None:
    content, truth = pack.read(name)
    assert check_trial.find(onnx.load_from_string(content), truth, "onnx") == []


@pytest.mark.parametrize("name", ["optax-rprop.square", "wrap-skip-large.square"])
def test_the_comparisons_of_a_step_are_no_check_of_a_fixed_scale(name: str) -> None:
    content, truth = pack.read(name)
    assert check_trial.find(onnx.load_from_string(content), truth, "fixed") == []


def test_float16_state_of_the_step_is_found_as_before() -> None:
    """Behind the guards that scale adds: these hold the old value, which is no sum."""
    content, truth = pack.read("float16-weights.momentum")
    assert check_trial.find(onnx.load_from_string(content), truth, "onnx") == []


def test_a_contraction_that_loses_the_scale() -> None:
    """The memory's own update has no gradient, and no finding; the first gradient has one if the scale is cut off."""
    content, truth = pack.read("hopfield-memory.momentum")
    scaled = gs.scale(ir.from_proto(onnx.load_from_string(content))).model
    assert isinstance(scaled, ir.Model) and gs.lint(scaled).findings == () and truth["states"]
    for node in [n for n in scaled.graph if n.metadata_props.get("graphscale.pass") == "scale-loss"]:
        assert node.inputs[0] is not None
        node.outputs[0].replace_all_uses_with(node.inputs[0])
    assert "GS102" in {finding.code for finding in gs.lint(scaled).findings}


DECAY = "decay = Mul(w, {}) g = Add(dw_scaled, decay) dw = Div(g, scale)"
SCATTERED = (
    "filled = ConstantOfShape{}(shape) laid = Transpose(filled) g = ScatterND(laid, rows, dw_scaled) dw = Div(g, scale)"
)
PLACES = "int64[2] shape = {3, 4}, int64[4,1] rows = {0, 1, 2, 3}"
# For each a code, the graph where it is found, and one beside it where nothing is.
NEIGHBOURS = {
    "weight decay by a small number, and by zero": (
        "GS201",
        changed(STEP, dw=DECAY.format("tiny"), constants="float tiny = {0.0001}"),
        changed(STEP, dw=DECAY.format("zero")),
    ),
    "rows written into ones, and into zeros": (
        "GS205",
        changed(STEP, dw=SCATTERED.format("<value = float[1] {1}>"), constants=PLACES),
        changed(STEP, dw=SCATTERED.format(""), constants=PLACES),
    ),
    "a copy selected beside an update, and where there is none": (
        "GS403",
        changed(STEP, w_next="copy = Identity(w) w_next = Where(finite, copy, w)"),
        changed(
            STEP,
            inputs="float given",
            outputs="float given_next",
            more="copy = Identity(given) given_next = Where(finite, copy, given)",
        ),
    ),
    "in float16 the reciprocal of the scale, and the scale times a seed": (
        "GS601",
        changed(
            HALF,
            dw="inverse = Reciprocal(scale) small = Cast<to = 10>(inverse) wide = Cast<to = 1>(small)"
            "dw = Mul(dw_scaled, wide)",
        ),
        changed(
            HALF,
            seed="first = Mul(two_over_n, scale) seed16 = Cast<to = 10>(first)",
            dy="d16 = Cast<to = 10>(d)",
            dy16="dy16 = Mul(d16, seed16)",
        ),
    ),
    "a choice of two scales, and of two slopes": (
        "GS204",
        changed(
            STEP,
            dw="large = Greater(loss, one) half = Div(scale, two) other = Where(large, scale, half)"
            "dw = Div(dw_scaled, other)",
        ),
        changed(
            STEP,
            seed="large = Greater(d, zero) up = Mul(ups, scale) down = Mul(downs, scale)",
            dy="dy = Where(large, up, down)",
            constants="float[3] ups = {1, 1, 1}, float[3] downs = {2, 2, 2}",
        ),
    ),
}


@pytest.mark.parametrize("name", NEIGHBOURS)
def test_neighbours(name: str) -> None:
    code, wrong, right = NEIGHBOURS[name]
    assert code in codes(wrong)
    assert codes(right) == []
