"""Losses of different forms, each with gradients of its own, as in adversarial networks."""

from __future__ import annotations

import re

import onnx
import pytest

import graphscale as gs
from graphscale.errors import RolesError
from tests.analysis.test_several_losses import losses_of
from tests.build import assert_same_step, feeds_for, listed, parse
from tests.conftest import with_initializers
from tests.expressions import nodes

pytestmark = [pytest.mark.static, pytest.mark.sample(1)]

FORWARD = """
    made = Tanh(z @ g); real = Tanh(x @ v); fake = Tanh(made @ v); r = real @ c; f = fake @ c
    of_real = ReduceMean((r - one) * (r - one), keepdims=0); of_fake = ReduceMean(f * f, keepdims=0)
    critic = of_real + of_fake; e = f - one; maker = ReduceMean(e * e, keepdims=0);
"""
CRITIC = """
    er = (r - one) * third; ef = f * third; dc = real.T @ er + fake.T @ ef; slope = one - fake * fake
    dv = x.T @ ((er @ c.T) * (one - real * real)) + made.T @ ((ef @ c.T) * slope);
"""
MAKER = "eg = e * third; dg = z.T @ ((((eg @ c.T) * slope) @ v.T) * (one - made * made));"
UPDATE = "c_next = c - dc * rate; v_next = v - dv * rate; g_next = g - dg * rate;"
NEXT = "float[5,1] c_next, float[4,5] v_next, float[3,4] g_next"
# A network of its own, whose loss has a form that no other one has.
TWIN = """
    h = Tanh(x @ k); y = h @ l - one; twin = ReduceMean(y * y, keepdims=0); ey = y * third; dl = h.T @ ey
    dk = x.T @ ((ey @ l.T) * (one - h * h)); k_next = k - dk * rate; l_next = l - dl * rate;
"""
TWINS = {"inputs": "float[4,5] k, float[5,1] l", "following": listed(NEXT, "float[4,5] k_next, float[5,1] l_next")}
SET = ["critic", "maker"]


def adversarial(
    more: str = "", outputs: str = "float critic, float maker", inputs: str = "", following: str = NEXT, **edits: str
) -> onnx.ModelProto:
    """A critic and what it judges, each with its loss and its update; an edit replaces the expression of a name."""
    text = FORWARD + CRITIC + MAKER + UPDATE + more
    for name, expression in edits.items():
        text = re.sub(rf"\b{name} = [^;\n]*", f"{name} = {expression}", text)
    return parse(f"""
        <ir_version: 10, opset_import: ["" : 20]>
        step ({listed("float[6,4] x, float[6,3] z, float[3,4] g, float[4,5] v, float[5,1] c", inputs)})
            => ({listed(outputs, following)})
        <float rate = {{0.1}}, float one = {{1}}, float third = {{0.33333334}}, float two = {{2}}, float nought = {{0}},
         float[6,1] seed = {{{listed(*["-0.16666667"] * 6)}}}> {{ {nodes(text)} }}
    """)


def with_metric(text: str, name: str = "metric", **options: str) -> onnx.ModelProto:
    """The step with one more output, before the losses."""
    return adversarial(text, f"float {name}, float maker, float critic", **options)


# No cotangent reads values of the second loss alone: the same edits explain it, and it is named a metric.
LINEAR = adversarial(e="f * one", maker="Neg(ReduceMean(f, keepdims=0))", eg="seed * one")


@pytest.mark.full
@pytest.mark.parametrize(("model", "losses"), [(adversarial(), SET), (LINEAR, ["critic"])], ids=["squares", "linear"])
def test_each_loss_gets_the_scale(model: onnx.ModelProto, losses: list[str]) -> None:
    report = assert_same_step(model)
    assert {gradient.value for gradient in report.gradients} == {"dc", "dv", "dg"}
    assert (sorted(losses_of(report)), report.contractions, report.missed) == (losses, 9, ())


SCORE = "metric = ReduceMean(Sigmoid(f), keepdims=0)"
STEPS = {
    "the other order": adversarial(outputs="float maker, float critic"),
    "a score": with_metric(SCORE),
    "a function of a loss": with_metric("metric = Exp(maker)"),
    "the sum of both": with_metric("metric = critic + maker"),
    "a term of one": with_metric("", "of_fake"),
    "a norm": with_metric("metric = Sqrt(ReduceSum(dg * dg, keepdims=0))"),
    "the norm of a weight": with_metric("metric = ReduceSum(v * v, keepdims=0)"),
    "a validation loss": with_metric(
        "q = Tanh(u @ v) @ c - one; metric = ReduceMean(q * q, keepdims=0)", inputs="float[6,4] u"
    ),
}


@pytest.mark.parametrize("name", STEPS)
def test_a_metric_is_no_loss(name: str) -> None:
    report = gs.inspect(STEPS[name])
    # The sum of both explains all alone.
    assert (sorted(losses_of(report)), report.contractions) == (["metric"] if name == "the sum of both" else SET, 9)
    assert all(entry.certain for entry in report.roles)


def test_names_mean_nothing() -> None:
    text = onnx.printer.to_text(with_metric(SCORE))
    for i, name in enumerate(("maker", "critic", "metric", "dc", "dv", "dg", "c", "v", "g", "x", "z")):
        text = re.sub(rf"\b{name}\b", f"t{i}", text)
    report = gs.inspect(onnx.parser.parse_model(text))
    assert sorted(losses_of(report)) == ["t0", "t1"]


@pytest.mark.full
def test_a_loss_that_cannot_be_scaled_alone() -> None:
    report = assert_same_step(adversarial(TWIN, "float critic, float maker, float twin", **TWINS))
    assert (sorted(losses_of(report)), report.contractions) == ([*SET, "twin"], 12)


SIDE = """
    h = Tanh(x @ v); y = h @ c - one; first = ReduceMean(y * y, keepdims=0); e = y * third; dc = h.T @ e
    dv = x.T @ ((e @ c.T) * (one - h * h)); k = z @ g; q = Abs(k); second = ReduceMean(q * k * k, keepdims=0)
    dg = z.T @ ((k * q) * eighth); both = first + second;
"""


def side_by_side(outputs: str) -> onnx.ModelProto:
    """Two networks that share nothing, and are not alike."""
    return parse(f"""
        <ir_version: 10, opset_import: ["" : 20]>
        step (float[6,4] x, float[6,3] z, float[3,4] g, float[4,5] v, float[5,1] c) => ({outputs}, {NEXT})
        <float rate = {{0.1}}, float one = {{1}}, float third = {{0.33333334}}, float eighth = {{0.125}}>
        {{ {nodes(SIDE + UPDATE)} }}
    """)


@pytest.mark.parametrize(
    ("outputs", "losses"),
    [
        ("float first, float second", ["first", "second"]),
        ("float second, float first", ["first", "second"]),
        ("float second, float both, float first", ["both"]),
    ],
)
def test_networks_that_share_nothing(outputs: str, losses: list[str]) -> None:
    """A gradient that fits no weight of one loss is that of another; the sum of both explains all alone."""
    report = gs.inspect(side_by_side(outputs))
    assert (sorted(losses_of(report)), report.contractions) == (losses, 4)


@pytest.mark.parametrize(
    "edit",
    [
        pytest.param({"eg": "(e * third) * two"}, id="twice the gradient"),
        pytest.param({"dg": "z.T @ (((eg @ c.T) * slope) @ v.T)"}, id="a straight-through estimator"),
    ],
)
def test_a_gradient_that_is_no_derivative(edit: dict[str, str]) -> None:
    """The places and the gradients are those of both losses, whatever the gradients are."""
    report = assert_same_step(adversarial(**edit))
    assert (sorted(losses_of(report)), report.missed) == (SET, ())
    assert {gradient.value for gradient in report.gradients} == {"dc", "dv", "dg"}


@pytest.mark.full
@pytest.mark.parametrize(
    ("model", "losses"),
    [
        pytest.param(with_metric("metric = critic * one"), ["maker", "metric"], id="one loss twice"),
        pytest.param(
            adversarial(er="(r - one) * third * two", dc="real.T @ ((r - one) * third) + fake.T @ ef"),
            SET,
            id="one gradient of two",
        ),
        pytest.param(
            adversarial("", "float maker, float of_real, float of_fake"),
            ["maker", "of_real"],
            id="terms whose sum is no output",
        ),
    ],
)
def test_losses_that_no_derivative_proves(model: onnx.ModelProto, losses: list[str]) -> None:
    report = assert_same_step(model)
    assert (sorted(losses_of(report)), report.contractions, report.missed) == (losses, 9, ())


@pytest.mark.full
@pytest.mark.parametrize("name", SET)
def test_each_of_the_losses_may_be_a_running_sum(name: str) -> None:
    values = {"critic": "nought + (of_real + of_fake)", "maker": "nought + ReduceMean(e * e, keepdims=0)"}
    fed = adversarial(**{name: values[name]})
    assert sorted(losses_of(gs.inspect(fed))) == SET
    weights = [value for value in fed.graph.input if value.name in "gvc"]
    stored = with_initializers(fed, {name: array for name, array in feeds_for(fed).items() if name in "gvc"})
    for value in weights:
        stored.graph.input.remove(value)
    with pytest.raises(RolesError, match=r"loss\? it may be a running sum or average, and the next value of 'nought'"):
        gs.scale(stored)


@pytest.mark.parametrize("losses", [SET, SET[::-1]])
def test_losses_that_are_named_get_the_scale_together(losses: list[str]) -> None:
    report = assert_same_step(LINEAR, roles={"losses": losses})
    assert (report.loss, report.loss_found, sorted(losses_of(report))) == (losses[0], "named", SET)
    assert {gradient.value for gradient in report.gradients} == {"dc", "dv", "dg"}
