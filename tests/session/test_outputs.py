"""Results of a step: all outputs but the carried state, or the fetched ones; later steps do not change them."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest

import graphscale as gs
from graphscale.errors import SessionError
from graphscale.session.carried import Device
from graphscale.session.step_plan import StepPlan
from tests.build import linear_step
from tests.conftest import TARGETS, Arrays, assert_all_same_bits, assert_same_bits, load_example
from tests.session.dangerous import CASES, batches
from tests.session.digits import batch, make, refused
from tests.session.plain import first_state, options

pytestmark = pytest.mark.sample(1)


def test_what_a_step_can_return() -> None:
    session = make()
    assert session.output_names == ("loss", "logits", "all_finite")
    result = session.step(batch())
    assert isinstance(result, gs.StepResult)
    assert tuple(result) == session.output_names
    assert all(type(value) is np.ndarray for value in result.values())
    assert (result["loss"].shape, result["logits"].shape, result["all_finite"].shape) == ((), (16, 10), ())
    assert result["loss"].dtype == np.float32
    assert session.stamp.names["loss"] == "loss"


def test_an_output_with_a_name_like_that_of_state() -> None:
    model = linear_step("ahead = Exp(loss)", outputs="float[4,3] dw, float ahead")
    for value in (model.graph.node[-1].output, [model.graph.output[-1].name]):
        assert list(value) == ["ahead"]
    model.graph.node[-1].output[0] = model.graph.output[-1].name = "loss.next"
    session = gs.Session(gs.scale(model))
    assert session.output_names == ("loss", "dw", "loss.next", "all_finite")


@pytest.mark.parametrize(
    "fetch",
    [[], ["loss"], ["logits", "loss"], ("loss",), {"all_finite"}, ["loss", "loss"], {"logits": 1, "loss": 2}],
    ids=str,
)
def test_exactly_what_is_fetched(fetch: Any) -> None:
    session, other = make(), make()
    for seed in range(3):
        expected, actual = other.step(batch(seed=seed)), session.step(batch(seed=seed), fetch=iter(fetch))
        assert list(actual) == list(dict.fromkeys(fetch))
        for name, value in actual.items():
            assert_same_bits(value, expected[name], name)
        assert actual.applied
        assert actual.all_finite
    assert_all_same_bits(session.state_dict(), other.state_dict())


def test_what_is_fetched_from_a_second_gpu_comes_to_the_host() -> None:
    """Its number is none of the host's devices."""
    session = make()
    session._carried.device = Device("cuda", 1)
    parts = (session._session, session._carried, session.inputs, session.output_names, session._status)
    plan = StepPlan(*parts, {}, tuple(session.inputs), ("loss",))
    assert plan._anew == [("loss", "cpu", 0), ("all_finite", "cuda", 1)]


@pytest.mark.parametrize("two_buffers", [False, True])
def test_feeds_and_fetches_in_any_order(two_buffers: bool) -> None:
    """More kinds of steps than a session keeps ready at a time; the state is the same for all of them."""
    scaled = CASES["metric"].scaled("dynamic", "onnx")
    session, other = (gs.Session(scaled) if two_buffers else make() for _ in range(2))
    random, seen = np.random.default_rng(0), set()
    for seed in range(60):
        feeds = next(batches(1, seed=seed % 5)) if two_buffers else batch(seed=seed % 5)
        order, fetch = random.permutation(list(feeds)), random.permutation(session.output_names)[: seed % 4]
        seen.add((*order, None, *fetch))
        expected, actual = other.step(feeds), session.step({name: feeds[name] for name in order}, fetch=list(fetch))
        assert list(actual) == list(fetch)
        assert_all_same_bits(actual, {name: expected[name] for name in fetch})
    assert len(seen) > (20 if two_buffers else 30)
    assert_all_same_bits(session.state_dict(), other.state_dict())


BAD_FETCH: dict[str, tuple[Any, tuple[str, ...]]] = {
    "unknown": (["accuracy"], ("accuracy", "loss")),
    "almost right": (["los"], ("did you mean 'loss'",)),
    "carried state": (["fc1.weight.next"], ("fc1.weight.next", "state_dict()")),
    "the next scale": (["current_loss_scale.next"], ("current_loss_scale.next", "state_dict()")),
    "an input": (["fc1.weight"], ("fc1.weight", "state_dict()")),
    "text": ("loss", ("['loss']",)),
    "no text": ([5], ("5",)),
    "None in a list": ([None], ("None",)),
    "a number": (5, ("fetch",)),
}


@pytest.mark.parametrize("case", BAD_FETCH)
def test_a_bad_fetch_is_one_clear_line(case: str) -> None:
    fetch, fragments = BAD_FETCH[case]
    session = make()
    before = session.state_dict()
    with refused(SessionError, fragments):
        session.step(batch(), fetch=fetch)
    assert_all_same_bits(session.state_dict(), before)
    assert session.step(batch()).applied


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("case", ["metric unchanged", "metric reshaped", "metric transposed", "metric"])
def test_outputs_keep_their_values_after_later_steps(case: str, target: str) -> None:
    """They are no views of a state's buffer, nor of a buffer that the next step writes to."""
    session = gs.Session(CASES[case].scaled("dynamic", target))
    kept = []
    for feeds in batches(5):
        result = session.step(feeds)
        kept.append((result, {name: value.copy() for name, value in result.items()}))
    assert len({float(result["loss"]) for result, _ in kept}) == 5
    for number, (result, copies) in enumerate(kept):
        for name, value in copies.items():
            assert_same_bits(result[name], value, f"{name}, step {number}")


def test_large_outputs_keep_their_values_too() -> None:
    """Of these no copy is made: they are what ONNX Runtime wrote."""
    session, kept = make(), []
    for seed in range(4):
        result = session.step(batch(8192, seed), fetch=["logits"])
        kept.append((result, result["logits"].copy()))
    session.close()
    assert kept[0][1].nbytes > 2**18
    for result, logits in kept:
        assert_same_bits(result["logits"], logits, "logits")


def test_what_a_result_says_stays_true_after_later_steps_and_close() -> None:
    session, results = make(), []
    for number in range(6):
        feeds = batch(seed=number)
        if number in (1, 4):
            feeds["images"][0, 0] = np.nan
        results.append(session.step(feeds, fetch=[]))
    session.close()
    assert [result.applied for result in results] == [True, False, True, True, False, True]
    assert [result.all_finite for result in results] == [True, False, True, True, False, True]


def test_outputs_belong_to_the_caller() -> None:
    session, other = make(), make()
    for seed in range(3):
        ours, theirs = session.step(batch(seed=seed)), other.step(batch(seed=seed))
        assert_same_bits(ours["loss"], theirs["loss"], "loss")
        for value in ours.values():
            value[...] = 0
    assert_all_same_bits(session.state_dict(), other.state_dict())


def test_a_result_of_a_policy_that_tells_nothing() -> None:
    result = make().step(batch())
    for other in (copy.copy(result), dict(result)):
        assert set(other) == set(result)
    assert (result.stuck, result.cause, result.offender, result.zero_fraction) == (False, None, None, None)


# --- steps with a stuck loss scale: each way of `on_stuck`, on a real graph, step by step -----------------------------

NAME = "pytorch/mlp_momentum"
# The scale is at its floor after two bad steps, and stuck at the third; or stuck after so many in a row.
STEPS = "TTFFFFTFFFFTT"
MINIMUM = {"initial_loss_scale": 4.0, "increment_period": 2}
IN_A_ROW = {"initial_loss_scale": 2.0**20, "increment_period": 100, "max_consecutive_skips": 3}


def stuck_batches() -> list[Arrays]:
    feeds = load_example(NAME).feeds
    made = []
    for number, letter in enumerate(STEPS):
        x = feeds["x"] + np.float32(0.01 * number)
        if letter == "F":
            x[3, 5] = np.nan
        made.append({"x": x, "target": feeds["target"]})
    return made


def open_session(policy: gs.DynamicLossScale, target: str) -> gs.Session:
    result = gs.scale(load_example(NAME).model(), policy, target=target)
    return gs.Session(result, state=first_state(result, load_example(NAME).feeds), session_options=options())


def weights(session: gs.Session) -> Arrays:
    return {name: value for name, value in session.state_dict().items() if name.startswith("fc")}


@pytest.mark.parametrize("on_stuck", ["hold", "flag", "stop", "reset", "accept"])
@pytest.mark.parametrize("stuck_by", [MINIMUM, IN_A_ROW], ids=["minimum", "in a row"])
@pytest.mark.parametrize("target", TARGETS)
def test_every_step_is_what_the_eager_policy_says(on_stuck: Any, stuck_by: dict[str, Any], target: str) -> None:
    session = open_session(gs.DynamicLossScale(**stuck_by, on_stuck=on_stuck), target)
    eager = gs.DynamicLossScale(**stuck_by, on_stuck=on_stuck)
    stuck, accepted = 0, 0
    for letter, feeds in zip(STEPS, stuck_batches(), strict=True):
        before = weights(session)
        result = session.step(feeds)
        _, applied = eager.update([np.array([1.0 if letter == "T" else np.nan])])
        assert result.all_finite == (letter == "T")
        assert result.applied == applied
        assert result.stuck == (on_stuck != "hold" and eager.stuck)
        assert (session.loss_scale, session.good_steps) == (float(eager()), eager.num_good_steps)
        if not applied:
            assert_all_same_bits(weights(session), before)
        elif letter == "F":
            accepted += 1
            assert any(np.isnan(value).any() for value in weights(session).values())
            session.load_state_dict({**session.state_dict(), **before})
        else:
            assert any((value != before[name]).any() for name, value in weights(session).items())
        stuck += result.stuck
    if on_stuck == "hold":
        assert stuck == 0
    else:
        assert stuck >= 2
    assert (accepted > 0) == (on_stuck == "accept")


def test_stuck_is_an_output_where_the_policy_tells() -> None:
    """It can be fetched, or asked of the result without that."""
    told = open_session(gs.DynamicLossScale(**MINIMUM, on_stuck="flag"), "onnx")
    silent = open_session(gs.DynamicLossScale(**MINIMUM), "onnx")
    assert set(told.output_names) - set(silent.output_names) == {"stuck"}
    for feeds in stuck_batches()[:6]:
        fetched, asked = told.step(feeds, fetch=["stuck"]), silent.step(feeds)
        assert fetched.stuck == bool(fetched["stuck"])
        assert not asked.stuck
    assert fetched.stuck
