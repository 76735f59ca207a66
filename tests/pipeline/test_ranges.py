"""Ranges of the gradients in the graph: largest magnitude, zeros and overflow, in every N-th step."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import onnx
import pytest

import graphscale as gs
from graphscale.errors import InvalidLossScaleError, TargetError
from graphscale.passes import AddTelemetry
from graphscale.session import GradientRange
from tests.build import EXACT, feeds_for, step
from tests.conftest import MODEL_NAMES, Arrays, Level, assert_all_same_bits, load_example, run_once
from tests.pipeline.test_strip import assert_strips
from tests.pipeline.test_telemetry import masked_step, random_masks

pytestmark = pytest.mark.sample(1)

TARGETS = ["onnx", "ort-cpu", pytest.param("ort-training", marks=pytest.mark.training)]


def range_of(gradient: np.ndarray[Any, Any]) -> tuple[float, float, float]:
    finite = gradient[np.isfinite(gradient)]
    share = 1 / max(1, gradient.size)
    return float(np.abs(finite).max(initial=0)), (gradient == 0).sum() * share, (gradient.size - finite.size) * share


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("opset", [13, 20])
def test_ranges_are_those_of_numpy_in_every_nth_step(target: str, every: int, opset: int) -> None:
    model = masked_step(opset)
    scaled = gs.scale(model, gs.DynamicLossScale(8.0), target=target, telemetry=AddTelemetry(ranges=True, every=every))
    session = gs.Session(scaled)
    assert session.ranges == {}
    rng, base, known, zeros = np.random.default_rng(1), feeds_for(model), dict[str, Any](), 0.0
    kinds = set()
    for number in range(1, 41):
        result = session.step({**base, **random_masks(rng)})
        gradients = {name: result[name] for name in ("g1", "g2")}
        if number % every == 1 or every == 1:
            known = {name: pytest.approx(range_of(gradient), abs=1e-6) for name, gradient in gradients.items()}
            zeros = sum((gradient == 0).sum() for gradient in gradients.values()) / 35
            kinds.add(any(session.ranges[name].overflow for name in known))
        assert session.ranges == known
        assert result.zero_fraction == pytest.approx(zeros, abs=1e-6)
        bad = [name for name, gradient in gradients.items() if not np.isfinite(gradient).all()]
        assert (result.applied, result.offender) == (not bad, bad[0] if bad else None), "in every step"
    assert len(kinds) == 2, "with overflow and without"


def run_both_forms(
    name: str, target: str, forms: tuple[Any, Any], level: Level
) -> tuple[list[gs.ScaledModel], list[Arrays]]:
    """Scale a graph with two forms of telemetry, run both, and compare all outputs that the first has."""
    example, policy = load_example(name), gs.DynamicLossScale(1024.0)
    results = [gs.scale(example.model(), policy, target=target, telemetry=form) for form in forms]
    outputs = [run_once(result.model, example.feeds, level)[0] for result in results]
    assert_all_same_bits({key: outputs[1][key] for key in outputs[0]}, outputs[0])
    return results, outputs


@pytest.mark.cover(1)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", MODEL_NAMES)
def test_ranges_change_nothing_else(name: str, target: str) -> None:
    (_, told), (_, actual) = run_both_forms(name, target, (False, "ranges"), EXACT)
    ranges = actual["gradient_ranges.next"]
    assert ranges.shape == (3, len(json.loads(metadata(told.model)["graphscale.telemetry"])["gradients"]) + 1)
    assert (ranges[0] > 0).any() and ranges[0, -1] == ranges[0, :-1].max()
    assert actual["zero_fraction"] == ranges[1, -1] and not ranges[2].any()


def metadata(model: onnx.ModelProto) -> dict[str, str]:
    return {entry.key: entry.value for entry in model.metadata_props}


@pytest.mark.parametrize(
    ("kind", "largest", "expected"), [("double", 1e300, np.inf), ("double", 1e-300, 0.0), ("float16", 100.0, 100.0)]
)
def test_other_types_and_a_gradient_without_elements(kind: str, largest: float, expected: float) -> None:
    """A number of float64 that float32 cannot hold is infinite as a magnitude, and no overflow."""
    model = step(
        f"wide = Cast<to: int = {11 if kind == 'double' else 10}>(dw1) g = Mul(wide, m) e = Mul(dw2, n)",
        inputs=f"{kind}[4,5] m, float[N,5,3] n",
        outputs=f"{kind}[4,5] g, float[N,5,3] e",
    )
    session = gs.Session(gs.scale(model, telemetry=AddTelemetry(ranges=True, every=1), gradients=["g", "e"]))
    mask = np.zeros((4, 5), {"double": np.float64, "float16": np.float16}[kind])
    mask[0, 0] = 1
    feeds = {**feeds_for(model), "m": mask, "n": np.zeros((0, 5, 3), np.float32)}
    mask[0, 0] = largest / float(session.step(feeds)["g"][0, 0])
    result = session.step(feeds)
    assert session.ranges["g"] == pytest.approx((expected, 19 / 20, 0), rel=2e-3)
    assert session.ranges["e"] == GradientRange(0, 0, 0)
    assert result.zero_fraction == pytest.approx(19 / 20)
    assert result.applied


def test_the_form_and_its_period_are_in_the_metadata() -> None:
    model = masked_step()
    assert gs.scale(model, telemetry="ranges").model == gs.scale(model, telemetry=AddTelemetry(ranges=True)).model
    told = metadata(gs.scale(model, telemetry=AddTelemetry(ranges=True, every=7)).model)
    assert json.loads(told["graphscale.telemetry"]) == {"gradients": ["g1", "g2"], "ranges": {"every": 7}}
    plain = metadata(gs.scale(model, telemetry=True).model)
    assert json.loads(plain["graphscale.telemetry"]) == {"gradients": ["g1", "g2"]}


@pytest.mark.parametrize("form", ["range", "", None, 1, "ranges,ranges", "activations,ranges"])
def test_another_form_is_refused(form: Any) -> None:
    with pytest.raises(InvalidLossScaleError, match="telemetry: expected 'ranges' or"):
        gs.scale(masked_step(), telemetry=form)


@pytest.mark.parametrize("every", [0, -1, 2**24 + 1, 2.0, True, None])
def test_another_period_is_refused(every: Any) -> None:
    with pytest.raises(InvalidLossScaleError, match=r"every 1 to 2\*\*24 steps"):
        AddTelemetry(ranges=True, every=every)


@pytest.mark.parametrize("target", ["ort-cuda", "ort-training-cuda"])
def test_without_control_flow_ranges_are_refused(target: str) -> None:
    with pytest.raises(TargetError, match="has no control flow; choose onnx, ort-cpu or ort-training"):
        gs.scale(masked_step(), target=target, telemetry="ranges")


@pytest.mark.full
def test_ranges_are_state_that_is_saved_and_stripped(tmp_path: Any) -> None:
    model = masked_step()
    scaled = gs.scale(model, telemetry="ranges")
    assert_strips(scaled.model, model)
    session, again = gs.Session(scaled), gs.Session(scaled)
    session.step({**feeds_for(model), **random_masks(np.random.default_rng(2))})
    session.save_state(tmp_path / "state.safetensors")
    again.load_state(tmp_path / "state.safetensors")
    assert again.ranges == session.ranges != {}
