"""Runs of scaled steps with each kind of carried state: the original's bits, and skipped steps without effect."""

from __future__ import annotations

import onnx
import pytest

import graphscale as gs
from tests.analysis.roles.steps import hidden_state_step, momentum_step, previous_gradient_step, update_step
from tests.analysis.roles.test_answers import CARRIED, SWAPPED, proposal, two_moments
from tests.build import assert_same_step, feeds_for
from tests.conftest import assert_all_same_bits


def running_mean() -> onnx.ModelProto:
    """A moved average of the batch, with its share as an input."""
    return update_step("r_next = r + (ReduceMean(x, axes, keepdims=0) - r) * share", "float[4] r, float share")


GUARDED = (
    "float16 weights cast from the next masters",
    "a queue moved on by the batch",
    "an update in a branch",
    "amsgrad",
    "max norm",
    "the weight of the step before",
    "a counter that begins at zero",
    "a momentum of zeros",
)
OTHERS = (previous_gradient_step, running_mean, momentum_step, hidden_state_step)
STEPS = [
    *(pytest.param(CARRIED[name][0], id=name) for name in GUARDED),
    *(pytest.param(make(), id=make.__name__) for make in OTHERS),
]


@pytest.mark.parametrize("model", STEPS)
def test_a_skipped_step_never_happened(model: onnx.ModelProto) -> None:
    content = proposal(model)
    report = assert_same_step(model, roles=content)
    assert {s.output for s in report.state} >= content["states"].keys()
    carried = {value.name for value in model.graph.output if value.name.endswith("_next")}
    assert content["states"].keys() >= carried


@pytest.mark.parametrize("model", STEPS)
def test_a_session_trains_with_it(model: onnx.ModelProto) -> None:
    """A batch of NaN between two good ones leaves no trace."""
    content = proposal(model)
    result = gs.scale(model, roles=content)
    feeds = feeds_for(model)
    state = {name: feeds.pop(name) for name in content["states"].values() if name in feeds}
    after = []
    for batches in ([feeds, feeds], [feeds, {**feeds, "x": feeds["x"] * float("nan")}, feeds]):
        session = gs.Session(result, state=state)
        for batch in batches:
            session.step(batch)
        held = session.state_dict()
        after.append({name: held[name] for name in content["states"].values()})
    assert_all_same_bits(*after)


class TestVerify:
    def test_a_step_that_was_asked_about(self) -> None:
        model = hidden_state_step()
        content = proposal(model)
        assert gs.verify(model, gs.scale(model, roles=content).model, roles=content, runs=1).ok

    def test_kept_state(self) -> None:
        model = momentum_step()
        roles = {"kept": ["n_next"]}
        assert gs.verify(model, gs.scale(model, roles=roles).model, roles=roles, runs=1).ok

    def test_forced_roles(self) -> None:
        model = two_moments()
        scaled = gs.scale(model, roles={"states": SWAPPED}, force_roles=True).model
        assert gs.verify(model, scaled, roles={"states": SWAPPED}, force_roles=True, runs=1).ok
