"""Graphs that are hard to distinguish: the right answers, bit for bit, and the right report."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import pytest

import graphscale as gs
from tests.analysis.expected import GRADIENTS, PLAIN, WEIGHTS, check
from tests.analysis.optimizers import ADAM, CLIP_BY_NORM, MOMENTS, NEXT, NEXT_MOMENTS, NUMBERS, SGD
from tests.build import (
    BACKWARD,
    EXACT,
    FORWARD,
    LINEAR,
    assert_same_step,
    feeds_for,
    linear_step,
    listed,
    numbers,
    ramp,
    step,
)
from tests.conftest import assert_all_same_bits, run_once
from tests.expressions import nodes


class TestTheSeed:
    def test_shared_with_another_use(self) -> None:
        """The 1 that the loss is differentiated from is the 1 of tanh' = 1 - tanh^2 as well."""
        backward = BACKWARD.replace("dy = Mul(d, two_over_n)", "seed = Mul(one, two_over_n)\n dy = Mul(d, seed)")
        check(step(backward=backward), "dw1 dw2", places="one:0")

    def test_above_a_dropout_of_the_backward_pass(self) -> None:
        backward = BACKWARD.replace("dy = Mul(d, two_over_n)", "wide = Mul(d, two_over_n) dy = Dropout(wide)")
        check(step(backward=backward), "dw1 dw2")

    def test_folded_into_a_constant_of_the_forward_pass(self) -> None:
        """2/N is the seed, and also a factor of the activations and of the loss."""
        forward = nodes("""
            a = Tanh((x @ w1) * two_over_n)
            d = a @ w2 - t
            loss = ReduceSum((d * d) * two_over_n, keepdims=0)
        """)
        backward = BACKWARD.replace("dw1 = MatMul(xt, dh)", "dwide = Mul(dh, two_over_n)\n dw1 = MatMul(xt, dwide)")
        check(step(forward=forward, backward=backward), "dw1 dw2")

    def test_folded_away(self) -> None:
        """The loss is sum(d^2)/2, so that the first cotangent is a forward value: d itself."""
        forward = FORWARD.replace("loss = ReduceMean", "total = ReduceSum") + "loss = Mul(total, half)"
        backward = BACKWARD.replace("dy = Mul(d, two_over_n)", "").replace("dy", "d")
        report = assert_same_step(step(forward=forward, backward=backward, constants="float half = {0.5}"))
        assert {place.value for place in report.places} == {"d"}
        assert report.coverage == 1.0

    @pytest.mark.parametrize("cast", ["CastLike(whole, loss)", "Cast(whole, to=1)"])
    def test_an_integer_that_is_cast(self, cast: str) -> None:
        """As exporters write it that optimize nothing: the scale enters behind the cast, and no zero stops it."""
        backward = nodes(f"""
            whole = Constant(value_int=1)
            none = Constant(value_int=0)
            seed = {cast}
            dy = Where(is_low, {cast.replace("whole", "none")}, Expand(seed, Shape(y)))
            dw = x.T @ dy
        """)
        forward = nodes("y = x @ w; loss = ReduceSum(Where(is_low, t, y), keepdims=0)")
        check(
            linear_step(forward=forward, backward=backward, inputs="float[4,3] w, bool[8,3] is_low"),
            "dw",
            places="dy",
        )

    def test_beside_a_deeper_activation(self) -> None:
        """The cotangent of the mean of cubes is d * d times 3/N * d: the seed is in the shallower factor."""
        model = linear_step(
            forward=LINEAR.replace("(square)", "(cube)").replace("loss =", "cube = Mul(square, d) loss ="),
            backward=nodes("dy = square * (d * three_over_n); dw = x.T @ dy"),
            constants="float three_over_n = {0.125}",
        )
        check(model, "dw", places="three_over_n:1")

    def test_above_a_product_with_an_addend(self) -> None:
        """Noise that is added to a cotangent cannot be scaled: the scale enters once more after the sum."""
        backward = BACKWARD.replace("MatMul(dy, w2t)", "Gemm(dy, w2t, noise)")
        report = assert_same_step(step(backward=backward, inputs="float[8,5] noise"))
        assert {place.value for place in report.places} == {"two_over_n", "da"}
        assert report.coverage == 1
        assert {gradient.value for gradient in report.gradients} == {"da.product", "dw1", "dw2"}

    def test_beside_a_weight_that_is_an_initializer(self) -> None:
        """The gradient of sum(w * w) is w times 2, and w is no constant."""
        model = linear_step(
            nodes("w_next = w - dw * rate"),
            inputs="float rate",
            outputs="float[4,3] w_next",
            forward=nodes("loss = ReduceSum(w * w, keepdims=0)"),
            backward=nodes("dw = w * two"),
            constants=f"float two = {{2}}, float[4,3] w = {ramp(12)}",
        )
        assert [(place.value, place.input) for place in gs.inspect(model).places] == [("two", 1)]

    def test_one_seed_for_each_of_two_losses(self) -> None:
        loss = nodes("mean = ReduceMean(Abs(y), keepdims=0); loss = error + mean * weight")
        seeds = nodes("dy = d * two_over_n + Sign(y) * weight_over_n")
        model = step(
            forward=FORWARD.replace("loss =", "error =") + loss,
            backward=BACKWARD.replace("dy = Mul(d, two_over_n)", seeds),
            constants="float weight = {0.24}, float weight_over_n = {0.01}",
            outputs=f"{GRADIENTS}, float error, float mean",
        )
        check(model, "dw1 dw2", places="two_over_n:1 weight_over_n:1")

    def test_a_weighted_gradient_penalty(self) -> None:
        """0.1 * sum(log cosh(d loss / d x)): no function of the seed, but a second loss with a seed of its own."""
        backward = nodes("""
            dy = d * two_over_n
            ddx = Tanh(dy @ w.T) * tenth
            dw = x.T @ (dy + (ddx @ w) * two_over_n) + ddx.T @ dy
        """)
        report = assert_same_step(linear_step(backward=backward, constants="float tenth = {0.1}"))
        assert report.coverage == 1.0
        assert {place.value for place in report.places} == {"two_over_n", "tenth"}


DECAY = nodes("g1 = dw1 + w1 * decay; g2 = w2 * decay + dw2")
DECAYED = "float[4,5] g1, float[5,3] g2"


class TestWeightDecay:
    @pytest.mark.parametrize(
        ("update", "outputs", "state"),
        [(SGD, NEXT, WEIGHTS), ("", DECAYED, ""), (SGD, f"{DECAYED}, {NEXT}", WEIGHTS)],
        ids=["gradients that sgd takes", "outputs", "both"],
    )
    def test_in_gradients(self, update: str, outputs: str, state: str) -> None:
        """g + 0.002 * w is a gradient, though it depends on the weight and has its shape."""
        check(step(DECAY + update, outputs=outputs, constants=NUMBERS), "dw1 dw2", state)

    def test_decoupled(self) -> None:
        """w * (1 - 1e-4) - rate * g is an update."""
        update = nodes("w1_next = w1 * keep - dw1 * rate; w2_next = w2 * keep - dw2 * rate")
        check(step(update, outputs=NEXT, constants=NUMBERS), "dw1 dw2", WEIGHTS)

    def test_in_the_loss(self) -> None:
        penalty = nodes("loss = error + ReduceSum(w1 * w1, keepdims=0) * half_decay")
        forward = FORWARD.replace("loss =", "error =") + penalty
        backward = BACKWARD.replace("dw1 = ", "data = ") + nodes("dw1 = data + w1 * decay")
        constants = NUMBERS + ", float half_decay = {0.001}"
        check(step(forward=forward, backward=backward, constants=constants), "data dw2")
        clipped = step(CLIP_BY_NORM + SGD, forward=forward, backward=backward, constants=constants, outputs=NEXT)
        check(clipped, "data dw2", WEIGHTS)


class TestClipping:
    @pytest.mark.parametrize(
        ("update", "outputs", "state"), [(SGD, NEXT, WEIGHTS), ("", DECAYED, "")], ids=["inside", "for one outside"]
    )
    def test_by_global_norm(self, update: str, outputs: str, state: str) -> None:
        check(step(CLIP_BY_NORM + update, outputs=outputs, constants=NUMBERS), "dw1 dw2", state)

    @pytest.mark.parametrize(
        ("clip", "opset"),
        [
            ("Clip({}, low, high)", 20),
            ("Clip({}, min=-0.01, max=0.01)", 10),
            ("Max(Min({}, high), low)", 20),
            ("{0} / ReduceL2({0}, keepdims=0)", 20),
        ],
        ids=["clip", "attributes", "min-max", "to norm one"],
    )
    def test_each(self, clip: str, opset: int) -> None:
        clipped = nodes(f"g1 = {clip.format('dw1')}; g2 = {clip.format('dw2')}")
        check(step(clipped + SGD, outputs=NEXT, constants=NUMBERS, opset=opset), "dw1 dw2", WEIGHTS)


# Nodes, inputs and constants; what has a next value is state.
CARRIED = {
    "a learning rate that is fed": ("", "float rate", ""),
    "a learning rate of one element": ("", "float[1] rate", ""),
    "a learning rate": ("rate_next = rate * keep", "float rate", "float keep = {0.99}"),
    "counters": (
        "n_next = n + int_one; f_next = f + one; m_next = m + int_one",
        "int64 n, float f, int64[1] m",
        f"{NUMBERS}, int64 int_one = {{1}}",
    ),
    "an average of the loss": (
        "average_next = average * nine + loss * tenth",
        "float average",
        f"{NUMBERS}, float nine = {{0.9}}, float tenth = {{0.1}}",
    ),
    "an average of a weight": (
        "average_next = average * nine + w1_next * tenth",
        "float[4,5] average",
        f"{NUMBERS}, float nine = {{0.999}}, float tenth = {{0.001}}",
    ),
}


class TestState:
    @pytest.mark.parametrize("name", CARRIED)
    def test_beside_the_weights(self, name: str) -> None:
        text, inputs, constants = CARRIED[name]
        declared = [each.split() for each in inputs.split(", ")]
        states = [(dtype, state) for dtype, state in declared if f"{state}_next = " in text]
        outputs = listed(NEXT, *(f"{dtype} {state}_next" for dtype, state in states))
        model = step(PLAIN + nodes(text), inputs=inputs, outputs=outputs, constants=constants)
        check(model, "dw1 dw2", " ".join([WEIGHTS, *(f"{state}={state}_next" for _, state in states)]))

    def test_adam(self) -> None:
        model = step(ADAM, inputs=MOMENTS, outputs=NEXT_MOMENTS, constants=NUMBERS)
        feeds = feeds_for(model, count=np.float32(3))
        feeds["v"] = np.abs(feeds["v"])
        check(model, "dw1", "w1=w1_next m=m_next v=v_next count=count_next", feeds=feeds)

    def test_weights_as_plain_initializers(self) -> None:
        """As GradientGraphBuilder makes them: no inputs at all; they become inputs, with their values."""
        model = linear_step(
            nodes("w_next = w - dw * rate"),
            inputs="",
            outputs="float[4,3] w_next",
            constants=f"float rate = {{0.1}}, float[4,3] w = {ramp(12)}",
        )
        check(model, "dw", "w=w_next")
        session = gs.Session(gs.scale(model))
        feeds = feeds_for(model)
        losses = [float(session.step(feeds)["loss"]) for _ in range(20)]
        assert losses == sorted(losses, reverse=True)
        assert losses[-1] < 0.6 * losses[0]


INVARIANT = {
    "sign": "g1 = Sign(dw1)",
    "mask": "g1 = Cast(Greater(dw1, zero), to=1)",
    "over-its-largest": "g1 = dw1 / ReduceMax(Abs(dw1), keepdims=0)",
    "over-its-norm": "g1 = dw1 / ReduceL2(dw1, keepdims=0)",
}


@pytest.mark.parametrize("name", INVARIANT)
def test_scale_invariant_uses_are_checked(name: str) -> None:
    """An update that no scale can change still needs a finite gradient."""
    model = step(nodes(f"{INVARIANT[name]}; g2 = Identity(dw2)") + SGD, outputs=NEXT, constants=NUMBERS)
    assert_same_step(model)
    feeds = feeds_for(model)
    # tanh keeps this out of dw2, so that dw1 alone is not finite.
    feeds["x"][0, 0] = np.inf
    actual, _ = run_once(gs.scale(model).model, feeds, EXACT)
    assert not actual["all_finite"]
    assert_all_same_bits(actual, {"w1_next": feeds["w1"], "w2_next": feeds["w2"]})


def test_a_gradient_that_is_always_zero() -> None:
    """A frozen weight's: no scale can enter, and none is needed."""
    model = step("frozen = Mul(w1, zero)", outputs=f"{GRADIENTS}, float[4,5] frozen", constants=NUMBERS)
    check(model, "dw1 dw2")


def test_the_gradient_of_an_input() -> None:
    check(step(nodes("dx = dh @ w1.T"), outputs=f"float[8,4] dx, {GRADIENTS}"), "dw1 dw2 dx")


def test_a_gradient_and_a_multiple_of_it() -> None:
    """One division serves both, and one check."""
    model = step("tenth = Mul(dw1, rate)", outputs=f"float[4,5] tenth, {GRADIENTS}", constants=NUMBERS)
    check(model, "dw1 dw2")


def test_double_precision() -> None:
    text = onnx.printer.to_text(step()).replace("float", "double")
    model = onnx.parser.parse_model(text)
    for loss_scale in (1024, "dynamic"):
        actual, _ = run_once(gs.scale(model, loss_scale).model, feeds_for(model), EXACT)
        assert_all_same_bits(actual, run_once(model, feeds_for(model), EXACT)[0])
        assert actual["dw1"].dtype == np.float64


@pytest.mark.parametrize("moved", ["db = Identity(ones)", "same = Identity(ones)\n db = Reshape(same, two)"])
def test_a_gradient_that_is_a_constant_beside_weights_that_are_initializers(moved: str) -> None:
    model = step(
        f"{PLAIN}\n {moved}",
        inputs="float rate",
        outputs=f"{NEXT}, float[2] db",
        weights="",
        constants=f"float[2] ones = {numbers(2, '1')}, int64[1] two = {{2}}, "
        f"float[4,5] w1 = {ramp(20)}, float[5,3] w2 = {ramp(15)}",
    )
    report = gs.scale(model).report
    assert {state.input for state in report.state if "loss scale" not in state.how} == {"w1", "w2"}
