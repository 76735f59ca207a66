"""Telemetry in the graph: counters, the cause of a skip, the first offending gradient, the share of zeros."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

import graphscale as gs
from graphscale.errors import InvalidLossScaleError
from tests.build import EXACT, feeds_for, step
from tests.conftest import MODEL_NAMES, TARGETS, assert_all_same_bits, initial_values, load_example, run_once

pytestmark = pytest.mark.sample(2)

TOLD = ["skip_cause", "first_offender", "zero_fraction"]


def masked_step(opset: int = 20) -> onnx.ModelProto:
    """Gradients that masks, which are inputs, can make zero, infinite or NaN at any element."""
    return step(
        "g1 = Mul(dw1, m1) g2 = Mul(dw2, m2)",
        inputs="float[4,5] m1, float[5,3] m2",
        outputs="float[4,5] g1, float[5,3] g2",
        opset=opset,
    )


def random_masks(rng: np.random.Generator) -> dict[str, np.ndarray[Any, Any]]:
    masks = {}
    for name, shape in (("m1", (4, 5)), ("m2", (5, 3))):
        mask = np.ones(shape, dtype=np.float32)
        mask[rng.random(shape) < rng.choice([0.0, 0.3, 1.0])] = 0
        for value in (np.inf, -np.inf, np.nan):
            if rng.random() < 0.3:
                mask.flat[rng.integers(mask.size)] = value
        masks[name] = mask
    return masks


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("opset", [13, 20])
def test_what_a_step_tells_is_what_numpy_finds(target: str, opset: int) -> None:
    model = masked_step(opset)
    session = gs.Session(gs.scale(model, gs.DynamicLossScale(8.0), target=target, telemetry=True))
    base, rng = feeds_for(model), np.random.default_rng(0)
    counters = dict.fromkeys(("steps", "skipped_steps", "consecutive_skips", "last_skip_step"), 0)
    causes = set()
    for number in range(1, 101):
        result = session.step({**base, **random_masks(rng)})
        gradients = [result["g1"], result["g2"]]
        bad = [i for i, gradient in enumerate(gradients) if not np.isfinite(gradient).all()]
        counters["steps"] += 1
        if bad:
            cause = "nan" if np.isnan(gradients[bad[0]]).any() else "inf"
            expected = (False, cause, ("g1", "g2")[bad[0]])
            counters["skipped_steps"] += 1
            counters["consecutive_skips"] += 1
            counters["last_skip_step"] = number
        else:
            expected = (True, None, None)
            counters["consecutive_skips"] = 0
        assert (result.applied, result.cause, result.offender) == expected
        zeros = sum(np.count_nonzero(gradient == 0) for gradient in gradients) / 35
        assert result.zero_fraction == pytest.approx(zeros, abs=1e-6)
        assert session.counters == counters
        causes.add(expected)
    assert len(causes) == 5  # NaN and infinity in either, and none


@pytest.mark.cover(1)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", MODEL_NAMES)
def test_telemetry_changes_nothing_else(name: str, target: str) -> None:
    example = load_example(name)
    policy = gs.DynamicLossScale(1024.0)
    plain, told = (gs.scale(example.model(), policy, target=target, telemetry=on) for on in (False, True))
    assert plain.report.inserted == {key: n for key, n in told.report.inserted.items() if key != "telemetry"}
    expected, actual = (run_once(result.model, example.feeds, EXACT)[0] for result in (plain, told))
    assert_all_same_bits({key: actual[key] for key in expected}, expected)
    assert actual["skip_cause"] == 0 and actual["first_offender"] == -1
    assert 0 <= actual["zero_fraction"] < 1
    assert list(actual)[-1] == "all_finite"


def test_off_there_is_nothing_of_it() -> None:
    model = masked_step()
    assert gs.scale(model).model == gs.scale(model, telemetry=False).model
    session = gs.Session(gs.scale(model))
    result = session.step({**feeds_for(model), "m1": np.full((4, 5), np.nan, dtype=np.float32)})
    assert (result.applied, result.cause, result.offender, result.zero_fraction) == (False, None, None, None)
    assert session.counters == {}


def test_a_fixed_scale_that_skips_nothing_has_nothing_to_tell() -> None:
    with pytest.raises(InvalidLossScaleError, match="skip_nonfinite"):
        gs.scale(masked_step(), 8, telemetry=True)
    session = gs.Session(gs.scale(masked_step(), 8, telemetry=True, skip_nonfinite=True))
    result = session.step({**feeds_for(masked_step()), "m2": np.full((5, 3), -np.inf, dtype=np.float32)})
    assert (result.applied, result.cause, result.offender) == (False, "inf", "g2")


def test_names_that_are_taken() -> None:
    model = step("steps = Identity(loss)", outputs="float steps, float[4,5] dw1, float[5,3] dw2")
    result = gs.scale(model, telemetry=True)
    assert result.report.renamed["steps"] == "steps_1"
    session = gs.Session(result)
    session.step(feeds_for(model))
    assert session.counters["steps"] == 1


@pytest.mark.parametrize("target", ["ort-cuda", "ort-training-cuda"])
def test_on_cuda_nothing_waits_for_the_host(target: str) -> None:
    """An If would: its condition is read on the CPU."""
    scaled = gs.scale(masked_step(), target=target, telemetry=True).model
    assert "If" not in {node.op_type for node in scaled.graph.node}
    assert "skip_cause" in {output.name for output in scaled.graph.output}


def test_counters_begin_at_zero_and_are_state() -> None:
    scaled = gs.scale(masked_step(), telemetry=True)
    first = initial_values(scaled.model)
    for name in ("steps", "skipped_steps", "consecutive_skips", "last_skip_step"):
        assert first[name] == 0 and first[name].dtype == np.int64
        assert {s.input: s.output for s in scaled.report.state}[name] == f"{name}.next"
    names = [output.name for output in scaled.model.graph.output]
    assert [name for name in names if name in TOLD] == TOLD
