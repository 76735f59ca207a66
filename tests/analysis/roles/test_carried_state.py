"""The evidence that an output is the next value of an input, and questions about open outputs."""

from __future__ import annotations

import pytest

from tests.analysis.roles.steps import (
    MOMENTUM,
    SGD,
    computed_average_step,
    evidence_of,
    hidden_state_step,
    look_ahead_step,
    roles_of,
    states,
    swappable_step,
    update_step,
)
from tests.build import LINEAR, numbers
from tests.expressions import nodes

pytestmark = pytest.mark.static

PREVIOUS, DEPENDS = "depends on its own previous value", "it depends on its previous value"
MOVED = SGD.replace("w_next", "moved")
CAST = "wide = Cast<to = 1>(half)\n" + LINEAR.replace("x, w", "x, wide")
FIRST = "u = dw * rate; w_next = Where(first, w - u - u, w - u)\n"
TWO = "float[4,3] a, float[4,3] b"
FROZEN = {
    "forward": LINEAR.replace("Sub(y, t)", "Sub(z, t)").replace("d =", "z = MatMul(y, k) d ="),
    "backward": nodes("dy = d * two_over_n; dw = x.T @ (dy @ k.T)"),
}
BRANCH = """
    w_next = If(flag) <
        then_branch = move () => (float[4,3] moved) { moved = Sub(w, u) },
        else_branch = stay () => (float[4,3] same) { same = Identity(w) }
    >
"""
BRANCHES = """
    a_next, b_next = If(flag) <
        then_branch = keep () => (float[4,3] a1, float[4,3] b1) { a1 = Identity(a) b1 = Identity(b) },
        else_branch = swap () => (float[4,3] a2, float[4,3] b2) { a2 = Identity(b) b2 = Identity(a) }
    >
"""


STEPS = {
    # --- own coefficient
    "a weight": (update_step(), states("w")),
    # One half of each: the weight is taken by its own next value.
    "an average that holds the weight too": (
        update_step("ema_next = half * ema + half * w_next", "float[4,3] ema", constants="float half = {0.5}"),
        states("w", "ema"),
    ),
    "two outputs that hold both inputs": (update_step("a_next = a + b; b_next = b + a", TWO), states("w", "a?", "b?")),
    "two outputs that hold one weight": (look_ahead_step(), {**states("w?"), "w_ahead": "metric?"}),
    "an optimizer operator": (
        update_step(
            update="",
            control="w_next = com.microsoft.SGDOptimizer(rate, w, dw)",
            domains=["com.microsoft"],
        ),
        states("w"),
    ),
    "a weight with a floor": (
        update_step(update=MOVED + "w_next = Max(moved, low)", constants="float low = {-1}"),
        states("w"),
    ),
    "a weight whose share is subtracted and negated": (
        update_step(update="w_next = Neg(dw * rate - w * low)", constants="float low = {0.3}"),
        states("w"),
    ),
    # --- share
    # The second one smooths the first, so that dependence alone would leave two assignments.
    "moments of low beta": (
        update_step(
            "v_next = v * low + m_next * tenth",
            "float[4,3] m, float[4,3] v",
            constants="float low = {0.3}, float tenth = {0.1}",
            update=MOMENTUM.replace("beta", "low"),
        ),
        states("w", "m", "v"),
    ),
    # The larger share decides.
    "moments that hold a share of each other": (
        update_step("a_next = a * beta + b * low; b_next = b * beta + a * low", TWO, constants="float low = {0.3}"),
        states("w", "a", "b"),
    ),
    "a metric that holds a share of a moment": (
        update_step("u2 = m * low + dw", "float[4,3] m", "float[4,3] u2", "float low = {0.3}", update=MOMENTUM),
        {**states("w", "m"), "u2": "metric"},
    ),
    "a buffer that decays": (update_step("k_next = k * beta", "float[4] k"), states("w", "k")),
    "a weight whose loss reads no batch": (
        update_step(
            update="w_next = w - (w * two) * rate",
            constants="float two = {2}",
            forward=nodes("loss = ReduceSum(w * w, keepdims=0)"),
            backward="",
        ),
        states("w"),
    ),
    "a moment whose share is hardly there": (
        update_step("", "float[4,3] m", constants="float low = {0.03}", update=MOMENTUM.replace("beta", "low")),
        states("w", "m"),
    ),
    "moments whose shares are hardly there": (
        update_step(
            "shares = a * low + b * low; a_next = shares + dw; b_next = shares - dw",
            TWO,
            constants="float low = {0.03}",
        ),
        states("w", "a?", "b?"),
    ),
    # --- largest: AMSGrad keeps the largest second moment
    "amsgrad": (
        update_step("v_next = v * beta + dw * dw; top_next = Max(top, v_next)", "float[4,3] v, float[4,3] top"),
        states("w", "v", "top"),
    ),
    "the larger of two inputs": (
        update_step("top_next = Max(top, least)", "float[4,3] top, float[4,3] least"),
        states("w", "top?"),
    ),
    # --- averaged weights
    "decay as an input": (
        update_step("ema_next = ema * decay + w_next * rest", "float[4,3] ema, float decay, float rest"),
        states("w", "ema"),
    ),
    "a step towards the weight": (
        update_step("ema_next = ema + (w_next - ema) * (one - decay)", "float[4,3] ema, float decay"),
        states("w", "ema"),
    ),
    # The share `1 - decay` of the weight may be near one, but the weight has a next value whose share is known.
    "shares that are computed": (computed_average_step(), states("w", "ema")),
    # The average's share of the weight may be 1 or 0, and the weight is replaced by it or not.
    "weights that their average replaces now and then": (
        update_step(
            update=MOVED
            + "kept = Cast(flag, to=1); share = kept * beta; ema_next = ema * share + moved * (one - share)\n"
            "turn = Cast(Not(flag), to=1); w_next = ema_next * turn + moved * kept",
            inputs="float[4,3] ema, bool flag",
        ),
        states("w?", "ema?"),
    ),
    # Both hold both, but the slow weights stay what they are where they are not moved.
    "slow weights that the weights are set to now and then": (
        update_step(
            update=MOVED + "slow_next = Where(flag, slow + (moved - slow) * half, slow)\n"
            "w_next = Where(flag, slow_next, moved)",
            inputs="float[4,3] slow, bool flag",
            constants="float half = {0.5}",
        ),
        states("w", "slow"),
    ),
    "slow weights that some elements are set to": (
        update_step(
            update=MOVED + "slow_next = Where(mask, slow + (moved - slow) * half, slow)\n"
            "w_next = Where(mask, slow_next, moved)",
            inputs="float[4,3] slow, bool[4,3] mask",
            constants="float half = {0.5}",
        ),
        states("w", "slow"),
    ),
    "weights rounded at random": (
        update_step(
            update=MOVED + "w_next = Floor(moved / one + noise * tenth)",
            inputs="float[4,3] noise",
            constants="float tenth = {0.1}",
        ),
        states("w"),
    ),
    # --- sums, where the weight has no next value
    "a sum of gradients": (update_step(inputs="float[4,3] sum", update="sum_next = sum + dw"), states("sum")),
    "a sum of squares": (update_step(inputs="float[4,3] sum", update="sum_next = sum + dw * dw"), states("sum")),
    "a descent that may begin anew": (
        update_step(inputs="float[4,3] first", update="w_next = first - dw * rate"),
        states("w?"),
    ),
    "a descent beside the gradient of a frozen weight": (
        update_step(
            "",
            "float[4,3] v",
            "float[4,3] dv",
            forward=nodes("y = x @ w + Tanh(x) @ v; d = y - t; loss = ReduceMean(d * d, keepdims=0)"),
            backward=nodes("dy = d * two_over_n; dw = x.T @ dy; dv = Tanh(x).T @ dy"),
        ),
        {**states("w"), "dv": "gradient"},
    ),
    "a descent that is named after the input that it holds": (
        update_step(inputs="float[4,3] first", update="first_next = first - dw * rate"),
        states("first"),
    ),
    "a square that is subtracted": (
        update_step(inputs="float[4,3] first", update="w_next = first - dw * dw"),
        states("w?"),
    ),
    "a descent whose rate is negative": (
        update_step(inputs="float[4,3] first", update="w_next = first + dw * low", constants="float low = {-0.1}"),
        states("w?"),
    ),
    "an average beside a gradient that leaves the graph": (
        update_step(inputs="float[4,3] ema", outputs="float[4,3] dw", update="ema_next = ema * beta + w * rate"),
        {**states("ema"), "dw": "gradient"},
    ),
    "an average beside a weight that nothing changes": (
        update_step(
            SGD + "ema_next = ema + (w_next - ema) * mu",
            "float[4,3] ema, float[4,3] v, float mu",
            update="",
            forward=LINEAR.replace("y =", "both = Add(w, v) y =").replace("x, w)", "x, both)"),
        ),
        states("w", "ema"),
    ),
    # --- dependence
    "a weight that decays by an input": (
        update_step("", "float[4,3] m, float decay", update=MOMENTUM.replace("w - u", "w * decay - u")),
        states("w", "m"),
    ),
    # The path without a product of matrices comes first.
    "a state that meets a batch of its type in a product": (
        update_step("a_next = a * p + batch @ k", "float[4,3] a, float p, float[4,3] batch, float[3,3] k"),
        states("w", "a"),
    ),
    "max norm": (update_step(update=MOVED + "w_next = moved / Max(ReduceL2(moved), one)"), states("w")),
    "soft threshold": (update_step(update=MOVED + "w_next = Relu(Abs(moved) - rate) * Sign(moved)"), states("w")),
    "exponentiated gradient": (update_step(update=MOVED + "w_next = w / Exp(u)"), states("w")),
    "a hidden state": (hidden_state_step(), {**states("w"), "moved": "next r", "h_next": "next h?"}),
    "a sum of two inputs that is named after a third": (
        update_step("c_next = Tanh(a) + Tanh(b)", f"{TWO}, float[4,3] c"),
        states("w", "c?"),
    ),
    "an activation of an input": (update_step("a_next = Tanh(a)", "float[4,3] a"), states("w", "a?")),
    "two buffers that are handed through": (
        update_step("a_next = Identity(a); b_next = Identity(b)", TWO),
        states("w", "a", "b"),
    ),
    "pairs that could be swapped": (swappable_step(), states("w", "a", "b")),
    "pairs that could be swapped, each named after the other's input": (
        update_step("b_next = a * p + dw; a_next = b * p + a * q", f"{TWO}, float p, float q"),
        states("w", "a?", "b?"),
    ),
    # --- another form of a next value
    "float16 weights cast from the next masters": (
        update_step("half_next = Cast(w_next, to=10)", "float16[4,3] half", forward=CAST),
        states("w", "half"),
    ),
    "two inputs of its type": (
        update_step("half_next = Cast(w_next, to=10)", "float16[4,3] half, float16[4,3] spare", forward=CAST),
        states("w", "half"),
    ),
    # --- queues
    "a queue moved on by the batch": (
        update_step(
            "queue_next = Concat(x, Slice(queue, axes, last), axis=0)", "float[12,4] queue", "", "int64[1] last = {4}"
        ),
        states("w", "queue"),
    ),
    "a bank that is written at some rows": (
        update_step("bank_next = ScatterND(bank, rows, x)", "float[12,4] bank, int64[8,1] rows"),
        states("w", "bank"),
    ),
    # --- branches
    "an update in a branch": (update_step("", "bool flag", update="u = dw * rate", control=BRANCH), states("w")),
    "an update that is selected": (
        update_step("", "bool flag", update=MOVED + "w_next = Where(flag, moved, w)"),
        states("w"),
    ),
    "branches that swap two inputs": (update_step("", f"bool flag, {TWO}", control=BRANCHES), states("w", "a?", "b?")),
    "a gradient in other units": (
        update_step("turned = dw / units", "float[4,3] units", "float[4,3] turned"),
        {**states("w"), "turned": "next units?"},
    ),
    # --- handed through
    "the weight of the step before": (update_step("last_next = Identity(w)", "float[4,3] last"), states("w", "last")),
    # A doubtful pair leaves one candidate, which is no more certain.
    "the weight of the step before, beside another input": (
        update_step(
            "shown = Identity(w); p = dw * dw + a @ k",
            "float[4,3] a, float[4,3] b, float[3,3] k",
            "float[4,3] shown, float[4,3] p",
        ),
        {**states("w"), "shown": "next b", "p": "next a"},
    ),
    "a frozen weight": (update_step("k_next = Identity(k)", "float[3,3] k", **FROZEN), states("w", "k")),
    "a frozen weight that a zero is added to": (
        update_step("k_next = k + nought", "float[3,3] k", constants=f"float[3,3] nought = {numbers(9)}", **FROZEN),
        states("w", "k"),
    ),
    "a frozen weight that a zero is subtracted from": (
        update_step("k_next = k - nought", "float[3,3] k", constants=f"float[3,3] nought = {numbers(9)}", **FROZEN),
        states("w", "k"),
    ),
    # As a batch may be, ahead of a network.
    "a weight that shrinks, plus zero": (
        update_step(
            "k_next = k * beta + nought", "float[3,3] k", constants=f"float[3,3] nought = {numbers(9)}", **FROZEN
        ),
        states("w", "k"),
    ),
    "a weight with a floor of zero that no gradient moves": (
        update_step("k_next = Max(k, nought)", "float[3,3] k", constants=f"float[3,3] nought = {numbers(9)}", **FROZEN),
        states("w", "k"),
    ),
    "the weight itself, for that of the step before": (
        update_step(inputs="float[4,3] last", outputs="float[4,3] w"),
        {**states("w"), "w": "next last?"},
    ),
    "an input itself": (update_step(outputs="float[8,4] x"), {**states("w"), "x": "constant"}),
}


@pytest.mark.sample(10)
@pytest.mark.parametrize("name", STEPS)
def test_roles(name: str) -> None:
    model, expected = STEPS[name]
    assert roles_of(model) == expected


@pytest.mark.parametrize(
    ("name", "output", "evidence"),
    [
        ("a weight", "w_next", PREVIOUS),
        ("a weight whose share is subtracted and negated", "w_next", PREVIOUS),
        ("an optimizer operator", "w_next", PREVIOUS),
        ("a weight with a floor", "w_next", PREVIOUS),
        ("moments of low beta", "m_next", PREVIOUS),
        ("a moment whose share is hardly there", "m_next", DEPENDS),
        ("amsgrad", "top_next", PREVIOUS),
        ("a weight that decays by an input", "w_next", PREVIOUS),
        ("a state that meets a batch of its type in a product", "a_next", PREVIOUS),
        ("pairs that could be swapped", "a_next", PREVIOUS),
        ("float16 weights cast from the next masters", "half_next", "it is another form of the next value of a state"),
        ("a queue moved on by the batch", "queue_next", PREVIOUS),
        ("an update in a branch", "w_next", PREVIOUS),
    ],
)
def test_evidence(name: str, output: str, evidence: str) -> None:
    assert evidence_of(STEPS[name][0], output) == evidence


@pytest.mark.parametrize("minus", ["-", "+"])
def test_a_weight_that_decays_by_an_input_under_gradient_descent(minus: str) -> None:
    """As `w*decay - rate*dw`; the same with a plus may be a gradient with decay, and is asked about."""
    found = roles_of(update_step("", "float decay", update=SGD.replace("w - u", f"w * decay {minus} u")))
    assert found["w_next"] in ("next w", "next w?", "gradient?")


@pytest.mark.parametrize(
    ("text", "inputs", "output"),
    [
        ("queue_next = Concat(x, more, axis=0)", "float[12,4] queue, float[4,4] more", "queue_next"),
        ("last_next = Identity(w)", "float[4,3] last, float[4,3] older", "last_next"),
    ],
    ids=["a queue made anew", "a weight handed through to one of two inputs"],
)
def test_outputs_that_are_asked_about(text: str, inputs: str, output: str) -> None:
    assert roles_of(update_step(text, inputs))[output].endswith("?")
