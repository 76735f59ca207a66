"""The first value of the forward pass that is not finite, in the graph."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import graphscale as gs
from graphscale.errors import SplitError, TargetError
from graphscale.passes import AddTelemetry
from tests.build import BACKWARD, FORWARD, feeds_for, step
from tests.conftest import MODEL_NAMES, Level, load_example
from tests.pipeline.test_ranges import TARGETS, metadata, run_both_forms
from tests.pipeline.test_strip import assert_strips
from tests.pipeline.test_telemetry import masked_step

pytestmark = pytest.mark.sample(1)

# Inputs in the order in which the forward pass reads them, and results in the order of its nodes.
FORWARD_VALUES = ["x", "w1", "w2", "t", "h", "a", "y", "d", "square", "loss"]


def names_of(scaled: Any) -> list[str]:
    names: list[str] = json.loads(metadata(scaled.model)["graphscale.telemetry"])["activations"]
    return names


def forward(feeds: dict[str, np.ndarray[Any, Any]]) -> dict[str, np.ndarray[Any, Any]]:
    with np.errstate(all="ignore"):
        h = feeds["x"] @ feeds["w1"]
        a = np.tanh(h)
        y = a @ feeds["w2"]
        d = y - feeds["t"]
        square = d * d
        return {**feeds, "h": h, "a": a, "y": y, "d": d, "square": square, "loss": square.mean()}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("form", ["activations", "ranges,activations"])
def test_the_first_value_is_the_one_of_numpy(target: str, form: str) -> None:
    model = masked_step()
    scaled = gs.scale(model, gs.DynamicLossScale(8.0), target=target, telemetry=form)
    assert names_of(scaled) == FORWARD_VALUES
    session, base, rng = gs.Session(scaled), feeds_for(model), np.random.default_rng(3)
    base |= {name: np.ones(shape, np.float32) for name, shape in (("m1", (4, 5)), ("m2", (5, 3)))}
    seen = set()
    for _ in range(120):
        feeds = {name: array.copy() for name, array in base.items()}
        for name in ("x", "w1", "w2", "t", "m1"):
            array = feeds[name].reshape(-1)
            if rng.random() < 0.25:
                array[rng.integers(array.size)] = rng.choice([np.nan, np.inf, -np.inf, 1e30, -1e38])
        if rng.random() < 0.2:
            feeds["x"][0, 0] = feeds["w1"][0, 0] = 1e30
        result, values = session.step(feeds), forward(feeds)
        first = next((name for name in FORWARD_VALUES if not np.isfinite(values[name]).all()), None)
        assert result.activation == (None if result.all_finite else first)
        seen.add((result.all_finite, result.activation))
    assert (True, None) in seen
    assert (False, None) in seen, "a gradient alone is not finite"
    assert {name for _, name in seen} >= {"x", "w1", "w2", "t", "h", "square"}


@pytest.mark.cover(1)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", MODEL_NAMES)
def test_activations_change_nothing_else(name: str, target: str) -> None:
    # With optimizations ONNX Runtime fuses nodes across the forward values that telemetry does not look at.
    (plain, told), (expected, actual) = run_both_forms(name, target, (True, "activations"), Level.ORT_DISABLE_ALL)
    assert actual.keys() - expected.keys() == {"first_activation"}
    assert actual["first_activation"] == -1
    values = {state.input for state in told.report.state}
    assert names_of(told) and values.isdisjoint(names_of(told)), "carried state is not looked at"
    in_place = [metadata(result.model).get("graphscale.in_place") for result in (plain, told)]
    assert in_place[0] == in_place[1], "no state is read for longer"


def test_scores_with_a_mask_of_minus_infinity_are_left_out() -> None:
    model = step(
        forward=FORWARD.replace("a = Tanh(h)", "s = Add(h, mask) a = Softmax<axis = 1>(s)"),
        backward="dy = Mul(d, two_over_n) at = Transpose<perm = [1, 0]>(a) dw2 = MatMul(at, dy)",
        constants="float[5] mask = {0, 0, -inf, 0, 0}",
        weights="float[4,5] w1, float[5,3] w2",
        outputs="float[5,3] dw2",
        one="",
    )
    names = names_of(gs.scale(model, telemetry="activations"))
    assert "s" not in names
    assert [name for name in names if name in "hay"] == ["h", "a", "y"]


def test_views_and_float16_are_left_out_and_casts_to_float32_are_not() -> None:
    low_forward = "u = Identity(x) low = Cast<to: int = 10>(u) v = Cast<to: int = 1>(low) h = MatMul(v, w1)"
    model = step(
        forward=FORWARD.replace("h = MatMul(x, w1)", low_forward),
        backward=BACKWARD.replace("Transpose<perm = [1, 0]>(x)", "Transpose<perm = [1, 0]>(v)"),
    )
    scaled = gs.scale(model, telemetry="activations")
    assert names_of(scaled)[:6] == ["x", "w1", "w2", "t", "v", "h"]
    session = gs.Session(scaled)
    feeds = feeds_for(model)
    feeds["x"][0, 0] = 1e6
    result = session.step(feeds)
    assert (result.applied, result.activation) == (False, "v"), "float16 cannot hold it"


@pytest.mark.parametrize("target", ["ort-cuda", "ort-training-cuda"])
def test_without_control_flow_activations_are_refused(target: str) -> None:
    with pytest.raises(TargetError, match="has no control flow; choose onnx, ort-cpu or ort-training"):
        gs.scale(masked_step(), target=target, telemetry=AddTelemetry(activations=True))


def test_a_step_that_looks_at_them_is_not_split(tmp_path: Path) -> None:
    scaled = gs.scale(load_example("pytorch/mlp_momentum").model(), telemetry="activations")
    with pytest.raises(SplitError, match="telemetry of activations reads the forward pass"):
        gs.split(scaled.model)


def test_strip_takes_it_out() -> None:
    model = masked_step()
    assert_strips(gs.scale(model, telemetry="ranges,activations").model, model)
