"""Updates that read a batch past the gradients: the terms that they add to weights are checked as well."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import graphscale as gs
from models.zoo import pack
from tests.build import feeds_for
from tests.cases.asked import linear
from tests.conftest import assert_same_bits, run_once

pytestmark = pytest.mark.static

MOMENTUM = "m9 = Mul (m, beta) m_next = Add (m9, gw)"
# The update of each step, whose rate or direction reads `more`.
KINDS = {
    "the rate of a momentum": "q = ReduceMean <keepdims: int = 0> (more) r = Mul (rate, q) u = Mul (m_next, r)",
    "a square of a momentum": "n = ReduceMean <keepdims: int = 0> (more) a = Mul (m_next, m_next) u = Mul (a, n)",
    "a bound of a momentum": "q = ReduceMean <keepdims: int = 0> (more) a = Tanh (m_next) u = Mul (a, q)",
}


def step(kind: str) -> onnx.ModelProto:
    update = f"{MOMENTUM} {KINDS[kind]} w_next = Sub (w, u)"
    return linear(inputs="float[8,3] more, float[4,3] m", outputs="float[4,3] m_next", update=update)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("number", [np.inf, np.nan], ids=str)
def test_a_number_that_is_not_finite_skips_the_step(kind: str, number: float) -> None:
    model = step(kind)
    scaled, feeds = gs.scale(model, accept=True).model, feeds_for(model)
    feeds["more"].reshape(-1)[5] = number
    assert not np.isfinite(run_once(model, feeds)[0]["w_next"]).all()
    outputs, _ = run_once(scaled, feeds)
    assert not outputs["all_finite"]
    for name in ("w", "m"):
        assert_same_bits(outputs[f"{name}_next"], feeds[name], name)


@pytest.mark.parametrize("kind", KINDS)
def test_a_finite_step_is_applied(kind: str) -> None:
    model = step(kind)
    outputs, _ = run_once(gs.scale(model, accept=True).model, feeds_for(model))
    assert outputs["all_finite"]
    assert np.allclose(outputs["w_next"], run_once(model, feeds_for(model))[0]["w_next"], rtol=1e-5)


@pytest.mark.parametrize("name", ["jax-per-example.clipped", "field-predictive-maintenance.learnt-variances"])
def test_steps_of_the_zoo_pass_their_trial(name: str) -> None:
    result = gs.scale(onnx.load_from_string(pack.read(name)[0]), accept=True, trial=True)
    assert result.report.trial is not None and result.report.trial.startswith("tried on ")


def test_a_share_of_a_weight_beside_a_batch() -> None:
    """Gossip: the next weight is a third of the weight, plus two thirds of what neighbours send."""
    model = onnx.load_from_string(pack.read("fresh-hand-weight-soup.gossip", pack.FRESH)[0])
    scaled, feeds = gs.scale(model).model, feeds_for(model)
    assert run_once(scaled, feeds)[0]["all_finite"]
    feeds["neighbours"].reshape(-1)[5] = np.inf
    outputs, _ = run_once(scaled, feeds)
    assert not outputs["all_finite"]
    assert_same_bits(outputs["w_next"], feeds["w"], "w")


def test_no_more_is_checked_where_gradients_are_all_that_moves_weights() -> None:
    logged = linear("q = ReduceMean <keepdims: int = 0> (x)", outputs="float q")
    assert gs.scale(linear()).report.inserted == gs.scale(logged).report.inserted
