"""Kinds of steps whose questions had a wrong proposal: each role is certain and right, or the proposal is right."""

from __future__ import annotations

import onnx
import pytest

import graphscale as gs
from graphscale.errors import AlreadyScaledError, RolesError, UnsupportedModelError
from tests.build import feeds_for, parse
from tests.cases.asked import ASKED, BACKWARD, FORWARD, LOSS, linear
from tests.cases.steps import losses_of, pairs_of, proposals
from tests.conftest import assert_all_same_bits, run_once

pytestmark = pytest.mark.static


@pytest.mark.parametrize("kind", ASKED)
def test_the_proposals_are_right(kind: str) -> None:
    model, pairs = ASKED[kind]
    assert pairs_of(model) == pairs
    assert losses_of(model) == {"loss"}


# Names say it, and the graph does not contradict them.
CERTAIN = (
    "activations in a queue",
    "a change of a weight",
    "a learnt step",
    "a step that is multiplied",
    "an average step",
    "a prediction",
    "a count",
    "a number of Nesterov's",
    "elastic weights",
)


@pytest.mark.parametrize("kind", CERTAIN)
def test_no_question_is_asked(kind: str) -> None:
    assert not gs.roles(ASKED[kind].model).open


@pytest.mark.parametrize("kind", ASKED)
def test_the_proposals_are_not_refused(kind: str) -> None:
    model, pairs = ASKED[kind]
    accepted, named = gs.scale(model, accept=True), gs.scale(model, roles=proposals(model))
    assert {s.output: s.input for s in accepted.report.state}.items() >= pairs.items()
    feeds = feeds_for(model)
    assert_all_same_bits(run_once(accepted.model, feeds)[0], run_once(named.model, feeds)[0])


# --- state that was missed in silence ---------------------------------------------------------------------------------

FED = {"inputs": "float in_1", "outputs": "float[4,3] y, float o"}


def fed_number(text: str) -> onnx.ModelProto:
    """A step whose rate depends on a number that is fed."""
    return linear(f"r = Mul (rate, in_1) u = Mul (gw, r) y = Sub (w, u) {text}", update="", **FED)


def test_a_loss_that_comes_out_twice() -> None:
    model = fed_number("o = Identity (loss)")
    with pytest.raises(RolesError, match=r"'o': next value of in_1\? it is the loss again"):
        gs.scale(model)
    assert pairs_of(model) == {"y": "w", "o": "in_1"}


def test_a_norm_of_gradients() -> None:
    model = fed_number("gg = Mul (gw, gw) n = ReduceSum <keepdims: int = 0> (gg) o = Sqrt (n)")
    (note,) = gs.scale(model).report.warnings
    assert note.startswith("no name tells whether 'o' is for a log") and note.endswith("--update o=in_1")
    named = gs.scale(model, updates={"o": "in_1"}).report
    assert not named.warnings and ("in_1", "o") in {(state.input, state.output) for state in named.state}


def test_names_that_say_it_need_no_note() -> None:
    text = "gg = Mul (gw, gw) n = ReduceSum <keepdims: int = 0> (gg) norm = Sqrt (n)"
    update = "r = Mul (rate, in_1) u = Mul (gw, r) w_next = Sub (w, u)"
    assert not gs.scale(linear(text, "float in_1", "float norm", update=update)).report.warnings


def test_a_sequence_of_weights() -> None:
    text = f"""<ir_version: 10, opset_import: ["" : 20]>
        step (float[8,4] x, float[8,3] t, seq(float[4,3]) ws) => (float loss, seq(float[4,3]) ws_next)
            <float c = {{0.083333336}}, float rate = {{0.1}}, int64 zero = {{0}}>
        {{ w = SequenceAt (ws, zero) {FORWARD} {LOSS} {BACKWARD} u = Mul (gw, rate) w1 = Sub (w, u)
           ws_next = SequenceConstruct (w1) }}"""
    with pytest.raises(UnsupportedModelError, match="the state 'ws' is a sequence of tensors"):
        gs.scale(parse(text))
    assert gs.scale(parse(text), 1024).report.proved  # no step is skipped


# --- a loss scale of the step's own -----------------------------------------------------------------------------------


@pytest.mark.parametrize("update", ["", "u = Mul (gw, rate) w_next = Sub (w, u)"], ids=["gradients leave", "SGD"])
def test_a_loss_that_is_multiplied_and_divided(update: str) -> None:
    """flax's DynamicScale without has_aux returns `(loss * S) / S`."""
    model = linear(
        inputs="float S",
        outputs="" if update else "float[4,3] gw",
        loss=LOSS.replace("loss =", "mse =") + " large = Mul (mse, S) loss = Div (large, S)",
        backward=BACKWARD.replace("(d, c)", "(d, cs)").replace("dp =", "cs = Mul (c, S) dp =").replace("gw =", "gs =")
        + " gw = Div (gs, S)",
        update=update,
    )
    with pytest.raises(AlreadyScaledError, match="input 'S' multiplies the gradients"):
        gs.scale(model)


def folded(seed: float, factor: float) -> gs.Report:
    """A step whose seed and whose factor behind the gradients are constants."""
    numbers = {"seed": seed, "inverse": factor}
    constants = "".join(f"{name} = Constant <value_float: float = {value}> () " for name, value in numbers.items())
    update = "g = Mul (gw, inverse) u = Mul (g, rate) w_next = Sub (w, u)"
    return gs.scale(linear(backward=constants + BACKWARD.replace("(d, c)", "(d, seed)"), update=update)).report


def test_a_folded_scale_is_noticed() -> None:
    (note,) = folded(1024 * 2 / 24, 1 / 1024).warnings
    assert note.startswith("the step has a constant loss scale of its own, 1024, ")
    assert "'seed' is as much too large, and 0.000976562 multiplies all gradients" in note


@pytest.mark.parametrize(
    ("seed", "factor"),
    [(2 / 24, 1 / 1024), (1 / 8, 1 / 16), (2.0, 1 / 1024), (1024 * 2 / 24, 1 / 1000), (3.3, 1 / 1024)],
    ids=["a rate", "a rate of a mean", "a rate of a sum", "no power of two", "a weight of the loss"],
)
def test_other_constants_are_no_scale(seed: float, factor: float) -> None:
    assert not folded(seed, factor).warnings
