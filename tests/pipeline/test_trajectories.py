"""The loss scale's way through many steps of real training graphs, overflows among them, on each kind of session."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import graphscale as gs
from tests.conftest import (
    FLOAT32_MAX,
    OPTIMIZATION_LEVELS,
    SEQUENCES,
    TARGETS,
    Arrays,
    Example,
    Sequence,
    assert_same_bits,
    load_example,
    make_session,
    run_session,
    with_initializers,
)

pytestmark = pytest.mark.sample(2)

# A step of the first three carries state through the graph; that of the fourth accumulates its gradients in place.
GRAPHS = ["pytorch/mlp_momentum", "jax/mlp_adam", "ort/gradbuilder_mlp", "ort/digits_mlp", "ort/gradbuilder_regression"]


def eager(steps: str, **config: float) -> Sequence:
    """A sequence by the policy on its own; `SEQUENCES` pin its behaviour."""
    policy, states = gs.DynamicLossScale(**config), []
    for letter in steps:
        policy.update([np.array([1.0 if letter == "T" else np.nan])])
        states.append((float(policy()), policy.num_good_steps))
    return Sequence(config, steps, *zip(*states, strict=True))


# Overflows come singly and in rows; the scale grows, overflows right after growth, and falls to the floor.
FIFTY = eager(
    "TTTTFTTTTTTTFFTTTFTTTTTTTTTFFFFFFFFTTTTFTTTTTTTTTT",
    initial_loss_scale=16.0,
    increment_period=3,
    multiplier=2.0,
)


def batch(example: Example, finite: bool) -> Arrays:
    """The inputs that are no carried state: a batch, with an Inf in it or without."""
    feeds = {name: example.feeds[name] for name in ("x", "input", "labels", "target") if name in example.feeds}
    feeds |= {name: value for name, value in example.feeds.items() if "_grad" in name}
    name = "x" if "x" in feeds else "input"
    if not finite:
        feeds[name] = feeds[name].copy()
        feeds[name][3, 5] = np.inf
    return feeds


def first_state(example: Example) -> Arrays:
    """The inputs that the step carries, or hands through."""
    return {name: value for name, value in example.feeds.items() if name not in batch(example, True)}


def test_the_fifty_steps_are_worth_running() -> None:
    assert len(FIFTY.scales) == 50
    assert (min(FIFTY.scales), max(FIFTY.scales), len(set(FIFTY.scales))) == (1, 128, 8)


# Summed squared errors overflow in truth at the largest scales: that is a test of its own.
each_sequence = pytest.mark.parametrize(
    ("name", "sequence"),
    [
        pytest.param(name, sequence, id=f"{name}-{sequence.name}")
        for name in GRAPHS
        for sequence in (FIFTY, *SEQUENCES)
        if name != "ort/gradbuilder_regression" or sequence.config["initial_loss_scale"] < 2**20
    ],
)


def check(outputs: Arrays, expected: tuple[bool, float, int], count: type) -> None:
    finite, scale, good_steps = expected
    assert outputs["all_finite"] == finite
    assert_same_bits(outputs["current_loss_scale.next"], np.float32(scale), "scale")
    assert_same_bits(outputs["good_steps.next"], np.asarray(good_steps, count), "good steps")


def prepared(name: str) -> onnx.ModelProto:
    """A graph that needs nothing but the batch: the weights, if they are inputs, get initializers."""
    example = load_example(name)
    return with_initializers(example.model(), first_state(example))


@pytest.mark.parametrize("target", TARGETS)
@each_sequence
def test_each_sequence(name: str, sequence: Sequence, target: str) -> None:
    """In place, Adam's step counter alone is fed back: it is int32, and the operator takes float32."""
    example, in_place = load_example(name), target == "ort-training"
    model = prepared(name) if in_place else example.model()
    result = gs.scale(model, gs.DynamicLossScale(**sequence.config), target=target)
    fed_back = {state.input: state.output for state in result.report.state if state.output is not None}
    assert not in_place or set(fed_back) == ({"count"} if name == "jax/mlp_adam" else set())
    for level in OPTIMIZATION_LEVELS:
        session = make_session(result.model, level)
        state = dict.fromkeys(fed_back, np.int32(0)) if in_place else first_state(example)
        for expected in sequence:
            outputs, _ = run_session(session, {**batch(example, expected[0]), **state})
            check(outputs, expected, np.float32 if in_place else np.int64)
            state |= {key: outputs[output] for key, output in fed_back.items()}
        assert not in_place or all(count == sequence.steps.count("T") for count in state.values())


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", ["pytorch/mlp_momentum", "jax/mlp_adam", "ort/gradbuilder_regression"])
def test_fifty_steps_of_a_session_that_carries_the_state(name: str, target: str) -> None:
    result = gs.scale(prepared(name), gs.DynamicLossScale(**FIFTY.config), target=target)
    session = gs.Session(result)
    assert (session.loss_scale, session.good_steps) == (16, 0)
    losses = []
    for finite, scale, good_steps in FIFTY:
        outputs = session.step(batch(load_example(name), finite))
        assert outputs["all_finite"] == finite
        assert (session.loss_scale, session.good_steps) == (scale, good_steps)
        if finite:
            losses.append(float(outputs[result.report.loss]))
    assert np.isfinite(losses).all()
    if name != "ort/gradbuilder_regression":
        assert losses[-1] < 0.9 * losses[0]
        assert all(np.isfinite(value).all() for value in session.state_dict().values())


@pytest.mark.parametrize("target", TARGETS)
def test_an_overflow_in_truth_finds_the_largest_scale_that_fits(target: str) -> None:
    """No Inf in the batch: the scale itself is too large, and falls until the scaled gradients fit into float32."""
    example = load_example("ort/gradbuilder_regression")
    expected, _ = run_session(make_session(example.path), example.feeds)
    largest = max(float(np.abs(value).max()) for name, value in expected.items() if "grad" in name)
    policy = gs.DynamicLossScale(initial_loss_scale=FLOAT32_MAX, increment_period=1000)
    session = gs.Session(gs.scale(example.model(), policy, target=target))
    skipped = 0
    while not session.step(example.feeds)["all_finite"]:
        skipped += 1
        assert session.loss_scale == np.float32(FLOAT32_MAX / 2**skipped)
    assert 2 <= skipped <= 20
    assert session.loss_scale * largest <= FLOAT32_MAX
    assert session.good_steps == 1
    for _ in range(5):
        assert session.step(example.feeds)["all_finite"]
