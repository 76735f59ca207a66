"""Weights that are learnt without a contraction in their backward pass, and other states that move by the data."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import onnx
import pytest

import graphscale as gs
from graphscale.errors import RolesError
from tests.analysis.roles.steps import update_step
from tests.build import assert_same_step, feeds_for
from tests.cases.steps import assert_skipped, losses_of
from tests.conftest import run_once
from tests.expressions import nodes

SQUARE = "d = y - t; loss = ReduceMean(d * d, keepdims=0);"
BACK = "dy = d * two_over_n; dw = x.T @ dy;"
BIAS = f"y = x @ w + b; {SQUARE}"
# The mean of a gradient by a path of its own, as an exporter writes it that folds constants.
MEAN = f"{BACK} db = ReduceMean(d, axes, keepdims=0) * twice;"
HALF = "float half = {0.5}"
TWICE = "float twice = {0.6666667}"
HUBER = "y = x @ w; d = y - t; c = Min(d, s); loss = ReduceMean(c * (d - c * half), keepdims=0);"
# A loss over a number of the state, and the backward pass of the network.
OVER = """
    y = x @ w; d = y - t; fit = ReduceMean(d * d, keepdims=0); loss = fit / s; dy = (d * two_over_n) / s; dw = x.T @ dy
"""
SHARES = "float low = {0.01}, float high = {0.99}"


class Case(NamedTuple):
    """A step: its nodes but for the update of the weight, its states and batches, constants, and further outputs."""

    text: str
    inputs: str
    constants: str = ""
    outputs: str = ""

    def make(self) -> onnx.ModelProto:
        update = f"{self.text}; w_next = w - dw * rate"
        named = {"inputs": self.inputs, "outputs": self.outputs, "constants": self.constants}
        return update_step(update=update, forward="", backward="", **named)


# A step of each kind, and its gradients.
LEARNT = {
    "bias": (Case(f"{BIAS} {MEAN} b_next = b - db * rate", "float[3] b", TWICE), "db"),
    "rate that is fed": (Case(f"{BIAS} {MEAN} b_next = b - db * eta", "float[3] b, float eta", TWICE), "db"),
    "decay": (
        Case(f"{BIAS} {MEAN} b_next = b * keep - db * rate", "float[3] b", f"{TWICE}, float keep = {{0.999}}"),
        "db",
    ),
    "momentum": (
        Case(f"{BIAS} {MEAN} m_next = m * beta + db; b_next = b - m_next * rate", "float[3] b, float[3] m", TWICE),
        "db",
    ),
    "Adam": (
        Case(
            f"""{BIAS} {MEAN} m_next = m * beta + db * low; v_next = v * beta + db * db * low
            b_next = b - m_next / (Sqrt(v_next) + low) * rate""",
            "float[3] b, float[3] m, float[3] v",
            f"{TWICE}, float low = {{0.1}}",
        ),
        "db",
    ),
    "sign": (Case(f"{BIAS} {MEAN} b_next = b - Sign(db) * rate", "float[3] b", TWICE), "db"),
    "norm of its own": (
        Case(f"{BIAS} {MEAN} b_next = b - db / (ReduceL2(db, keepdims=0) + one) * rate", "float[3] b", TWICE),
        "db",
    ),
    "norm of all gradients": (
        Case(
            f"""{BIAS} {MEAN} norm = Sqrt(ReduceSum(dw * dw, keepdims=0) + ReduceSum(db * db, keepdims=0))
            b_next = b - (db * (one / Max(norm, one))) * rate""",
            "float[3] b",
            TWICE,
        ),
        "db",
    ),
    "residual": (
        Case(
            """y = x @ w + b; d = y - t; loss = ReduceSum(d * d, keepdims=0) * half
            dw = x.T @ d; db = ReduceSum(d, axes, keepdims=0); b_next = b - db * rate""",
            "float[3] b",
            HALF,
        ),
        "db",
    ),
    "gain": (
        Case(
            f"""h = x @ w; y = h * g; {SQUARE} dw = x.T @ ((d * two_over_n) * g)
            dg = ReduceMean(d * h, axes, keepdims=0) * twice; g_next = g - dg * rate""",
            "float[3] g",
            TWICE,
        ),
        "dg",
    ),
    "slope of a kink": (
        Case(
            f"""h = x @ w; neg = Min(h, zero); y = Max(h, zero) + neg * a; {SQUARE}
            dw = x.T @ ((d * two_over_n) * Where(Less(h, zero), a, one))
            da = ReduceMean(d * neg, axes, keepdims=0) * twice; a_next = a - da * rate""",
            "float[3] a",
            f"{TWICE}, float zero = {{0}}",
        ),
        "da",
    ),
    "temperature": (
        Case(
            """h = x @ w; z = h * Exp(s); p = Softmax(z, axis=1); q = Softmax(t, axis=1)
            loss = Neg(ReduceMean(ReduceSum(q * Log(p), last, keepdims=0), keepdims=0))
            dz = (p - q) * eighth; dw = x.T @ (dz * Exp(s))
            ds = ReduceMean(ReduceSum((p - q) * z, last, keepdims=0), axes, keepdims=1); s_next = s - ds * rate""",
            "float[1] s",
            "float eighth = {0.125}, int64[1] last = {1}",
        ),
        "ds",
    ),
    # loss = exp(-s) * fit + s: the weight of a task as the log of a variance
    "weight of a task": (
        Case(
            """y = x @ w; d = y - t; fit = ReduceMean(d * d, keepdims=0); precision = Exp(Neg(s))
            loss = ReduceSum(precision * fit + s, keepdims=0); weight = ReduceSum(precision, keepdims=0)
            dy = (d * two_over_n) * weight; dw = x.T @ dy; ds = one - precision * fit; s_next = s - ds * rate""",
            "float[1] s",
            outputs="float fit",
        ),
        "ds",
    ),
    "weights of two tasks": (
        Case(
            """y = x @ w; d = y - t; e = y - u; fa = ReduceMean(d * d, keepdims=0); fb = ReduceMean(e * e, keepdims=0)
            pa = Exp(Neg(a)); pb = Exp(Neg(b)); loss = ReduceSum(pa * fa + pb * fb + a + b, keepdims=0)
            dy = d * two_over_n * pa + e * two_over_n * pb; dw = x.T @ dy; da = one - pa * fa; db = one - pb * fb
            a_next = a - da * rate; b_next = b - db * rate""",
            "float[1] a, float[1] b, float[8,3] u",
            outputs="float fa, float fb",
        ),
        "da, db",
    ),
    # Two positions of a chain: emissions by the network, transitions by a table.
    "transitions": (
        Case(
            """first = Unsqueeze(x @ w, last); pair = first + Unsqueeze(t, axis) + c
            norm = ReduceLogSumExp(pair, both, keepdims=1); gold = ReduceSum(pair * m, both, keepdims=1)
            loss = ReduceMean(norm - gold, keepdims=0); p = Exp(pair - norm) - m
            dw = x.T @ (ReduceSum(p, last, keepdims=0) * eighth); dc = ReduceMean(p, axes, keepdims=0)
            c_next = c - dc * rate""",
            "float[3,3] c, float[8,3,3] m",
            "float eighth = {0.125}, int64[1] last = {2}, int64[1] axis = {1}, int64[2] both = {1, 2}",
        ),
        "dc",
    ),
    "learnt codebook": (
        Case(
            f"""z = x @ w; s = z @ c.T; hot = Cast(Equal(s, ReduceMax(s, last, keepdims=1)), to=1); d = z - hot @ c
            loss = ReduceMean(d * d, keepdims=0); {BACK} dc = hot.T @ (d * less); c_next = c - dc * rate""",
            "float[5,3] c",
            "float less = {-0.08}, int64[1] last = {1}",
        ),
        "dc",
    ),
}

# A state of each kind that the loss reads, or a scalar beside it, and that moves by the batch without a gradient.
OTHERS = {
    "running total": Case(
        f"y = x @ w; {SQUARE} {BACK} s_next = s + loss; n_next = n + one; shown = s_next / n_next",
        "float s, float n",
        outputs="float shown",
    ),
    "running total of samples": Case(
        f"y = x @ w; {SQUARE} {BACK} s_next = s + loss * eight", "float s", "float eight = {8}"
    ),
    "total that the loss reads": Case(
        """y = x @ w; d = y - t; fit = ReduceMean(d * d, keepdims=0); loss = fit / (one + s)
        dy = (d * two_over_n) / (one + s); dw = x.T @ dy; s_next = s + fit""",
        "float s",
    ),
    "average": Case(f"{OVER} s_next = s * high + fit * low", "float s", SHARES),
    "average of a norm": Case(f"{OVER} s_next = s * high + ReduceMean(Abs(d), keepdims=0) * low", "float s", SHARES),
    "average by difference": Case(f"{OVER} s_next = s + (ReduceMean(Abs(d), keepdims=0) - s) * low", "float s", SHARES),
    "average of the loss": Case(f"{OVER} s_next = s + (loss - s) * low", "float s", SHARES),
    "average over all steps": Case(
        f"{OVER} n_next = n + one; s_next = s + (loss - s) * (one / n_next)", "float s, float n"
    ),
    "threshold": Case(
        f"{HUBER} dw = x.T @ (c * two_over_n); s_next = s + (ReduceMean(Abs(d), keepdims=0) - s) * half",
        "float s",
        HALF,
    ),
    "quantile": Case(
        f"""{HUBER} dw = x.T @ (c * two_over_n); below = ReduceMean(Cast(Less(d, s), to=1), keepdims=0)
        s_next = s + (half - below) * rate""",
        "float s",
        HALF,
    ),
    "load of experts": Case(
        f"""{BIAS} {BACK} load = ReduceSum(Cast(Equal(y, ReduceMax(y, last, keepdims=1)), to=1), axes, keepdims=0)
        b_next = b + Sign(ReduceMean(load, axes, keepdims=1) - load) * rate""",
        "float[3] b",
        "int64[1] last = {1}",
    ),
    "counts of clusters": Case(
        f"""y = x @ w / (one + n); {SQUARE} dy = d * two_over_n / (one + n); dw = x.T @ dy
        n_next = n + ReduceSum(Cast(Equal(y, ReduceMin(y, last, keepdims=1)), to=1), axes, keepdims=0)""",
        "float[3] n",
        "int64[1] last = {1}",
    ),
    "statistics of the input": Case(
        f"""u = x - s; y = u @ w; {SQUARE} dy = d * two_over_n; dw = u.T @ dy
        s_next = s + (ReduceMean(x, axes, keepdims=0) - s) * low""",
        "float[4] s",
        SHARES,
    ),
    "statistics of a layer": Case(
        f"h = x @ w; y = h - s; {SQUARE} {BACK} s_next = s * high + ReduceMean(h, axes, keepdims=0) * low",
        "float[3] s",
        SHARES,
    ),
    "frozen": Case(f"{BIAS} {BACK} b_next = Identity(b)", "float[3] b"),
    "schedule": Case(
        """y = x @ w; d = y - t; loss = ReduceMean(d * d * s, keepdims=0); dy = d * two_over_n * s; dw = x.T @ dy
        s_next = s * high""",
        "float s",
        SHARES,
    ),
    "decay alone": Case(
        f"""y = x @ w; d = y - t; loss = ReduceMean(d * d, keepdims=0) + ReduceSum(b * b, keepdims=0) * low; {BACK}
        b_next = b - b * low * rate""",
        "float[3] b",
        SHARES,
    ),
    "teacher": Case(
        f"""y = x @ w; d = y - x @ e; loss = ReduceMean(d * d, keepdims=0); {BACK} after = w - dw * rate
        e_next = e * high + after * low""",
        "float[4,3] e",
        SHARES,
    ),
    "controller": Case(
        """y = x @ w; d = y - t; fit = ReduceMean(d * d, keepdims=0); loss = fit * s; dy = (d * two_over_n) * s
        dw = x.T @ dy; s_next = s * (one + (fit - one) * low)""",
        "float s",
        SHARES,
    ),
    # Its gradient is a value of the forward pass.
    "multiplier": Case(
        """y = x @ w; d = y - t; c = ReduceMean(y * y, keepdims=0) - one; loss = ReduceMean(d * d, keepdims=0) + s * c
        dw = x.T @ (d * two_over_n + y * (two_over_n * s)); s_next = s + c * rate""",
        "float s",
    ),
    "prediction": Case(f"{BIAS} {BACK} shown = b - y * half", "float[8,3] b", HALF, "float[8,3] shown"),
    "error": Case(f"{BIAS} {BACK} shown = b - d * half", "float[8,3] b", HALF, "float[8,3] shown"),
    "centre": Case(f"{BIAS} {BACK} b_next = b - ReduceMean(y, axes, keepdims=0)", "float[3] b"),
}

# A head of its own, with no contraction in it: on the batch, and on features.
HEADS = {
    "on the batch": Case(
        f"""y = x @ w; {SQUARE} r = x * g - u; loss1 = ReduceMean(r * r, keepdims=0)
        {BACK} dg = ReduceMean(r * x, axes, keepdims=0) * twice; g_next = g - dg * rate""",
        "float[4] g, float[8,4] u",
        TWICE,
        "float loss1",
    ),
    "on features": Case(
        f"""y = x @ w; {SQUARE} r = y * g - u; loss1 = ReduceMean(r * r, keepdims=0)
        {BACK} dg = ReduceMean(r * y, axes, keepdims=0) * twice; g_next = g - dg * rate""",
        "float[3] g, float[8,3] u",
        TWICE,
        "float loss1",
    ),
}
IN_A_BRANCH = """
    b_next = If(go) <
        then_branch: graph = moved () => (float[3] after) {
            db = ReduceMean<keepdims = 0>(d, axes) u = Mul(db, rate) after = Sub(b, u)
        },
        else_branch: graph = same () => (float[3] before) { before = Identity(b) }
    >
"""


@pytest.mark.parametrize("name", LEARNT)
def test_a_weight_without_a_contraction_has_a_gradient(name: str) -> None:
    case, gradients = LEARNT[name]
    report = assert_same_step(case.make())
    assert {gradient.value for gradient in report.gradients} == {"dw", *gradients.split(", ")}
    assert (report.loss, report.coverage, report.missed) == ("loss", 1, ())


@pytest.mark.parametrize("name", OTHERS)
def test_a_statistic_has_none(name: str) -> None:
    report = gs.inspect(OTHERS[name].make())
    assert [gradient.value for gradient in report.gradients] == ["dw"]
    assert (report.loss, report.coverage, report.warnings) == ("loss", 1, ())
    assert all(entry.certain for entry in report.roles if entry.role == "loss")


def test_the_average_of_a_codebook_is_checked() -> None:
    """It is a contraction of the backward pass, and linear in the activations."""
    report = assert_same_step(
        Case(
            f"""z = x @ w; s = z @ c.T; hot = Cast(Equal(s, ReduceMax(s, last, keepdims=1)), to=1); d = z - hot @ c
            loss = ReduceMean(d * d, keepdims=0); {BACK} fresh = hot.T @ z; c_next = c * high + fresh * low""",
            "float[5,3] c",
            f"{SHARES}, int64[1] last = {{1}}",
        ).make()
    )
    assert {gradient.value for gradient in report.gradients} == {"dw", "fresh"}


@pytest.mark.parametrize("name", HEADS)
def test_a_head_without_a_contraction_is_a_loss(name: str) -> None:
    model = HEADS[name].make()
    assert losses_of(model) == {"loss", "loss1"}
    report = assert_same_step(model)
    assert {gradient.value for gradient in report.gradients} == {"dw", "dg"}
    feeds = feeds_for(model)
    feeds["u"][0, 0] = np.nan
    result = gs.scale(model)
    assert_skipped(result, feeds, run_once(result.model, feeds)[0])


def test_its_gradient_is_checked() -> None:
    """The gradient of the weight alone is infinite where the fit overflows and the other gradient is finite."""
    model = LEARNT["weight of a task"][0].make()
    result, drawn = gs.scale(model, gs.DynamicLossScale(1.0)), feeds_for(model)
    feeds = {**drawn, "s": np.full(1, -80, np.float32), "x": np.zeros_like(drawn["x"])}
    feeds["t"] = np.full_like(drawn["t"], 1e3)
    original, _ = run_once(model, feeds)
    assert np.isfinite(original["w_next"]).all() and np.isinf(original["s_next"]).all()
    assert_skipped(result, feeds, run_once(result.model, feeds)[0])


def test_a_weight_that_no_edit_explains_is_asked_about() -> None:
    """Its gradient would be unscaled in a branch, where no step can be skipped."""
    model = update_step(
        inputs="float[3] b, bool go",
        forward=nodes(BIAS),
        backward="",
        update=f"{BACK} w_next = w - dw * rate",
        control=IN_A_BRANCH,
    )
    with pytest.raises(RolesError, match="'u' moves a weight of 'loss', and no gradient explains it"):
        gs.scale(model)
    report = gs.inspect(model, loss="loss")
    assert [warning for warning in report.warnings if "'u'" in warning and "neither scaled nor checked" in warning]
