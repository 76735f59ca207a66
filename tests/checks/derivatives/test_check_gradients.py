"""Gradients against the derivative of the loss: right ones, wrong ones, and undecidable ones."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import graphscale as gs
from graphscale.checks.derivatives import gradient_bench
from graphscale.errors import AlreadyScaledError, VerifyError
from tests.build import BACKWARD, FORWARD, LINEAR, LINEAR_BACKWARD, feeds_for, linear_step, step
from tests.conftest import MODEL_NAMES, MODELS, load_example

SGD = "u1 = Mul(dw1, rate) w1_next = Sub(w1, u1) u2 = Mul(dw2, rate) w2_next = Sub(w2, u2)"
NEXT = "float[4,5] w1_next, float[5,3] w2_next"
RATE = "float rate = {0.1}"
SQUARE = {
    "inputs": "float[4,4] q, float[4,3] w",
    "outputs": "float[4,4] dq, float[4,3] dw",
    "forward": "h = MatMul(x, q)" + LINEAR.replace("x, w", "h, w"),
    "backward": LINEAR_BACKWARD.replace("Transpose<perm = [1, 0]>(x)", "Transpose<perm = [1, 0]>(h)"),
}
TO_Q = "wt = Transpose<perm = [1, 0]>(w) dh = MatMul(dy, wt) x_t = Transpose<perm = [1, 0]>(x)"
RELU = {
    "inputs": "float[4,3] w",
    "outputs": "float[4,3] dw",
    "forward": "h = MatMul(x, w) y = Relu(h)" + LINEAR.replace("y = MatMul(x, w)", ""),
    "backward": "dy = Mul(d, two_over_n) on = Greater(h, zero) dh = Where(on, dy, zero)"
    "xt = Transpose<perm = [1, 0]>(x) dw = MatMul(xt, dh)",
    "constants": "float zero = {0}",
}


def verdicts(found: gs.GradientCheck) -> dict[str | None, str]:
    return {each.weight: each.verdict for each in found.weights}


def in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradient_bench, "find_dtypes", lambda model: [ir.DataType.FLOAT])


# The biases of keys, and those before a normalization, have no effect on the loss; the gradient of TensorFlow's
# embedding has its weight's shape behind the clipping.
UNSURE = {"ort/transformer": 2, "ort/conv": 2}
DISAGREES = {"tensorflow/keras_transformer_adamw_clip": ["embedding.embeddings"]}


# With operators that ONNX's reference evaluator does not know, such as FusedMatMul.
BY_ONNX_RUNTIME = ("ort/activations", "ort/indexing", "ort/transformer")


@pytest.mark.full
@pytest.mark.sample(3)
@pytest.mark.parametrize("name", MODEL_NAMES)
def test_models(name: str) -> None:
    example = load_example(name)
    found = gs.check_gradients(example.path, example.feeds)
    others = [(each.weight, each.verdict) for each in found.weights if each.verdict != "agrees"]
    assert [verdict for _, verdict in others].count("unsure") == UNSURE.get(name, 0)
    assert [weight for weight, verdict in others if verdict == "disagrees"] == DISAGREES.get(name, [])
    assert len(found.weights) == found.count("agrees") + len(others) > len(others)
    assert found.dtype == ("float32" if name in BY_ONNX_RUNTIME else "float64")


def test_a_gradient_whose_square_underflows(monkeypatch: pytest.MonkeyPatch) -> None:
    in_float32(monkeypatch)
    feeds = feeds_for(step())
    found = gs.check_gradients(step(), {**feeds, "x": feeds["x"] * np.float32(1e-25)})
    assert verdicts(found) == {"w1": "agrees", "w2": "agrees"}


RIGHT = {
    "gradients": step(),
    "next-weights": step(SGD, outputs=NEXT, constants=RATE),
    "clipped": step(
        "c1 = Clip(dw1, low, high)" + SGD.replace("(dw1", "(c1"),
        outputs=NEXT,
        constants=f"{RATE}, float low = {{-0.001}}, float high = {{0.001}}",
    ),
}


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("case", RIGHT)
def test_right_gradients(case: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if dtype == "float32":
        in_float32(monkeypatch)
    found = gs.check_gradients(RIGHT[case])
    assert (found.ok, found.dtype, verdicts(found)) == (True, dtype, {"w1": "agrees", "w2": "agrees"})
    assert [each.gradient for each in found.weights] == ["dw1", "dw2"]
    assert [each.kind for each in found.weights[0].directions] == ["random", "random", "gradient"]


# The loss or the backward pass, with a mistake; the verdicts; the text about the first wrong weight.
WRONG: dict[str, tuple[onnx.ModelProto, dict[str, str], str]] = {
    "twice": (
        step(backward=BACKWARD.replace("dw1 =", "half =") + "dw1 = Add(half, half)"),
        {"w1": "disagrees", "w2": "agrees"},
        "it is 2 times the derivative",
    ),
    "negated": (
        step(backward=BACKWARD.replace("dw1 =", "less =") + "dw1 = Neg(less)"),
        {"w1": "disagrees", "w2": "agrees"},
        "it is -1 times the derivative",
    ),
    "without-a-factor": (
        step(backward=BACKWARD.replace("MatMul(xt, dh)", "MatMul(xt, da)")),
        {"w1": "disagrees", "w2": "agrees"},
        "the gradient says",
    ),
    "without-a-factor-inside": (
        step(SGD, outputs=NEXT, constants=RATE, backward=BACKWARD.replace("MatMul(xt, dh)", "MatMul(xt, da)")),
        {"w1": "disagrees", "w2": "agrees"},
        "the gradient says",
    ),
    "without-a-term": (
        step(
            forward=FORWARD.replace("loss =", "fit =")
            + "squares = Mul(w1, w1) mean = ReduceMean<keepdims = 0>(squares) loss = Add(fit, mean)"
        ),
        {"w1": "disagrees", "w2": "agrees"},
        "the gradient says",
    ),
    "transposed": (
        linear_step(
            **{
                **SQUARE,
                "backward": f"{SQUARE['backward']} {TO_Q} turned = MatMul(x_t, dh)"
                "dq = Transpose<perm = [1, 0]>(turned)",
            }
        ),
        {"q": "disagrees", "w": "agrees"},
        "the gradient says",
    ),
    "of-another-loss": (
        step(forward=FORWARD.replace("square = Mul(d, d)", "square = Abs(d)")),
        {"w1": "disagrees", "w2": "disagrees"},
        "the gradient says",
    ),
    "of-a-mean-where-the-loss-is-a-sum": (
        step(forward=FORWARD.replace("ReduceMean", "ReduceSum")),
        {"w1": "disagrees", "w2": "disagrees"},
        "it is 0.0417 times the derivative",
    ),
}


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("case", WRONG)
def test_wrong_gradients(case: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if dtype == "float32":
        in_float32(monkeypatch)
    model, expected, said = WRONG[case]
    found = gs.check_gradients(model)
    assert not found.ok
    assert verdicts(found) == expected
    assert said in next(each.detail for each in found.weights if each.verdict == "disagrees")


def test_gradients_of_one_shape_find_their_weights() -> None:
    forward = "h = MatMul(x, p) k = Tanh(h) l = MatMul(k, q) g = Tanh(l)" + LINEAR.replace("x, w", "g, w")
    backward = """
        dy = Mul(d, two_over_n) gt = Transpose<perm = [1, 0]>(g) dw = MatMul(gt, dy) wt = Transpose<perm = [1, 0]>(w)
        dg = MatMul(dy, wt) gg = Mul(g, g) sg = Sub(one, gg) dl = Mul(dg, sg)
        kt = Transpose<perm = [1, 0]>(k) a = MatMul(kt, dl) qt = Transpose<perm = [1, 0]>(q)
        dk = MatMul(dl, qt) kk = Mul(k, k) sk = Sub(one, kk) dh = Mul(dk, sk)
        xt = Transpose<perm = [1, 0]>(x) b = MatMul(xt, dh)
    """
    model = linear_step(
        inputs="float[4,4] p, float[4,4] q, float[4,3] w",
        outputs="float[4,4] a, float[4,4] b, float[4,3] dw",
        constants="float one = {1}",
        forward=forward,
        backward=backward,
    )
    found = gs.check_gradients(model)
    assert {each.weight: (each.gradient, each.verdict) for each in found.weights} == {
        "p": ("b", "agrees"),
        "q": ("a", "agrees"),
        "w": ("dw", "agrees"),
    }


DROPOUT = {
    "forward": FORWARD.replace("a = Tanh(h)", "u = Tanh(h) a, mask = Dropout(u, ratio, yes)"),
    "backward": BACKWARD.replace(
        "dh = Mul(da, slope)", "kept = Where(mask, da, zero) du = Mul(kept, two) dh = Mul(du, slope)"
    ).replace("aa = Mul(a, a)", "aa = Mul(u, u)"),
    "constants": "float ratio = {0.5}, bool yes = {1}, float zero = {0}, float two = {2}",
}


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_dropout(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if dtype == "float32":
        in_float32(monkeypatch)
    found = gs.check_gradients(step(**DROPOUT))
    assert verdicts(found) == {"w1": "agrees", "w2": "agrees"}
    assert any("random numbers" in note for note in found.notes)
    without_mask = {**DROPOUT, "backward": DROPOUT["backward"].replace("Where(mask, da, zero)", "Identity(da)")}
    assert verdicts(gs.check_gradients(step(**without_mask))) == {"w1": "disagrees", "w2": "agrees"}


def test_a_loss_that_changes_from_run_to_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradient_bench, "give_seed", lambda node, seed: None)
    drawn = np.random.RandomState(0)  # other numbers in each run, the same in each test
    monkeypatch.setattr("onnx.reference.ops.op_dropout.RandomState", lambda seed: drawn)
    with pytest.raises(VerifyError, match="the loss differs from run to run"):
        gs.check_gradients(step(**DROPOUT))


def test_a_loss_that_changes_by_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Less than gradients in float32 may be off by, and more than a rounding."""
    in_float32(monkeypatch)
    loss_at, runs = gradient_bench.GradientBench._loss_at, itertools.count()
    monkeypatch.setattr(
        gradient_bench.GradientBench, "_loss_at", lambda *given: loss_at(*given) * (1 + 1e-4 * next(runs))
    )
    with pytest.raises(VerifyError, match="the loss differs from run to run"):
        gs.check_gradients(step())


def check_relu(weight: float | np.ndarray, **more: Any) -> gs.WeightCheck:
    random = np.random.default_rng(0)
    feeds = {"x": random.standard_normal((8, 4)), "t": random.standard_normal((8, 3))}
    feeds = {name: array.astype(np.float32) for name, array in feeds.items()}
    feeds["w"] = np.full((4, 3), weight, np.float32) if isinstance(weight, float) else weight
    return gs.check_gradients(linear_step(**{**RELU, **more}), feeds).weights[0]


def test_at_a_kink() -> None:
    found = check_relu(0.0)
    assert (found.verdict, found.error) == ("unsure", None)
    assert found.detail.startswith("a kink: the slope is ")


def test_a_gradient_beyond_both_sides_of_a_kink() -> None:
    backward = RELU["backward"].replace("Greater", "GreaterOrEqual")
    assert check_relu(0.0, backward=backward).verdict == "unsure"
    backward = backward.replace("dw = MatMul(xt, dh)", "g = MatMul(xt, dh) dw = Mul(g, many)")
    assert check_relu(0.0, backward=backward, constants="float zero = {0}, float many = {99}").verdict == "disagrees"


def test_near_a_kink_a_smaller_step_decides() -> None:
    random = np.random.default_rng(0)
    first = random.standard_normal((8, 4)).astype(np.float32)[0]
    w = random.standard_normal((4, 3))
    w[0] = -(first[1:] @ w[1:]) / first[0] + 1e-5
    found = check_relu(w.astype(np.float32))
    assert found.verdict == "agrees"
    assert found.error is not None and found.error < 1e-4


def test_what_is_not_checked_is_said() -> None:
    forward = "i = Cast<to = 1>(count) z = Mul(x, i) s = Mul(z, stats) y = MatMul(s, w)" + LINEAR[LINEAR.index("d =") :]
    model = linear_step(
        "u = Mul(dw, rate) w_next = Sub(w, u) count_next = Add(count, one) "
        "lag = Mul(stats, most) stats_next = Add(lag, few)",
        inputs="float[4,3] w, int64[1,4] count, float[1,4] stats",
        outputs="float[4,3] w_next, int64[1,4] count_next, float[1,4] stats_next",
        constants=f"{RATE}, int64[1,4] one = {{1, 1, 1, 1}}, float most = {{0.9}}, float few = {{0.1}}",
        forward=forward,
        backward=LINEAR_BACKWARD.replace("(x)", "(s)"),
    )
    found = gs.check_gradients(model)
    assert {each.weight: (each.verdict, each.detail) for each in found.weights} == {
        "w": ("agrees", ""),
        "count": ("unchecked", "it is not floating point"),
        "stats": ("unchecked", "no gradient of its shape was found"),
    }
    assert found.ok


def test_a_loss_below_rounding_is_unsure() -> None:
    model = linear_step(
        forward=LINEAR.replace("loss =", "fit =") + "loss = Add(fit, huge)", constants="float huge = {1e20}"
    )
    found = gs.check_gradients(model)
    assert (found.ok, verdicts(found)) == (False, {"w": "unsure"})
    assert found.weights[0].detail == "the loss changes by less than rounding"


def test_feeds_and_results_as_data(tmp_path: Path) -> None:
    example = load_example("pytorch/mse_tanh")
    np.savez(tmp_path / "feeds.npz", **example.feeds)
    found = gs.check_gradients(example.path, tmp_path / "feeds.npz", directions=1, seed=3)
    assert found == gs.check_gradients(example.model(), example.feeds, directions=1, seed=3)
    assert found != gs.check_gradients(example.model(), directions=1, seed=3)
    data = json.loads(json.dumps(found.to_dict()))
    assert (data["ok"], data["loss"], data["dtype"]) == (True, "loss", "float64")
    assert [len(each["directions"]) for each in data["weights"]] == [2, 2, 2, 2]


def test_refusals() -> None:
    model = step()
    with pytest.raises(AlreadyScaledError):
        gs.check_gradients(gs.scale(model).model)
    with pytest.raises(VerifyError, match="directions is at least 1; got 0"):
        gs.check_gradients(model, directions=0)
    with pytest.raises(VerifyError, match="are not finite on random feeds; give real values"):
        gs.check_gradients(model, {"t": np.full((8, 3), np.nan, np.float32)})
    unknown = step(forward=FORWARD.replace("Tanh(h)", "nobody.Swish(h)"), domains=["nobody"])
    with pytest.raises(VerifyError, match="the gradients cannot be checked: ONNX's reference evaluator cannot load"):
        gs.check_gradients(unknown, gradients=["dw1", "dw2"])


def test_the_path_of_a_model_is_not_touched() -> None:
    path = MODELS / "pytorch" / "mlp_float16.onnx"
    model = ir.load(path)
    before = ir.to_proto(model).SerializeToString()
    gs.check_gradients(model)
    assert ir.to_proto(model).SerializeToString() == before


def test_a_gradient_whose_elements_are_summed_behind_the_division() -> None:
    model = linear_step(
        "u = Mul(dgain, rate) gain_next = Sub(gain, u)",
        inputs="float[4,3] w, float gain",
        outputs="float gain_next, float[4,3] dw",
        constants="float rate = {0.1}",
        forward="product = MatMul(x, w) y = Mul(product, gain)" + LINEAR[LINEAR.index("d =") :],
        backward="dy = Mul(d, two_over_n) each = Mul(dy, product) dgain = ReduceSum<keepdims = 0>(each)"
        "dp = Mul(dy, gain) xt = Transpose<perm = [1, 0]>(x) dw = MatMul(xt, dp)",
    )
    found = gs.check_gradients(model, gradients=["each"])
    assert {each.weight: (each.gradient, each.verdict) for each in found.weights} == {
        "w": ("dw", "agrees"),
        "gain": ("dgain", "agrees"),
    }


def test_an_input_of_more_axes_than_arrays_have() -> None:
    model = linear_step(inputs="float[4,3] w, float mask", outputs="float[4,3] dw, float[4,3] masked")
    model.graph.node.append(onnx.helper.make_node("Mul", ["dw", "mask"], ["masked"]))
    mask = next(value for value in model.graph.input if value.name == "mask")
    mask.type.tensor_type.shape.dim.extend([onnx.TensorShapeProto.Dimension(dim_value=1)] * 65)
    with pytest.raises(VerifyError, match="the input 'mask' has 65 axes; an array has at most 64"):
        gs.check_gradients(model, roles={"metrics": ["masked"]})
