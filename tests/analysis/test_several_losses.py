"""Steps with several losses, each with a backward pass of its own."""

from __future__ import annotations

import onnx
import onnx_ir as ir
import pytest

import graphscale as gs
from graphscale.analysis.topology import Topology
from graphscale.errors import LossError, NonlinearGradientError, SeedNotFoundError
from tests.build import assert_same_step, listed, parse
from tests.expressions import nodes

pytestmark = pytest.mark.static

SHAPES = {"w": "4,5", "u": "5,3", "v": "4,6", "s": "6,3", "z": "3,3"}
LAST = "w_next = w - (pa + pb) * rate; u_next = u - (qa + qb) * rate"


def half(tag: str, w: str = "w", u: str = "u", *, batch: str = "Slice(x, {0}, {1}, zero)", loss: str = "d * d") -> str:
    """Forward and backward pass on half of the batch: the loss and the gradients `p` and `q` of `w` and `u`."""
    first, last = ("zero", "four") if tag == "a" else ("four", "eight")
    return f"""
        x{tag} = {batch.format(first, last)}; t{tag} = Slice(t, {first}, {last}, zero)
        a{tag} = Tanh(x{tag} @ {w}); d{tag} = a{tag} @ {u} - t{tag}
        loss_{tag} = ReduceMean({loss.replace("d", "d" + tag)}, keepdims=0)
        dy{tag} = d{tag} * two_over_n; q{tag} = a{tag}.T @ dy{tag}
        p{tag} = x{tag}.T @ ((dy{tag} @ {u}.T) * (one - a{tag} * a{tag}))
    """


def two_losses(
    text: str, last: str = LAST, inputs: str = "", outputs: str = "float loss_a, float loss_b"
) -> onnx.ModelProto:
    """A step with two losses: its passes, and the update behind them."""
    following = [f"float[{shape}] {name}_next" for name, shape in SHAPES.items() if f"{name}_next" in last]
    return parse(f"""
        <ir_version: 10, opset_import: ["" : 20]>
        step ({listed("float[8,4] x, float[8,3] t, float[4,5] w, float[5,3] u", inputs)})
            => ({listed(outputs, *following)})
        <float rate = {{0.1}}, float one = {{1}}, float two_over_n = {{0.16666667}}, int64[1] zero = {{0}},
         int64[1] four = {{4}}, int64[1] flat = {{-1}},
         int64[2] whole = {{4, 5}}, int64[1] eight = {{8}}, float[3,3] k = {{1, 0, 1, 2, 1, 0, 0, 1, 1}}>
        {{ {nodes(text + last)} }}
    """)


def losses_of(report: gs.Report) -> list[str]:
    """The outputs that are certainly losses."""
    return [entry.name for entry in report.roles if entry.role == "loss" and entry.certain]


@pytest.mark.parametrize(
    "outputs",
    [
        "float loss_a, float loss_b",
        "float error_a, float error_b, float loss_a, float loss_b",
        "float error_b, float loss_b, float loss_a",
    ],
)
def test_micro_batches(outputs: str) -> None:
    errors = "error_a = ReduceMean(Abs(da), keepdims=0); error_b = ReduceMean(Abs(db), keepdims=0);"
    report = assert_same_step(two_losses(half("a") + half("b") + errors, outputs=outputs))
    assert [place.value for place in report.places] == ["two_over_n", "two_over_n"]
    assert (report.contractions, report.missed) == (6, ())
    # An error and a loss of one half lead to the same edits.
    assert sorted(name[-1] for name in losses_of(report)) == ["a", "b"]


def test_one_loss_that_is_named_stands_for_all() -> None:
    report = gs.scale(two_losses(half("a") + half("b")), loss="loss_b").report
    assert (report.loss, report.contractions, losses_of(report)) == ("loss_b", 6, ["loss_a", "loss_b"])


def test_several_losses_that_are_named() -> None:
    model = two_losses(half("a") + half("b"))
    named = gs.scale(model, loss=["loss_b", "loss_a"]).report
    assert losses_of(named) == ["loss_a", "loss_b"]
    assert gs.inspect(model, loss=("loss_b", "loss_a")).gradients == named.gradients
    with pytest.raises(LossError, match="nothing"):
        gs.inspect(model, loss=["loss_a", "nothing"])
    with pytest.raises(LossError, match="a list of names; got 3"):
        gs.inspect(model, loss=3)  # type: ignore[arg-type]


PROJECTED = """
    ga = Reshape(pa, flat); gb = Reshape(pb, flat); both = ga @ gb
    cosine = both / (ReduceL2(ga, keepdims=0) * ReduceL2(gb, keepdims=0))
    g = ga + gb - ga * (both / (ga @ ga)) - gb * (both / (gb @ gb))
    w_next = w - Reshape(g, whole) * rate; u_next = u - (qa + qb) * rate
"""


def test_the_cosine_of_two_gradients_is_no_loss() -> None:
    """Its own cone explains both backward passes, and it measures them."""
    outputs = "float loss_a, float loss_b, float cosine"
    model = two_losses(half("a") + half("b"), PROJECTED, outputs=outputs)
    report = assert_same_step(model)
    assert (losses_of(report), report.contractions, report.missed) == (["loss_a", "loss_b"], 6, ())
    assert {"ga", "gb"} <= {gradient.value for gradient in report.gradients}


def test_layers_that_learn_one_after_the_other() -> None:
    """The second loss is computed by the next weights of the first: it alone moves no weight of the first."""
    text = """
        a1 = Tanh(x @ w); d1 = a1 - one; loss_a = ReduceMean(d1 * d1, keepdims=0)
        w_next = w - (x.T @ ((d1 * two_over_n) * (one - a1 * a1))) * rate
        a2 = Tanh(x @ w_next) @ u; d2 = a2 - t; loss_b = ReduceMean(d2 * d2, keepdims=0)
        u_next = u - (Tanh(x @ w_next).T @ (d2 * two_over_n)) * rate
    """
    outputs = "float loss_a, float loss_b, float[4,5] w_next, float[5,3] u_next"
    report = assert_same_step(two_losses(text, "", outputs=outputs))
    assert losses_of(report) == ["loss_a", "loss_b"]
    assert (report.contractions, report.missed) == (2, ())


EVALUATION = """
    d = Tanh(x @ w) @ u - t; loss_a = ReduceMean(d * d, keepdims=0) / count; total_next = total + loss_a * rate
"""


def test_an_evaluation_is_no_training() -> None:
    outputs = "float loss_a, float total_next"
    model = two_losses(EVALUATION, "", inputs="float total, float count", outputs=outputs)
    with pytest.raises(SeedNotFoundError, match="move no weight that it depends on"):
        gs.scale(model)


def test_a_filter_without_derivatives() -> None:
    """Recursive least squares: the gain is computed from the input, which is no target."""
    text = """
        e = y - x @ w; loss_a = ReduceSum(e * e, keepdims=0)
        k = (p @ x) / (forget + x @ (p @ x)); w_next = w + k * e
        p_next = (p - Reshape(k, column) * (p @ x)) / forget
    """
    model = parse(f"""
        <ir_version: 10, opset_import: ["" : 20]>
        step (float[5] x, float y, float[5] w, float[5,5] p, float forget)
            => (float[5] w_next, float[5,5] p_next, float loss_a)
        <int64[2] column = {{5, 1}}> {{ {nodes(text)} }}
    """)
    with pytest.raises(SeedNotFoundError, match="where the data is"):
        gs.scale(model)


def test_networks_side_by_side() -> None:
    last = "w_next = w - pa * rate; u_next = u - qa * rate; v_next = v - pb * rate; s_next = s - qb * rate"
    report = assert_same_step(two_losses(half("a") + half("b", "v", "s"), last, inputs="float[4,6] v, float[6,3] s"))
    assert {gradient.value for gradient in report.gradients} == {"pa", "qa", "pb", "qb"}
    assert (report.contractions, losses_of(report)) == (6, ["loss_a", "loss_b"])


@pytest.mark.full
def test_muon_on_the_gradients_of_micro_batches() -> None:
    muon = "g = pa + pb; n = g / Sqrt(ReduceSum(g * g, keepdims=0) + rate); o = n @ n.T @ n; "
    report = assert_same_step(
        two_losses(half("a") + half("b"), muon + "w_next = w - (o @ o.T @ o) * rate; u_next = u - (qa + qb) * rate")
    )
    assert report.contractions == 6


DEEP = {" = a{} @": " = (a{} @", "- t{}": "- t{}) @ k", "dy{} = d{} * two_over_n": "dy{} = (d{} * two_over_n) @ k.T"}


def deep(tag: str, **options: str) -> str:
    """The same with one more layer, whose weight is constant."""
    text = half(tag, **options)
    for before, after in DEEP.items():
        text = text.replace(before.format(tag, tag), after.format(tag, tag))
    return text


@pytest.mark.parametrize(
    ("text", "last", "contractions"),
    [
        pytest.param(deep("b") + deep("a", loss="Abs(d)"), LAST, 8, id="computed in another way"),
        pytest.param(
            deep("b") + deep("a"), LAST + "; z_next = z - dya.T @ dyb", 9, id="a product of cotangents of both"
        ),
    ],
)
def test_losses_that_are_not_alike(text: str, last: str, contractions: int) -> None:
    report = assert_same_step(two_losses(text, last, "float[3,3] z"))
    assert (losses_of(report), report.contractions, report.missed) == (["loss_a", "loss_b"], contractions, ())


def test_a_gradient_that_is_not_linear() -> None:
    text = deep("b") + deep("a").replace("xa.T @ (", "xa.T @ Tanh(")
    with pytest.raises(NonlinearGradientError, match="other candidates for the loss"):
        gs.scale(two_losses(text, LAST, "float[3,3] z"))


def test_a_loss_without_a_backward_pass_of_its_own() -> None:
    last = "k_ = Where(Less(loss_b, loss_a), rate, one); w_next = w - pa * k_; u_next = u - qa * k_"
    report = assert_same_step(two_losses(deep("b") + deep("a"), last, "float[3,3] z"))
    assert (report.loss, report.missed) == ("loss_a", ())


def test_the_tail_is_that_of_all_losses() -> None:
    graph = ir.from_proto(two_losses(half("a") + half("b"))).graph
    topology = Topology(graph, graph.outputs[0], others=graph.outputs[1:2])
    names = {value.name for value in topology.tail}
    assert {"da", "db"} <= names
    assert names.isdisjoint({"aa", "ab"})
