"""Optimizers that multiply gradients with each other; and backward passes that look like one."""

from __future__ import annotations

import onnx
import pytest

import graphscale as gs
from graphscale.errors import NonlinearGradientError
from models.zoo import pack, trial
from tests.build import assert_same_step, listed, step
from tests.expressions import nodes

pytestmark = pytest.mark.static

NUMBERS = "float half = {0.5}, float rate = {0.1}, float beta = {0.9}, float epsilon = {1e-6}, float more = {1.5}"
NEXT = "float[4,5] w1_next, float[5,3] w2_next"
SGD = "w1_next = w1 - rate * dw1; w2_next = w2 - rate * dw2;"


def orthogonalised(name: str, of: str) -> str:
    """Newton-Schulz: the matrix `name` has the singular vectors of another one."""
    x = f"{name}r"
    return f"""
        {x} = {of} / (Sqrt(ReduceSum({of} * {of}, keepdims=0)) + epsilon)
        {x}x = {x} * more - ({x} @ {x}.T) @ {x} * half
        {name} = {x}x * more - ({x}x @ {x}x.T) @ {x}x * half
    """


MUON = """
    m1_next = m1 * beta + dw1; m2_next = m2 * beta + dw2
    {o1} {o2}
    w1_next = w1 - o1 * rate; w2_next = w2 - o2 * rate
""".format(o1=orthogonalised("o1", "m1_next"), o2=orthogonalised("o2", "m2_next"))
SHAMPOO = """
    l_next = l * beta + dw1 @ dw1.T
    {root}
    w1_next = w1 - (root @ dw1) * rate; w2_next = w2 - rate * dw2
"""
OLD_SHAMPOO = SHAMPOO.format(root=orthogonalised("root", "l"))
SHAMPOO = SHAMPOO.format(root=orthogonalised("root", "l_next"))
ORTHOGONAL = f"""
    v1 = w1 - rate * dw1
    {orthogonalised("w1_next", "v1")}
    w2_next = w2 - rate * dw2
"""
QUASI_NEWTON = """
    b_next = b * beta + (w1 - p).T @ (dw1 - g); p_next = Identity(w1); g_next = Identity(dw1)
    w1_next = w1 - (dw1 @ b_next) * rate; w2_next = w2 - rate * dw2
"""


@pytest.mark.parametrize(
    ("text", "inputs", "outputs"),
    [
        pytest.param(
            QUASI_NEWTON,
            "float[5,5] b, float[4,5] p, float[4,5] g",
            "float[5,5] b_next, float[4,5] p_next, float[4,5] g_next",
            id="quasi-Newton",
        ),
        pytest.param(MUON, "float[4,5] m1, float[5,3] m2", "float[4,5] m1_next, float[5,3] m2_next", id="muon"),
        pytest.param(SHAMPOO, "float[4,4] l", "float[4,4] l_next", id="shampoo"),
        pytest.param(OLD_SHAMPOO, "float[4,4] l", "float[4,4] l_next", id="old preconditioner"),
        pytest.param(ORTHOGONAL, "", "", id="orthogonal weights"),
    ],
)
def test_contractions_of_the_optimizer_need_no_scale(text: str, inputs: str, outputs: str) -> None:
    model = step(nodes(text), inputs=inputs, outputs=listed(NEXT, outputs), constants=NUMBERS)
    report = assert_same_step(model)
    assert [place.value for place in report.places] == ["two_over_n"]
    assert {gradient.value for gradient in report.gradients} == {"dw1", "dw2"}
    assert (report.contractions, report.missed) == (3, ())


def looped(name: str, of: str, shape: str) -> str:
    """Newton-Schulz with its rounds in a loop; the norm of the first matrix ends the scale."""
    body = f"rounds (int64 i, bool on, {shape} n_in) => (bool going, {shape} n)"
    first = f"norm_{name} = Sqrt(ReduceSum({of} * {of}, keepdims=0)) + epsilon; first_{name} = {of} / norm_{name}"
    return (
        nodes(first)
        + f"""
        {name} = Loop(five, go, first_{name}) <body = {body} {{
            going = Identity(on)
            n_t = Transpose<perm = [1, 0]>(n_in)
            square = MatMul(n_in, n_t)
            cube = MatMul(square, n_in)
            less = Mul(cube, half)
            grown = Mul(n_in, more)
            n = Sub(grown, less)
        }}>
        """
    )


LOOPED = NUMBERS + ", int64 five = {5}, bool go = {1}"


def test_muon_with_its_rounds_in_a_loop() -> None:
    """The search succeeds without the finished gradients."""
    update = "w1_next = w1 - o1 * rate; w2_next = w2 - rate * dw2"
    model = step(
        nodes("m1_next = m1 * beta + dw1") + looped("o1", "m1_next", "float[4,5]") + nodes(update),
        inputs="float[4,5] m1",
        outputs=listed(NEXT, "float[4,5] m1_next"),
        constants=LOOPED,
    )
    report = assert_same_step(model)
    assert [place.value for place in report.places] == ["two_over_n"]
    assert {gradient.value for gradient in report.gradients} == {"dw1", "dw2"}
    assert (report.contractions, report.missed) == (3, ())


EXTRA = {"q_next": "float[5,5]", "x_shown": "float[8,4]", "w0_shown": "float[4,4]", "m1_next": "float[4,5]"}
BACKWARD = "dy = d * two_over_n; dw2 = a.T @ dy; da = dy @ w2.T; df = da * (one - a * a); "
AGAIN = "again = (w0.T @ x.T).T; "
OTHER_BATCH = """
    v1 = w1 - o1 * rate; c = Tanh(x2 @ v1); e = (c @ w2 - t2) * two_over_n
    w2_next = w2 - rate * (c.T @ e); w1_next = w1 - rate * (x2.T @ ((e @ w2.T) * (one - c * c)))
"""

ORTHOGONALISED = f"""
    {BACKWARD} dw1 = x.T @ df
    {orthogonalised("o1", "dw1")} {orthogonalised("o2", "dw2")}
    v1 = w1 - o1 * rate; v2 = w2 - o2 * rate
"""
SECOND_PASS = """
    rows = v1 @ v2; e = (rows - near) * rate
    w1_next = w1 - rate * (e @ v2.T); w2_next = w2 - rate * (v1.T @ e)
"""


@pytest.mark.parametrize(
    ("backward", "more"),
    [
        pytest.param(BACKWARD + orthogonalised("dh", "df"), "dw1 = x.T @ dh;" + SGD, id="times the batch"),
        pytest.param(
            AGAIN + BACKWARD + orthogonalised("dh", "df"), "dw1 = again.T @ dh;" + SGD, id="times an activation"
        ),
        pytest.param(
            f"{BACKWARD} dw1 = x.T @ df; {orthogonalised('o1', 'dw1')}",
            "q_next = q - rate * (da.T @ df); w1_next = w1 - rate * o1; w2_next = w2 - rate * dw2",
            id="a product of two cotangents beside it",
        ),
        pytest.param(
            f"dy = d * two_over_n; dw2 = a.T @ dy; {orthogonalised('o2', 'dw2')}",
            "dw1 = x.T @ ((dy @ o2.T) * (one - a * a));" + SGD,
            id="inside of another layer's backward pass",
        ),
        pytest.param(
            f"{BACKWARD} dw1 = x.T @ df; {orthogonalised('o1', 'dw1')}", OTHER_BATCH, id="before another batch"
        ),
        pytest.param(ORTHOGONALISED, SECOND_PASS.replace("near", "t3"), id="before another target"),
        pytest.param(
            f"{BACKWARD} dw1 = x.T @ df; m1_next = m1 * beta + dw1; {orthogonalised('o1', 'm1_next')}",
            "v1 = w1 - m1_next * rate;" + OTHER_BATCH.replace("v1 = w1 - o1 * rate;", ""),
            id="before another batch, at weights that a moment moved",
        ),
        pytest.param(
            ORTHOGONALISED,
            # By their types, the batch and the frozen weight may be state.
            "x_shown = Neg(x); w0_shown = Neg(w0);" + SECOND_PASS.replace("near", "Slice(y, zero, four, zero)"),
            id="before an activation",
        ),
    ],
)
def test_contractions_of_the_backward_pass_behind_an_orthogonalised_gradient_are_refused(
    backward: str, more: str
) -> None:
    """The scale would have to come out before them."""
    model = step(
        nodes(more),
        weights="float[4,4] w0, float[4,5] w1, float[5,3] w2, float[5,5] q",
        inputs="float[8,4] x2, float[8,3] t2, float[4,3] t3, float[4,5] m1",
        outputs=listed(NEXT, *(f"{dtype} {name}" for name, dtype in EXTRA.items() if name in more)),
        constants=NUMBERS + ", int64[1] zero = {0}, int64[1] four = {4}",
        forward=nodes("p = x @ w0; a = Tanh(p @ w1); y = a @ w2; d = y - t; loss = ReduceMean(d * d, keepdims=0)"),
        backward=nodes(backward.replace("x.T @ df", "p.T @ df")),
    )
    with pytest.raises(NonlinearGradientError, match="the backward pass goes on from there"):
        gs.scale(model)


def test_a_backward_pass_behind_gradients_orthogonalised_in_loops_stays_without_a_scale() -> None:
    """The products in the loops are ahead of it, and count as its own."""
    loops = looped("o1", "dw1", "float[4,5]") + looped("o2", "dw2", "float[5,3]")
    moved = "v1 = w1 - o1 * rate; v2 = w2 - o2 * rate;"
    model = step(
        loops + nodes(moved + SECOND_PASS.replace("near", "t3")),
        inputs="float[4,3] t3",
        outputs=NEXT,
        constants=LOOPED,
        backward=nodes(BACKWARD + "dw1 = x.T @ df"),
    )
    report = gs.inspect(model)
    assert (report.contractions, len(report.missed)) == (10, 4)
    assert report.coverage < 1


@pytest.mark.parametrize(
    ("given", "update", "output"),
    [
        pytest.param("float[8,3] e", "", "", id="for each row"),
        pytest.param("float e", "e_next = e * beta", "float e_next", id="that is carried"),
    ],
)
def test_a_cotangent_times_an_input_that_the_loss_ignores(given: str, update: str, output: str) -> None:
    model = step(
        nodes(MUON + update),
        inputs=listed("float[4,5] m1, float[5,3] m2", given),
        outputs=listed(NEXT, "float[4,5] m1_next, float[5,3] m2_next", output),
        constants=NUMBERS,
        backward=nodes(BACKWARD.replace("two_over_n", "two_over_n * e") + "dw1 = x.T @ df"),
    )
    report = assert_same_step(model)
    assert (report.contractions, report.missed) == (3, ())


def test_a_moment_among_the_weights_of_another_layer() -> None:
    """The cotangents stay scaled, and the moment's finished gradient is one factor of them."""
    o2 = orthogonalised("o2", "m2_next")
    report = assert_same_step(
        step(
            nodes("dw1 = x.T @ ((dy @ o2.T) * (one - a * a));" + SGD),
            inputs="float[5,3] m2",
            outputs=listed(NEXT, "float[5,3] m2_next"),
            constants=NUMBERS,
            backward=nodes(f"dy = d * two_over_n; dw2 = a.T @ dy; m2_next = m2 * beta + dw2; {o2}"),
        )
    )
    assert (report.contractions, report.missed) == (3, ())


@pytest.mark.parametrize("refused", [False, True])
def test_a_backward_contraction_of_weights_alone_is_scaled(refused: bool) -> None:
    """A weight that is a product of two: their gradients are products of one gradient with the two."""
    model = step(
        nodes(f"du = dm @ v.T; dv = u.T @ dm; {orthogonalised('ou', 'du')} u_next = u - ou * rate; v_next = v - dv"),
        weights="float[4,2] u, float[2,3] v",
        outputs="float[4,2] u_next, float[2,3] v_next",
        constants=NUMBERS,
        forward=nodes("m = u @ v; d = x @ m - t; loss = ReduceMean(d * d, keepdims=0)"),
        backward=nodes("dn = x.T @ (d * two_over_n);" + (orthogonalised("dm", "dn") if refused else "dm = dn * half")),
    )
    if refused:
        with pytest.raises(NonlinearGradientError):
            gs.scale(model)
    else:
        report = assert_same_step(model)
        assert {gradient.value for gradient in report.gradients} == {"du", "dv"}
        assert (report.contractions, report.missed) == (3, ())


@pytest.mark.full
def test_a_rate_by_moments_and_weights() -> None:
    """Momo multiplies both; with the loss in its rate no search for places settles before they are set aside."""
    content, truth = pack.read("optax-momo.square")
    model = onnx.load_from_string(content)
    report = gs.inspect(model)
    assert trial.judge("optax-momo.square", model, report, truth).outcome == "asked, proposal right"
    assert (report.contractions, report.missed) == (8, ())
