"""Answers about roles: their form, the file with proposals, and contradictions by the graph."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest

import graphscale as gs
from graphscale.analysis.roles.answers import Answers
from graphscale.analysis.roles.roles_file import roles_file, roles_schema
from graphscale.errors import LossError, RolesError
from tests.analysis.roles import test_carried_state, test_numbers, test_stored_state
from tests.analysis.roles.steps import (
    computed_average_step,
    exchanged_step,
    gradients_step,
    hidden_state_step,
    look_ahead_step,
    momentum_step,
    previous_gradient_step,
    roles_of,
    square_step,
    states,
    swappable_step,
    update_step,
)
from tests.build import EXACT, assert_skips, feeds_for, linear_step, numbers
from tests.conftest import assert_all_same_bits, run_once
from tests.expressions import nodes

CARRIED = test_carried_state.STEPS | test_numbers.STEPS | test_stored_state.STEPS
FIELDS = ["losses", "states", "gradients", "metrics", "kept"]
SWAPPED = {"a_next": "b", "b_next": "a"}
STEPS = [
    *(update_step, linear_step, momentum_step, hidden_state_step, swappable_step, square_step),
    *(computed_average_step, look_ahead_step, gradients_step),
]


def proposal(model: onnx.ModelProto) -> dict[str, Any]:
    """The content of the roles file of a step."""
    content: dict[str, Any] = json.loads(roles_file(gs.inspect(model).roles))
    return content


@pytest.mark.sample(8)
@pytest.mark.parametrize("name", [name for name, (_, expected) in CARRIED.items() if "?" in str(expected)])
def test_proposals_taken_as_they_are_leave_no_question(name: str) -> None:
    model, expected = CARRIED[name]
    answered = {output: role.rstrip("?") for output, role in expected.items() if output != "loss"}
    assert roles_of(model, proposal(model)) == answered


def test_a_stored_weight_of_zeros_is_named() -> None:
    """Nothing but its name says that the zeros are no constant, from which the gradient alone is subtracted."""
    model = update_step(
        "b_next = b - db * rate",
        constants=f"float[3] b = {numbers(3)}",
        forward=nodes("y = x @ w + b; d = y - t; loss = ReduceMean(d * d, keepdims=0)"),
        backward=nodes("dy = d * two_over_n; dw = x.T @ dy; db = ReduceSum(dy, axis, keepdims=0)"),
        control="",
    )
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([0]), "axis"))
    named = {"states": {"w_next": "w", "b_next": "b"}, "losses": ["loss"]}
    assert states_of(gs.scale(model, roles=named).report) == named["states"]


def states_of(report: gs.Report) -> dict[str | None, str]:
    """The carried state of a report without that of the loss scale, by output."""
    return {s.output: s.input for s in report.state if s.input not in ("current_loss_scale", "good_steps")}


class TestTheForm:
    @pytest.mark.parametrize(
        ("content", "words"),
        [
            ([], ["expected an object with losses, states", "list"]),
            ({"states": ["w_next", "w"]}, ["states must be an object"]),
            ({"states": {"w_next": None}}, ["states must be an object"]),
            ({"states": None}, ["states must be an object"]),
            ({"losses": "loss"}, ["losses must be a list of names"]),
            ({"gradients": {"dw": "w"}}, ["gradients must be a list of names"]),
            ({"metrics": [1]}, ["metrics must be a list of names"]),
            ({"metrics": None}, ["metrics must be a list of names"]),
            ({"kept": [["w_next"]]}, ["kept must be a list of names"]),
            ({"losses": ["loss"], "metrics": ["loss"]}, ["'loss' has two roles"]),
            ({"gradients": ["w_next"], "states": {"w_next": "w"}}, ["'w_next' has two roles"]),
            ({"metrics": ["a", "a"]}, ["'a' has two roles"]),
            ({"metric": ["a"]}, ["there is no field 'metric'", "losses, states"]),
            ({1: []}, ["there is no field 1"]),
        ],
        ids=str,
    )
    def test_another_form(self, content: Any, words: list[str]) -> None:
        with pytest.raises(RolesError) as raised:
            gs.scale(update_step(), roles=content)
        message = str(raised.value)
        assert message.startswith("roles: ") and "\n" not in message
        assert all(word in message for word in words), message

    @pytest.mark.parametrize(
        ("content", "words"),
        [
            ({"losses": ["nope"]}, "'nope'|nope:"),
            ({"losses": ["w_next"]}, "w_next"),
            ({"states": {"nope": "w"}}, "no output 'nope'"),
            ({"states": {"w_next": "nope"}}, "no input 'nope'"),
            ({"states": {"w_next": "x"}}, r"w_next FLOAT\[4,3\] cannot be the next value of x FLOAT\[8,4\]"),
            ({"gradients": ["nope"]}, "nope"),
            ({"gradients": ["x"]}, "x"),
            ({"metrics": ["nope"]}, "no output 'nope'"),
            ({"metrics": ["dw"]}, "no output 'dw'"),
            ({"kept": ["nope"]}, "nope: the graph has no carried state of this name"),
            ({"kept": ["loss"]}, "loss: the graph has no carried state of this name"),
            ({"kept": ["w"]}, "w: the graph has no carried state of this name"),
        ],
        ids=str,
    )
    def test_names_that_the_graph_does_not_have(self, content: Any, words: str) -> None:
        with pytest.raises(gs.GraphscaleError, match=words) as raised:
            gs.scale(update_step(), roles=content)
        assert "\n" not in str(raised.value)

    def test_one_input_for_two_outputs(self) -> None:
        with pytest.raises(gs.GraphscaleError, match="'w' is named for two outputs"):
            gs.scale(look_ahead_step(), roles={"states": {"w_next": "w", "w_ahead": "w"}})

    def test_nothing_is_an_answer(self) -> None:
        for nothing in (None, {}, Answers(), {field: {} if field == "states" else [] for field in FIELDS}):
            assert roles_of(update_step(), nothing) == {"w_next": "next w"}

    def test_single_names_are_added_to_the_file(self) -> None:
        model = square_step()
        for given in ({"updates": {"v_next": "v"}}, {"roles": {"states": {"v_next": "v"}}}):
            assert states_of(gs.scale(model, **given).report) == {"w_next": "w", "v_next": "v"}
        both = gs.scale(model, roles={"losses": ["loss"], "states": {"v_next": "v"}}, updates={"v_next": "v"})
        assert states_of(both.report) == {"w_next": "w", "v_next": "v"}

    def test_single_names_that_contradict_the_file(self) -> None:
        message = "--update a_next=b: the roles file says that 'a_next' is the next value of 'a'"
        with pytest.raises(RolesError, match=message):
            gs.scale(swappable_step(), roles={"states": {"a_next": "a"}}, updates={"a_next": "b"})
        for given in ({"updates": {"v_next": "v"}}, {"gradients": ["v_next"]}):
            with pytest.raises(RolesError, match="'v_next' has two roles"):
                gs.scale(square_step(), roles={"metrics": ["v_next"]}, **given)
        with pytest.raises(RolesError, match="'length' has two roles"):
            gs.scale(update_step(), roles={"metrics": ["length"]}, loss="length")


class TestTheFile:
    def test_it_explains_itself(self) -> None:
        content = proposal(square_step())
        assert list(content) == ["help", *FIELDS, "open"]
        assert set(content["help"]) == {*FIELDS, "open"}
        assert content["losses"] == ["loss"] and content["kept"] == []
        assert content["states"] == {"w_next": "w", "v_next": "v"}
        assert list(content["open"]) == ["v_next"]

    def test_its_schema_accepts_what_scale_accepts(self) -> None:
        jsonschema = pytest.importorskip("jsonschema", reason="needs jsonschema; the quick tier has it")
        schema = roles_schema()
        jsonschema.Draft202012Validator.check_schema(schema)
        is_valid = jsonschema.Draft202012Validator(schema).is_valid
        assert is_valid(proposal(square_step())) and is_valid({})
        for content in (
            [],
            {"state": {}},
            {"states": ["w"]},
            {"states": {"w_next": 1}},
            {"kept": "w"},
            {"losses": [1]},
        ):
            assert not is_valid(content)
            with pytest.raises(RolesError):
                Answers.of(content)

    def test_it_lists_each_output_once(self) -> None:
        model = update_step(
            "length = ReduceL2(w_next, keepdims=0); alone = Identity(one)",
            outputs="float length, float alone, float[4,3] dw",
        )
        content = proposal(model)
        assert (content["losses"], content["states"]) == (["loss"], {"w_next": "w"})
        assert (content["gradients"], content["metrics"]) == (["dw"], ["length", "alone"])
        assert content["open"] == {}

    @pytest.mark.parametrize("make", STEPS)
    def test_it_is_accepted_unchanged(self, make: Callable[[], onnx.ModelProto]) -> None:
        model = make()
        content = proposal(model)
        result = gs.scale(model, roles=content)
        assert states_of(result.report) == content["states"]
        assert all(entry.certain for entry in result.report.roles)
        if not content["open"]:
            assert result.report.gradients == gs.scale(model).report.gradients
        feeds = feeds_for(model)
        expected, _ = run_once(model, feeds, EXACT)
        actual, _ = run_once(result.model, feeds, EXACT)
        assert actual["all_finite"]
        assert_all_same_bits(actual, expected)
        assert_skips(result, feeds)

    def test_a_state_corrected_to_a_metric(self) -> None:
        content = proposal(square_step())
        content["metrics"].append("v_next")
        del content["states"]["v_next"]
        assert states_of(gs.scale(square_step(), roles=content).report) == {"w_next": "w"}

    @pytest.mark.parametrize("given", [{"roles": {"gradients": ["v_next"]}}, {"gradients": ["v_next"]}], ids=str)
    def test_a_state_corrected_to_a_gradient(self, given: Any) -> None:
        assert states_of(gs.scale(square_step(), **given).report) == {"w_next": "w"}

    @pytest.mark.parametrize("given", [{}, {"roles": {"states": {"dw": "before"}}}], ids=str)
    def test_a_named_gradient_that_the_next_step_reads(self, given: Any) -> None:
        """The scale comes out where it is named, and the gradient is carried state as it is without its name."""
        report = gs.scale(previous_gradient_step(), gradients=["dw"], **given).report
        assert states_of(report) == {"w_next": "w", "dw": "before"}
        assert [gradient.value for gradient in report.gradients] == ["dw"]

    @pytest.mark.parametrize("given", [{"loss": "dw"}, {"roles": {"metrics": ["dw"]}}], ids=str)
    def test_a_named_gradient_has_no_other_role(self, given: Any) -> None:
        with pytest.raises(RolesError, match="'dw' has two roles"):
            gs.scale(previous_gradient_step(), gradients=["dw"], **given)

    def test_an_output_with_another_role_is_not_the_loss(self) -> None:
        for answers in ({"metrics": ["loss"]}, {"gradients": ["loss"]}):
            with pytest.raises(LossError, match="no scalar floating-point output that could be the loss"):
                gs.scale(update_step(), roles=answers)

    def test_states_corrected_to_be_swapped(self) -> None:
        """The graph leaves it open, so that no force is needed."""
        squares = update_step("a_next = dw * dw; b_next = dw * u", "float[4,3] a, float[4,3] b")
        assert states_of(gs.scale(squares, roles={"states": SWAPPED}).report) == {"w_next": "w", **SWAPPED}


def test_autocast_takes_answers_as_scale_does() -> None:
    answers = {"states": {"h_next": "h"}}
    for roles in (answers, Answers.of(answers)):
        scaled = gs.autocast(hidden_state_step(), loss_scale="dynamic", roles=roles).scaling
        assert scaled is not None and states_of(scaled)["h_next"] == "h"
        assert gs.autocast(hidden_state_step(), roles=roles).report
    with pytest.raises(RolesError, match="'h_next'"):
        gs.autocast(hidden_state_step())


def two_moments() -> onnx.ModelProto:
    return update_step("a_next = a * beta + dw; b_next = b * beta + u", "float[4,3] a, float[4,3] b")


class TestContradictions:
    def test_swapped_pairs_are_refused_with_the_evidence(self) -> None:
        with pytest.raises(RolesError) as raised:
            gs.scale(two_moments(), roles={"states": SWAPPED})
        message = str(raised.value)
        assert "\n" not in message
        assert "a_next FLOAT[4,3] is named the next value of 'b', but it holds 'a' 0.9 times" in message
        assert message.endswith("correct it, or pass --force-roles")

    def test_single_names_are_held_against_the_evidence_too(self) -> None:
        with pytest.raises(RolesError, match=r"it holds 'a' 0\.9 times"):
            gs.scale(two_moments(), updates=SWAPPED)

    def test_a_weight_swapped_with_its_average_is_refused(self) -> None:
        """The average may hold the weight, but the next weight does not depend on the average."""
        with pytest.raises(RolesError, match=r"w_next .* is named the next value of 'ema', but it holds 'w' 1 times"):
            gs.scale(computed_average_step(), updates={"w_next": "ema", "ema_next": "w"})

    def test_a_descent_from_an_input_is_the_next_value_of_no_third_one(self) -> None:
        """Of a weight it may be."""
        model = update_step("a_next = a - u", "float[4,3] a, float[4,3] b")
        with pytest.raises(RolesError, match=r"a_next .* is named the next value of 'b', but it holds 'a' 1 times"):
            gs.scale(model, roles={"states": {"a_next": "b"}})

    def test_a_sum_of_the_next_weight_and_an_activation_of_a_state_may_be_the_state(self) -> None:
        model = update_step("ema_next = Tanh(ema) * rate + w_next", "float[4,3] ema")
        assert roles_of(model, {"states": {"w_next": "w", "ema_next": "ema"}}) == states("w", "ema")

    def test_a_copy_in_float16_may_be_a_metric(self) -> None:
        model = update_step("small = Cast(w_next, to=10)", outputs="float16[4,3] small")
        assert roles_of(model, {"metrics": ["small"]}) == {**states("w"), "small": "metric"}

    def test_force_takes_the_answer(self) -> None:
        for given in ({"roles": {"states": SWAPPED}}, {"updates": SWAPPED}):
            result = gs.scale(two_moments(), **given, force_roles=True)
            assert states_of(result.report) == {"w_next": "w", **SWAPPED}

    def test_what_is_asked_about_may_have_any_role(self) -> None:
        average = "a_next = a * share + w_next * (one - share); shown = a + share"
        model = update_step(average, "float share, float[4,3] a", "float[4,3] shown")
        assert roles_of(model)["shown"].endswith("?")
        assert roles_of(model, {"metrics": ["shown"]})["shown"] == "metric"
        assert roles_of(model, {"states": {"a_next": "a"}, "metrics": ["shown"]})["shown"] == "metric"

    @pytest.mark.parametrize("role", ["gradient", "metric"])
    def test_another_role_of_what_holds_a_state_is_refused(self, role: str) -> None:
        roles = {f"{role}s": ["b_next"]}
        with pytest.raises(RolesError, match=rf"b_next FLOAT\[4,3\] is named a {role}, but it holds 'b' 0\.9 times"):
            gs.scale(two_moments(), roles=roles)
        assert states_of(gs.scale(two_moments(), roles=roles, force_roles=True).report) == {
            "w_next": "w",
            "a_next": "a",
        }

    def test_naming_one_pair_leaves_the_others_found(self) -> None:
        for named in ({"a_next": "a"}, {"b_next": "b"}, {"w_next": "w"}):
            assert roles_of(two_moments(), {"states": named}) == states("w", "a", "b")

    def test_a_named_pair_is_not_doubted(self) -> None:
        descent = CARRIED["a descent that may begin anew"][0]
        assert roles_of(descent, {"states": {"w_next": "first"}}) == {"w_next": "next first"}

    def test_naming_one_role_leaves_the_others_asked_about(self) -> None:
        assert roles_of(hidden_state_step(), {"states": {"w_next": "w"}})["h_next"] == "next h?"
        with pytest.raises(RolesError, match="one output has no certain role: 'h_next'"):
            gs.scale(hidden_state_step(), updates={"w_next": "w"})


class TestTheQuestion:
    def test_it_names_all_that_is_open_at_once(self) -> None:
        with pytest.raises(RolesError) as raised:
            gs.scale(exchanged_step())
        message = str(raised.value)
        assert "\n" not in message
        assert message.startswith("2 outputs have no certain role: ")
        assert "'p': next value of a? it could be exchanged with 'q'" in message and "'q': next value of b?" in message
        assert "--roles-out FILE.json" in message and message.endswith("--roles FILE.json")
        assert "--update" not in message

    def test_it_carries_the_whole_table(self) -> None:
        with pytest.raises(RolesError) as raised:
            gs.scale(hidden_state_step())
        assert raised.value.table == gs.roles(hidden_state_step())

    def test_inspecting_does_not_ask(self) -> None:
        report = gs.inspect(hidden_state_step())
        assert [entry.name for entry in report.roles if not entry.certain] == ["h", "h_next"]
        assert states_of(report) == {"w_next": "w", "moved": "r"}


class TestKeptState:
    @pytest.mark.parametrize("given", [{"keep": ["n_next"]}, {"roles": {"kept": ["n_next"]}}], ids=str)
    def test_it_advances_on_skipped_steps(self, given: Any) -> None:
        model = momentum_step()
        result = gs.scale(model, **given)
        feeds = feeds_for(model, n=np.int64(7))
        outputs, _ = run_once(result.model, feeds, EXACT)
        assert outputs["all_finite"] and outputs["n_next"] == 8
        outputs, _ = run_once(result.model, {**feeds, "x": np.full_like(feeds["x"], np.nan)}, EXACT)
        assert not outputs["all_finite"] and outputs["n_next"] == 8
        assert_all_same_bits(outputs, {"w_next": feeds["w"], "m_next": feeds["m"]})

    def test_a_name_that_is_no_state(self) -> None:
        for name in ("nope", "loss", "n"):
            with pytest.raises(RolesError, match=f"--keep {name}: the graph has no carried state of this name"):
                gs.scale(momentum_step(), keep=[name])

    def test_a_session_carries_it_on(self) -> None:
        model = momentum_step()
        feeds = feeds_for(model)
        state = {name: feeds.pop(name) for name in ("w", "m", "n")}
        session = gs.Session(gs.scale(model, keep=["n_next"]), state={**state, "n": np.int64(0)})
        batches = [feeds, {**feeds, "x": np.full_like(feeds["x"], np.inf)}, feeds]
        finite = [bool(session.step(batch)["all_finite"]) for batch in batches]
        assert finite == [True, False, True]
        assert session.state_dict()["n"] == 3
        assert np.isfinite(session.state_dict()["w"]).all()
