"""Steps with a further forward pass, at weights that the first gradients have moved."""

from __future__ import annotations

import pytest

import graphscale as gs
from graphscale.errors import NonlinearGradientError
from tests.build import assert_same_step, listed, step
from tests.expressions import nodes

pytestmark = pytest.mark.static

NUMBERS = "float rate = {0.1}, float epsilon = {1e-6}, float half = {0.5}, float beta = {0.9}"
NEXT = "float[4,5] w1_next, float[5,3] w2_next"
MOVED = "v1 = w1 - dw1 * rate; v2 = w2 - dw2 * rate;"
UPHILL = """
    norm = Sqrt(ReduceSum(dw1 * dw1, keepdims=0) + ReduceSum(dw2 * dw2, keepdims=0)) + epsilon
    v1 = w1 + dw1 * rate / norm; v2 = w2 + dw2 * rate / norm
"""


def forward(tag: str, w1: str = "v1", w2: str = "v2", x: str = "x", t: str = "t") -> str:
    """The forward pass of `tests.build.step` once more, as expressions; each name of a result has a tag."""
    return f"""
        a{tag} = Tanh({x} @ {w1}); d{tag} = a{tag} @ {w2} - {t}
        loss{tag} = ReduceMean(d{tag} * d{tag}, keepdims=0)
    """


def backward(tag: str, w2: str = "v2", x: str = "x") -> str:
    """Its backward pass: the gradients `p1` and `p2`."""
    return f"""
        dy{tag} = d{tag} * two_over_n; p2 = a{tag}.T @ dy{tag}
        p1 = {x}.T @ ((dy{tag} @ {w2}.T) * (one - a{tag} * a{tag}))
    """


def further(more: str, inputs: str = "", outputs: str = "", **options: str) -> gs.Report:
    """The report of a step with more behind its first gradients, which computes what the unscaled one does."""
    outputs = listed(NEXT, outputs)
    return assert_same_step(step(nodes(more), inputs=inputs, outputs=outputs, constants=NUMBERS, **options))


LAST = "w1_next = w1 - p1 * rate; w2_next = w2 - p2 * rate;"


def test_sharpness_awareness_scales_both_backward_passes() -> None:
    report = further(UPHILL + forward("_b") + backward("_b") + LAST)
    assert [place.value for place in report.places] == ["two_over_n", "two_over_n"]
    assert {gradient.value for gradient in report.gradients} == {"dw1", "dw2", "p1", "p2"}
    assert (report.contractions, report.missed) == (6, ())


def test_a_step_inside_of_the_loss() -> None:
    """The gradients of the second loss go on through the first pass, which is scaled too."""
    inside = "q2 = (a @ p2) * two_over_n; w2_next = w2 - (p2 - rate * (a.T @ q2)) * rate; w1_next = w1 - rate * p1"
    report = further(MOVED + forward("_b") + backward("_b") + inside, outputs="float loss_b")
    assert (report.coverage, report.contractions) == (1, 8)


def test_the_loss_after_a_sharpness_aware_step_is_no_other_candidate() -> None:
    report = further(
        UPHILL + forward("_b") + backward("_b") + LAST + forward("_c", "w1_next", "w2_next"), outputs="float loss_c"
    )
    assert (report.loss, report.loss_found) == ("loss", "the scalar output that the backward pass differentiates")


EARLIER = """
    c1 = dw1 - p1; c2 = dw2 - p2
    w1_next = w1 - (c1 + g1) * rate; w2_next = w2 - (c2 + g2) * rate
"""


def test_a_second_pass_at_weights_of_earlier_steps() -> None:
    """The gradient is corrected by one at a snapshot of the weights, and by the mean gradient there."""
    inputs = "float[4,5] v1, float[5,3] v2, float[4,5] g1, float[5,3] g2"
    report = further(forward("_b") + backward("_b") + EARLIER, inputs=inputs)
    assert [place.value for place in report.places] == ["two_over_n", "two_over_n"]
    assert {gradient.value for gradient in report.gradients} == {"c1", "c2"}
    assert (report.contractions, report.missed) == (6, ())


def test_muon_behind_the_second_pass() -> None:
    muon = """
        n2 = p2 / Sqrt(ReduceSum(p2 * p2, keepdims=0) + epsilon); o2 = n2 @ n2.T @ n2
        u2 = o2 * half - o2 @ o2.T @ o2; w1_next = w1 - dw1 * rate; w2_next = w2 - u2 * rate
    """
    report = further(UPHILL + forward("_b") + backward("_b") + muon)
    assert {gradient.value for gradient in report.gradients} == {"dw1", "dw2", "p2"}
    assert (report.contractions, report.missed) == (4, ())


def test_products_of_moved_weights() -> None:
    """Orthogonality as a term of the loss: both passes multiply the weight with itself."""
    gram = "gram{0} = {1}.T @ {1}; wide{0} = gram{0} @ gram{0}; loss{0} = error{0} + ReduceSum(wide{0}, keepdims=0)\n"
    slope = "p2 = share_b + (v2 @ wide_b) * rate\n"
    first = forward("", "w1", "w2").replace("loss =", "error =") + gram.format("", "w2")
    second = forward("_b").replace("loss_b =", "error_b =") + gram.format("_b", "v2")
    report = further(
        UPHILL + second + backward("_b").replace("p2 =", "share_b =") + slope + LAST,
        forward=nodes(first),
        backward=nodes(
            backward("", "w2").replace("p2 =", "share =").replace("p1 =", "dw1 =") + "dw2 = share + (w2 @ wide) * rate"
        ),
    )
    assert [place.value for place in report.places] == ["two_over_n", "two_over_n"]
    assert report.contractions == 6


def test_a_batch_that_is_moved_along_its_own_gradient_belongs_to_the_loss() -> None:
    """Adversarial training: the first pass moves no weight, so that its loss is none."""
    clean = """
        a = Tanh(x @ w1); d = a @ w2 - t; clean = ReduceMean(d * d, keepdims=0)
        slope = ((d * two_over_n) @ w2.T) * (one - a * a); moved = x + Sign(slope @ w1.T) * rate
    """
    report = assert_same_step(
        step(
            nodes(LAST),
            outputs=listed("float clean", NEXT),
            constants=NUMBERS,
            forward=nodes(clean + forward("_b", "w1", "w2", x="moved").replace("loss_b =", "loss =")),
            backward=nodes(backward("_b", "w2", x="moved")),
        )
    )
    assert (report.loss, report.contractions) == ("loss", 3)


ADAM = """
    m_next = m * beta + dw1 * rate; n_next = n * beta + dw1 * dw1 * rate
    w1_next = w1 - rate * m_next / (Sqrt(n_next) + epsilon); w2_next = w2 - dw2 * rate
    count_next = count + one
"""


@pytest.mark.parametrize(
    ("more", "inputs", "outputs"),
    [
        pytest.param(
            MOVED + forward("_b") + "w1_next = Where(Less(loss_b, loss), v1, w1); w2_next = w2 - dw2 * rate",
            "",
            "",
            id="line search",
        ),
        pytest.param(
            ADAM + forward("_b", "w1_next", "w2_next"),
            "float[4,5] m, float[4,5] n, float count",
            "float[4,5] m_next, float[4,5] n_next, float count_next, float loss_b",
            id="the loss after the step",
        ),
    ],
)
def test_the_loss_at_moved_weights_is_no_backward_pass(more: str, inputs: str, outputs: str) -> None:
    report = further(more, inputs, outputs)
    assert {gradient.value for gradient in report.gradients} == {"dw1", "dw2"}
    assert (report.loss, report.contractions, report.missed) == ("loss", 3, ())


@pytest.mark.parametrize(
    "more",
    [
        pytest.param(MOVED + forward("_b", x="x2", t="t2") + backward("_b", x="x2"), id="another batch"),
        pytest.param(
            MOVED + forward("_b", x="x2", t="t2") + backward("_b", x="x2") + forward("_c"),
            id="another batch, beside the same one",
        ),
        pytest.param(
            UPHILL + forward("_b") + backward("_b").replace("p1 = x.T @ (", "p1 = x.T @ Tanh("),
            id="no linear cotangent",
        ),
        pytest.param(
            MOVED
            + forward("_b")
            + backward("_b").replace("p1 =", "q1 =")
            + "p1 = q1 - x.T @ (dy @ (p2.T * rate) * slope);",
            id="a product with a cotangent of the first pass",
        ),
    ],
)
def test_other_passes_behind_gradients_are_refused(more: str) -> None:
    with pytest.raises(NonlinearGradientError):
        further(more + LAST, "float[8,4] x2, float[8,3] t2", "float[8,5] a_c" if "a_c" in more else "")
