"""Open outputs with names like those of the file's certain next values, and similar names."""

from __future__ import annotations

import re

import onnx
import pytest

from tests.analysis.roles.steps import MOMENTUM, evidence_of, hidden_state_step, roles_of, states, update_step
from tests.build import linear_step, listed, ramp
from tests.expressions import nodes

pytestmark = pytest.mark.static

LEAST = "k_next = Min(k, loss)"
PREDICTION = "x_next = Tanh((y @ Transpose(w_next)) + x)"
STEPS = {
    "a number": (update_step(LEAST, "float k, float[4,3] m", update=MOMENTUM), states("w", "m", "k")),
    "a number that is stored": (
        update_step(LEAST, "float[4,3] m", "", "float k = {2}", update=MOMENTUM),
        states("w", "m", "k"),
    ),
    "a number that a counter alone gives": (
        update_step(
            "n_next = n + unit; k_next = one / Cast(n_next, to=1); size = ReduceL2(dw, keepdims=0) * k",
            "float[4,3] m, int64 n, float k",
            "float size",
            update=MOMENTUM,
        ),
        {**states("w", "m", "n", "k"), "size": "metric"},
    ),
    "one certain pair": (update_step(LEAST, "float k"), states("w", "k?")),
    "another type": (
        update_step("k_next_ = Min(j, loss)", "float j, double k, float[4,3] m", "float k_next_", update=MOMENTUM),
        {**states("w", "m"), "k_next_": "next j?"},
    ),
    "a number that is stored, and read twice": (
        update_step(
            f"{LEAST}; is_less = Less(loss, k)", "float[4,3] m", "bool is_less", "float k = {2}", update=MOMENTUM
        ),
        {**states("w", "m", "k"), "is_less": "metric"},
    ),
    "a number that is compared alone": (
        update_step("k_next = Where(Less(k, rate), loss, rate)", "float k, float[4,3] m", update=MOMENTUM),
        states("w", "m", "k"),
    ),
    "a state that the loss ignores, through a product": (
        update_step("q_next = Tanh(q @ mix)", "float[4,3] q, float[3,3] mix, float[4,3] m", update=MOMENTUM),
        states("w", "m", "q"),
    ),
    "the name of an input of another type": (
        linear_step(
            nodes(MOMENTUM + "k_next = Min(j, loss)"),
            inputs="float[4,3] w, float[4,3] m, float j, double k",
            outputs="float[4,3] w_next, float[4,3] m_next, float k_next",
            constants="float rate = {0.1}, float beta = {0.9}",
        ),
        {**states("w", "m"), "k_next": "next j?"},
    ),
    "a pair with another name": (
        update_step(
            f"{LEAST}; v_new = v * beta + dw * dw", "float k, float[4,3] m, float[4,3] v", "float[4,3] v_new",
            update=MOMENTUM,
        ),
        {**states("w", "m", "k?"), "v_new": "next v"},
    ),
    "the name of a state that has its next value": (
        update_step("n_next = n + unit; m_next_next = u * u", "int64 n, float[4,3] m", "float[4,3] m_next_next",
                    update=MOMENTUM),
        {**states("w", "m", "n"), "m_next_next": "metric"},
    ),
}  # fmt: skip
# The names of the present and the next value of each state.
NAMES = {
    "a suffix": ("{}", "{}_next", True),
    "a prefix": ("{}", "new.{}", True),
    "two suffixes": ("{}_in", "{}_out", True),
    "two prefixes": ("old_{}", "new_{}", True),
    "a suffix before the number": ("{}_0", "{}_new_0", True),
    "numbers alone": ("in_{:d}", "out_{:d}", False),
    "a beginning of the word": ("input_{:d}", "output_{:d}", False),
}


@pytest.mark.parametrize("name", STEPS)
def test_roles(name: str) -> None:
    model, expected = STEPS[name]
    assert roles_of(model) == expected


@pytest.mark.parametrize("name", NAMES)
def test_names(name: str) -> None:
    present, following, is_convention = NAMES[name]
    model = update_step(LEAST, "float k, float[4,3] m", update=MOMENTUM)
    renamed = {}
    for index, state in enumerate(("w", "m", "k")):
        word = index if "d}" in present else state
        renamed |= {state: present.format(word), f"{state}_next": following.format(word)}
    _rename(model, renamed)
    mark = "" if is_convention else "?"
    assert roles_of(model)[renamed["k_next"]] == f"next {renamed['k']}{mark}"


def test_evidence() -> None:
    model = update_step(LEAST, "float k, float[4,3] m", update=MOMENTUM)
    assert evidence_of(model, "k_next") == "stated by its name, as other next values"


def _rename(model: onnx.ModelProto, names: dict[str, str]) -> None:
    for value in (*model.graph.input, *model.graph.output, *model.graph.value_info, *model.graph.initializer):
        value.name = names.get(value.name, value.name)
    for node in model.graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
        node.output[:] = [names.get(name, name) for name in node.output]


# The vector that a power iteration carries, or the state that the world model of an agent predicts.
VECTOR = nodes(
    "u_next = Tanh(Transpose(w) @ (w @ u)); d = x @ w * Transpose(u) - t; loss = ReduceMean(d * d, keepdims=0)"
)


@pytest.mark.parametrize(
    ("dims", "batch", "mark"),
    [
        pytest.param("3,1", "", "", id="no rows of a batch"),
        pytest.param("3,1", "float[3,5] s", "?", id="the rows of another batch"),
        pytest.param("3,1", "float[9,3,5] s", "?", id="the rows behind a time"),
        pytest.param("3,1", "float[3] s", "?", id="a number a row"),
        pytest.param("3,1", "float[N,5] s", "?", id="rows that are not known"),
        pytest.param("3,1", "float[5,3] s", "", id="columns"),
        pytest.param("M,1", "", "?", id="no dimension that is known"),
    ],
)
def test_a_prediction_has_the_rows_of_a_batch(dims: str, batch: str, mark: str) -> None:
    model = linear_step(
        nodes("m_next = m * beta + dw; w_next = w - m_next * rate"),
        inputs=listed(f"float[{dims}] u, float[4,3] w, float[4,3] m", batch),
        outputs=f"float[4,3] w_next, float[4,3] m_next, float[{dims}] u_next",
        constants="float rate = {0.1}, float beta = {0.9}",
        forward=VECTOR,
        backward=nodes("dy = d * two_over_n * Transpose(u); dw = Transpose(x) @ dy"),
    )
    assert roles_of(model)["u_next"] == f"next u{mark}"


@pytest.mark.parametrize(
    ("prediction", "asked"),
    [
        ("x_next = x + y @ back", ["x_next"]),
        ("x_next = x + y @ back; t_next = Tanh(x @ w_next)", ["t_next", "x_next"]),
        ("t_next = Tanh(x @ w_next)", ["t_next"]),
        ("t_next = Tanh(y)", []),
    ],
)
def test_a_prediction_of_the_next_batch_is_asked_about(prediction: str, asked: list[str]) -> None:
    """The world model of an agent predicts `x_next`; the next step reads another batch."""
    predicted = [output for output in ("float[8,4] x_next", "float[8,3] t_next") if output.split()[1] in prediction]
    model = linear_step(
        nodes("m_next = m * beta + dw; w_next = w - m_next * rate;" + prediction),
        inputs="float[4,3] w, float[4,3] m",
        outputs=listed("float[4,3] w_next, float[4,3] m_next", *predicted),
        constants=f"float rate = {{0.1}}, float beta = {{0.9}}, float[3,4] back = {ramp(12)}",
    )
    assert sorted(name for name, role in roles_of(model).items() if role.endswith("?")) == asked


def test_the_hidden_state_of_a_network_is_carried() -> None:
    """A hidden state lies before the last contraction; `hidden_state_step` has a prediction behind it."""
    model = linear_step(
        nodes("w_next = w - dw * rate; r_next = r - (Transpose(h) @ dc) * rate"),
        inputs="float[4,3] w, float[3,3] r, float[8,3] h",
        outputs="float[4,3] w_next, float[3,3] r_next, float[8,3] h_next",
        constants=f"float rate = {{0.1}}, float one = {{1}}, float[3,3] head = {ramp(9)}",
        forward=nodes("h_next = Tanh(x @ w + h @ r); d = h_next @ head - t; loss = ReduceMean(d * d, keepdims=0)"),
        backward=nodes(
            "dh = d * two_over_n @ Transpose(head); dc = dh * (one - h_next * h_next); dw = Transpose(x) @ dc"
        ),
    )
    assert roles_of(model) == states("w", "r", "h")
    assert roles_of(hidden_state_step()) == states("w", "r", "h?")


# The weight of the network is an average of two other states.
AVERAGES = "z_next = z - dw * rate; a_next = a * p + z_next * q; w_next = z_next * p + a_next * q"


@pytest.mark.parametrize(
    ("update", "mark"),
    [
        pytest.param(AVERAGES, "", id="one convention"),
        pytest.param(AVERAGES.replace("_next", "_new"), "", id="another one"),
        pytest.param(AVERAGES.replace("a_next", "a_new"), "?", id="two conventions"),
        pytest.param(
            AVERAGES.replace("a_next", "y").replace("z_next", "a_next").replace("y", "z_next"), "?", id="crossed"
        ),
    ],
)
def test_where_no_pair_is_certain(update: str, mark: str) -> None:
    """The names of all open pairs show one convention, and the graph alone proposes the same pairs."""
    model = linear_step(
        nodes(update),
        inputs="float[4,3] w, float[4,3] z, float[4,3] a, float p, float q",
        outputs=listed(*(f"float[4,3] {name}" for name in re.findall(r"(\w+) =", update))),
        constants="float rate = {0.1}",
    )
    assert {output[0]: role for output, role in roles_of(model).items()} == {v: f"next {v}{mark}" for v in "wza"}


THREE = "float[4,3] a, float[4,3] b, float[4,3] c"
FEW = {
    "inputs as near as each other": update_step(
        "s = a * low + b * low + c * low; a_next = s + dw; b_next = s - dw; c_next = s + dw * dw",
        THREE,
        constants="float low = {0.03}",
    ),
    "outputs as near as each other": update_step(
        "a_next = a * low + dw; b_next = a * low - dw; c_next = a * low + dw * dw",
        THREE,
        constants="float low = {0.03}",
    ),
    "a certain pair with another name": update_step(
        f"{AVERAGES}; n_new = n + unit",
        "float[4,3] z, float[4,3] a, float p, float q, int64 n",
        "int64 n_new",
        update="",
    ),
}


@pytest.mark.parametrize("name", FEW)
def test_three_pairs_that_show_no_convention(name: str) -> None:
    asked = [role for role in roles_of(FEW[name]).values() if role.endswith("?")]
    assert len(asked) == 3


def test_names_that_the_graph_contradicts_are_asked_about() -> None:
    text = "b_next = a * p + dw; a_next = b * p + a * q"
    model = update_step(text, "float[4,3] m, float[4,3] a, float[4,3] b, float p, float q", update=MOMENTUM)
    assert roles_of(model) == states("w", "m", "a?", "b?")


def test_a_number_that_follows_the_batch_is_state() -> None:
    model = update_step(
        "k_next = Min(k, ReduceMin(y, keepdims=0))",
        "float k, float[4,3] m",
        forward=nodes("s = x * k; y = s @ w; d = y - t; loss = ReduceMean(d * d, keepdims=0)"),
        backward=nodes("dy = d * two_over_n; dw = Transpose(s) @ dy"),
        update=MOMENTUM,
    )
    assert roles_of(model) == states("w", "m", "k")


def test_an_average_of_batches_is_state() -> None:
    model = update_step(
        "mean_next = mean * high + ReduceMean(x, axes, keepdims=0) * tenth",
        "float[4] mean, float[4,3] m",
        constants="float high = {0.9}, float tenth = {0.1}",
        forward=nodes("y = (x - mean) @ w; d = y - t; loss = ReduceMean(d * d, keepdims=0)"),
        backward=nodes("dy = d * two_over_n; dw = Transpose(x - mean) @ dy"),
        update=MOMENTUM,
    )
    assert roles_of(model) == states("w", "m", "mean")


@pytest.mark.parametrize(
    "names",
    [
        pytest.param("w_in w_out m_in m_out k_by k_out", id="end"),
        pytest.param("old_w new_w old_m new_m the_k new_k", id="beginning"),
    ],
)
def test_a_present_value_of_another_form_is_asked_about(names: str) -> None:
    model = update_step(LEAST, "float k, float[4,3] m", update=MOMENTUM)
    renamed = dict(zip(("w", "w_next", "m", "m_next", "k", "k_next"), names.split(), strict=True))
    _rename(model, renamed)
    assert roles_of(model)[renamed["k_next"]] == f"next {renamed['k']}?"


def test_a_state_with_a_named_next_value_has_no_other() -> None:
    model = update_step(f"{LEAST}; other = Min(k, rate)", "float k, float[4,3] m", "float other", update=MOMENTUM)
    found = roles_of(model, {"states": {"other": "k"}})
    assert found["other"] == "next k"
    assert found["k_next"] != "next k"


def test_a_named_pair_takes_an_input_from_its_namesake() -> None:
    text, inputs = "k_next = Min(k, j); most = Max(k, loss)", "float j, float k, float[4,3] m"
    found = roles_of(update_step(text, inputs, "float most", update=MOMENTUM), {"states": {"most": "k"}})
    assert (found["most"], found["k_next"]) == ("next k", "next j?")


def test_a_named_pair_may_have_any_name() -> None:
    text, inputs = f"{LEAST}; most = Max(j, loss)", "float j, float k, float[4,3] m"
    model = update_step(text, inputs, "float most", update=MOMENTUM)
    found = roles_of(model, {"states": {"most": "j"}})
    assert (found["most"], found["k_next"]) == ("next j", "next k")


# Three certain pairs are named alike, and a rate by a schedule is shown.
SCHEDULED = "n_next = n + unit; now = base * Pow(beta, Cast(n_next, to=1))"
ERRORS = "e = ReduceSum(d, last, keepdims=0); {} = e * e"
UNLIKE = {
    "a rate in use": (SCHEDULED, "float base", "float now", "metric"),
    "a rate in use with a word of the fed one": (
        SCHEDULED.replace("base", "now_0"), "float now_0", "float now", "metric",
    ),
    "an error of each example": (ERRORS.format("now"), "float[8] reward", "float[8] now", "metric"),
    "an error of each example with a word of an input": (
        ERRORS.format("now"), "float[8] now_before", "float[8] now", "metric?",
    ),
    "an error of each example with the name of an input": (
        ERRORS.format("reward_now"), "float[8] reward", "float[8] reward_now", "next reward?",
    ),
    "an error of each example that is named as a next value": (
        ERRORS.format("now_next"), "float[8] reward", "float[8] now_next", "metric?",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", UNLIKE)
@pytest.mark.parametrize("pairs", [2, 3])
def test_a_metric_is_named_unlike_all_next_values(name: str, pairs: int) -> None:
    text, value, output, role = UNLIKE[name]
    text = text if "n_next" in text or pairs == 2 else f"n_next = n + unit; {text}"
    inputs = listed(value, "float[4,3] m", "int64 n" if "n_next" in text else "")
    model = update_step(text, inputs, output, "int64[1] last = {1}", update=MOMENTUM)
    shown = output.split()[1]
    certain = pairs == 3 or "n_next" in text
    expected = role if certain else f"{role.rstrip('?')}?"
    assert roles_of(model)[shown] == expected


@pytest.mark.parametrize(
    ("weight", "gradient", "is_certain"),
    [
        pytest.param("{}", "grad_{}", True, id="a prefix"),
        pytest.param("{}", "{}.grad", True, id="a suffix"),
        pytest.param("{}_0", "d{}", False, id="no word in common"),
    ],
)
def test_gradients_are_named_after_weights(weight: str, gradient: str, is_certain: bool) -> None:
    """The gradient of the logarithm of a share is an error and a constant, and no product with the seed."""
    model = linear_step(
        nodes("ds = one - e * e"),
        inputs="float[4,3] w, float[3] b, float[3] s",
        outputs="float[4,3] dw, float[3] db, float[3] ds",
        constants="float one = {1}, int64[1] axes = {0}",
        forward=nodes(
            "d = (x @ w + b) * s - t; loss = ReduceMean(d * d, keepdims=0); e = ReduceSum(d, axes, keepdims=0)"
        ),
        backward=nodes("dy = d * two_over_n * s; dw = x.T @ dy; db = ReduceSum(dy, axes, keepdims=0)"),
    )
    _rename(
        model, {v: weight.format(f"{v}eight") for v in "wbs"} | {f"d{v}": gradient.format(f"{v}eight") for v in "wbs"}
    )
    found = roles_of(model)[gradient.format("seight")]
    assert found == ("gradient" if is_certain else "gradient?")
