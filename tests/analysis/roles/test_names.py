"""One pattern of names: it proposes pairs, raises doubts, and settles what the graph leaves to elimination."""

from __future__ import annotations

import onnx
import pytest

from tests.analysis.roles.steps import MOMENTUM, evidence_of, hidden_state_step, roles_of, states, update_step
from tests.build import linear_step, listed
from tests.expressions import nodes

pytestmark = pytest.mark.static

TWO = "float[4,3] a, float[4,3] b"
# Nothing in the graph shows which of two inputs an output replaces.
OPEN = "p = dw * dw; q = Tanh(dw)"


def rename(model: onnx.ModelProto, names: dict[str, str]) -> onnx.ModelProto:
    for value in (*model.graph.input, *model.graph.output, *model.graph.value_info, *model.graph.initializer):
        value.name = names.get(value.name, value.name)
    for node in model.graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
        node.output[:] = [names.get(name, name) for name in node.output]
    return model


@pytest.mark.parametrize(
    ("present", "following"),
    [("{}", "{}_next"), ("{}", "new.{}"), ("{}_in", "{}_out"), ("old_{}", "new_{}"), ("{}_0", "{}_new_0")],
    ids=["a suffix", "a prefix", "two suffixes", "two prefixes", "a suffix before the number"],
)
@pytest.mark.parametrize("turned", [False, True])
def test_names_propose_what_the_graph_leaves_open(present: str, following: str, turned: bool) -> None:
    model = update_step(OPEN, f"{TWO}, float[4,3] m", "float[4,3] p, float[4,3] q", update=MOMENTUM)
    pairs = {"w_next": "w", "m_next": "m", "p": "ab"[turned], "q": "ba"[turned]}
    names = {old: present.format(old) for old in pairs.values()}
    names |= {output: following.format(value) for output, value in pairs.items()}
    found = roles_of(rename(model, names))
    assert [found[names[output]] for output in "pq"] == [f"next {names[pairs[output]]}?" for output in "pq"]
    assert [found[names[output]] for output in ("w_next", "m_next")] == [f"next {names['w']}", f"next {names['m']}"]


@pytest.mark.parametrize("names", ["out_1 out_2 in_2 in_1", "a b b_1 a_1"], ids=["digits", "no common pattern"])
def test_names_that_say_nothing(names: str) -> None:
    renamed = dict(zip("pqab", names.split(), strict=True))
    model = rename(update_step(OPEN, TWO, "float[4,3] p, float[4,3] q"), renamed)
    assert all(role.endswith("?") for name, role in roles_of(model).items() if name != "w_next")


def test_the_widest_pattern_counts() -> None:
    """`m_old` and `v_old` are outputs beside three next values: two pairs are no match for three."""
    text = "v_next = v * beta + dw * dw; m_old = Identity(m); v_old = Identity(v)"
    inputs, outputs = "float[4,3] m, float[4,3] v", "float[4,3] m_old, float[4,3] v_old"
    found = roles_of(update_step(text, inputs, outputs, update=MOMENTUM))
    assert {name: role for name, role in found.items() if name.endswith("_next")} == states("w", "m", "v")
    assert {found["m_old"], found["v_old"]} <= {"constant", "constant?", "metric", "metric?"}


EXCHANGED = "a_next = b * beta + dw; b_next = a * beta - dw"


def test_a_certain_pair_that_the_names_contradict_is_asked_about() -> None:
    model = update_step(EXCHANGED, f"{TWO}, float[4,3] m", update=MOMENTUM)
    assert roles_of(model) == states("w", "m", "a?", "b?")
    assert evidence_of(model, "a_next") == "it holds 'b', but is named after 'a'"
    neutral = rename(model, {"a_next": "p", "b_next": "q"})
    assert roles_of(neutral) == {**states("w", "m"), "p": "next b", "q": "next a"}


def test_a_capital_letter_begins_a_word() -> None:
    model = update_step(EXCHANGED, f"{TWO}, float[4,3] m", update=MOMENTUM)
    names = {name: f"{name}In" for name in "abmw"} | {f"{name}_next": f"{name}Out" for name in "abmw"}
    assert evidence_of(rename(model, names), "aOut") == "it holds 'bIn', but is named after 'aIn'"


def test_the_nearest_names_show_the_pattern() -> None:
    """`gate_t1` follows `gate_t`, and so no `up_t`."""
    text = "a_next = a * beta + dw; b_next = b * beta - dw"
    model = update_step(text, f"{TWO}, float[4,3] m", update=MOMENTUM)
    names = {"a": "gate_t", "b": "up_t", "m": "m.gate_t", "w": "m.up_t"}
    found = roles_of(rename(model, names | {f"{old}_next": f"{new}1" for old, new in names.items()}))
    assert {f"{name}1": f"next {name}" for name in names.values()}.items() <= found.items()


@pytest.mark.parametrize("name", ["shown", "a_mean"])
def test_a_tensor_that_is_named_unlike_all_next_values_is_asked_about(name: str) -> None:
    """A by-product that holds an input, such as merged weights: a metric."""
    model = update_step(f"{name} = a + w_next", "float[4,3] a, float[4,3] m", f"float[4,3] {name}", update=MOMENTUM)
    assert roles_of(model) == {**states("w", "m"), name: "metric?"}
    assert evidence_of(model, name) == "it holds 'a', but is not named like the other next values"
    assert roles_of(rename(model, {name: "a_next"})) == states("w", "m", "a")


def test_words_within_names_and_other_separators() -> None:
    """`_next` may stand anywhere, and exporters join words in several ways; two outputs could be exchanged."""
    present = {"a": "net.0.a", "b": "net.0.b", "m": "net.0.m", "w": "net.0.w"}
    for following in ("net_next.0.{}", "next/net_0/{}", "net.0.{}_next"):
        model = update_step(EXCHANGED, f"{TWO}, float[4,3] m", update=MOMENTUM)
        names = present | {f"{name}_next": following.format(name) for name in present}
        named = rename(model, names)
        assert evidence_of(named, following.format("a")) == "it holds 'net.0.b', but is named after 'net.0.a'"


def test_a_weight_that_is_named_unlike_all_next_values_is_no_metric() -> None:
    model = update_step("m_new = m * beta + dw; n_new = n + unit; w_next = w - m_new * rate",
                        "float[4,3] m, int64 n", "float[4,3] m_new, int64 n_new", update="")  # fmt: skip
    assert roles_of(model) == {**states("w"), "m_new": "next m", "n_new": "next n"}


def test_two_that_are_named_unlike_the_others_are_no_exception() -> None:
    text, outputs = "p = a * beta + dw; q = b * beta + dw * dw", "float[4,3] p, float[4,3] q"
    model = update_step(text, f"{TWO}, float[4,3] m", outputs, update=MOMENTUM)
    assert roles_of(model) == {**states("w", "m"), "p": "next a", "q": "next b"}


def test_a_number_with_the_name_of_a_next_value() -> None:
    """The graph shows no reason for a pair: two others must confirm the names."""
    model = update_step("k_next = ReduceL2(dw, keepdims=0)", "float k, float[4,3] m", update=MOMENTUM)
    assert roles_of(model) == states("w", "m", "k")
    assert evidence_of(model, "k_next") == "named like the other next values, and no other assignment is possible"
    assert roles_of(rename(model, {"k_next": "norm"}))["norm"] == "metric"
    alone = update_step("k_next = ReduceL2(dw, keepdims=0)", "float k")
    assert roles_of(alone) == states("w", "k?")
    assert evidence_of(alone, "k_next") == "it is named after 'k'"


def test_a_number_that_is_named_unlike_all_next_values_is_a_metric() -> None:
    schedule = "n_next = n + unit; {} = base * Pow(beta, Cast(n_next, to=1))"
    inputs = "float base, float[4,3] m, int64 n"
    found = roles_of(update_step(schedule.format("now"), inputs, "float now", update=MOMENTUM))
    assert found == {**states("w", "m", "n"), "now": "metric"}
    assert roles_of(update_step(schedule.format("base_next"), inputs, update=MOMENTUM))["base_next"] == "next base"


def test_a_clipped_norm_is_no_limit() -> None:
    text, inputs = "norm = ReduceL2(dw, keepdims=0); {} = Min(norm, limit)", "float limit, float[4,3] m"
    assert roles_of(update_step(text.format("kept"), inputs, "float kept", update=MOMENTUM))["kept"] == "metric"
    assert roles_of(update_step(text.format("limit_next"), inputs, update=MOMENTUM))["limit_next"] == "next limit"


def test_names_say_whether_a_hidden_state_is_carried() -> None:
    """The graph would show a prediction in the same way."""
    assert roles_of(hidden_state_step())["h_next"] == "next h?"
    complete = rename(hidden_state_step(), {"moved": "r_next"})
    assert roles_of(complete) == states("w", "r", "h")
    assert roles_of(rename(complete, {"h_next": "y"}))["y"].endswith("?")


LEAPFROG = "w_next = v - dw * rate; v_next = Identity(w)"
NESTEROV = "v_next = w - dw * rate; w_next = v_next + (v_next - v) * beta"
ROTATED = "a_next = b * beta + dw; b_next = a * beta + dw"


@pytest.mark.parametrize("update", [LEAPFROG, NESTEROV], ids=["leapfrog", "Nesterov's two sequences"])
def test_pairs_that_names_and_exclusion_settle(update: str) -> None:
    """A weight is moved by its gradient, and no state is a negative multiple of itself."""
    model = update_step("", "float[4,3] v", update=update)
    assert roles_of(model) == states("w", "v")
    neutral = rename(model, {"w_next": "p", "v_next": "q"})
    assert all(role.endswith("?") for role in roles_of(neutral).values())


def test_names_settle_no_exchange_that_the_graph_permits() -> None:
    model = update_step(ROTATED, f"{TWO}, float[4,3] m", update=MOMENTUM)
    assert roles_of(model) == states("w", "m", "a?", "b?")
    bent = update_step(
        "a_next = Tanh(a) * Tanh(b); b_next = Tanh(a) + Tanh(b)", f"{TWO}, float[4,3] m", update=MOMENTUM
    )
    assert roles_of(bent) == states("w", "m", "a?", "b?")


def test_an_output_that_neither_names_nor_the_graph_pair_is_no_state() -> None:
    text, inputs = "delta = w_next - start", "float[4,3] start, float[4,3] m"
    found = roles_of(update_step(text, inputs, "float[4,3] delta", update=MOMENTUM))
    assert found == {**states("w", "m"), "delta": "metric"}


def test_gradients_show_no_pattern() -> None:
    model = linear_step(
        nodes("dw_copy = dw * rate; x_mean = ReduceMean(x, axes, keepdims=0)"),
        inputs="float[4,3] w, float[4] x_last",
        outputs="float[4,3] dw_copy, float[4] x_mean",
        constants="float rate = {0.1}, int64[1] axes = {0}",
    )
    assert roles_of(model)["dw_copy"] == "gradient"


def test_a_pair_named_by_the_user_may_have_any_name() -> None:
    text, inputs = "k_next = Min(k, loss); most = Max(j, loss)", listed("float j, float k", "float[4,3] m")
    model = update_step(text, inputs, "float most", update=MOMENTUM)
    found = roles_of(model, {"states": {"most": "j"}})
    assert (found["most"], found["k_next"]) == ("next j", "next k")
    found = roles_of(model, {"states": {"most": "k"}})
    assert found["most"] == "next k" and found["k_next"] != "next k"
