"""Every graph of models/, thirty steps with overflows in between: a session has the results of a loop by hand."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx.printer
import onnx_ir as ir
import pytest
from hypothesis import event, note, reject

import graphscale as gs
from graphscale.lowering.thresholds import Thresholds
from tests.analysis.test_hazards import STEPS_WITH_OPTIMIZER
from tests.conftest import (
    HAS_TRAINING,
    MODEL_NAMES,
    MODELS,
    TARGETS,
    Arrays,
    Example,
    Level,
    assert_same_bits,
    load_example,
    with_initializers,
)
from tests.random_cases import random_cases
from tests.random_graphs import random_presentation, tame_step
from tests.session.plain import (
    ALWAYS,
    PlainLoop,
    assert_same_run,
    batches,
    carried_inputs,
    first_state,
    options,
    session_and_plain,
)

pytestmark = pytest.mark.sample(2)

STEPS = 30
# So large that scaled gradients overflow in truth, again and again, for the scale grows after every other good step.
LARGE, HALF_PRECISION = 2.0**126, "pytorch/mlp_float16"
# Its BatchNormalization keeps running statistics in the memory of an input.
IN_PLACE_INPUTS = "ort/conv"
MIXED = "jax/mlp_adam"


@functools.cache
def needs_training(name: str) -> bool:
    """Return whether the graph has operators of the training build."""
    nodes = load_example(name).model().graph.node
    return any(node.domain == "com.microsoft" or node.op_type.endswith("Grad") for node in nodes)


EXAMPLES = [
    pytest.param(name, id=name, marks=[pytest.mark.training] if needs_training(name) else []) for name in MODEL_NAMES
]


def scaled(example: Example, target: str, initial: bool, **more: Any) -> gs.ScaledModel:
    """Scale a graph, its carried inputs with initializers if so wanted."""
    largest = 2.0**18 if example.name == HALF_PRECISION else LARGE
    model, policy = example.model(), gs.DynamicLossScale(largest, increment_period=2)
    if initial:
        carried = carried_inputs(gs.scale(model, policy)) & set(example.feeds)
        model = with_initializers(model, {name: 4 * example.feeds[name] for name in sorted(carried)})
    return gs.scale(model, policy, target=target, **more)


def large_state(result: gs.ScaledModel, example: Example) -> Arrays:
    """The weights of the sample, larger: then gradients are larger than 1, and overflow with the largest scales."""
    return {name: 4 * array for name, array in first_state(result, example.feeds).items()}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", EXAMPLES)
def test_thirty_steps_equal_those_of_a_plain_loop(name: str, target: str) -> None:
    """With the weights as bare inputs, as their exporters leave them."""
    example = load_example(name)
    result = scaled(example, target, initial=False)
    session, plain = session_and_plain(result, large_state(result, example))
    applied = assert_same_run(session, plain, batches(example, carried_inputs(result), STEPS))
    assert True in applied
    assert False in applied
    assert {s.output is None for s in result.report.state if s.input.startswith("current")} == {target != "onnx"}


@pytest.mark.parametrize(
    ("telemetry", "level"),
    [(False, Level.ORT_DISABLE_ALL), (False, Level.ORT_ENABLE_BASIC), (True, Level.ORT_ENABLE_BASIC)],
    ids=["plain", "basic", "telemetry"],
)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", STEPS_WITH_OPTIMIZER)
def test_steps_whose_weights_have_initial_values(name: str, target: str, telemetry: bool, level: Level) -> None:
    """On ort-training these live in the session of ONNX Runtime; whole numbers are fed back beside them."""
    example = load_example(name)
    result = scaled(example, target, initial=True, telemetry=telemetry)
    session, plain = session_and_plain(result, {}, level)
    assert set(session.inputs) == set(example.feeds) - carried_inputs(result)
    applied = assert_same_run(session, plain, batches(example, carried_inputs(result), STEPS))
    assert 0 < sum(applied) < STEPS
    if telemetry:
        counters = session.counters
        assert (counters["steps"], counters["skipped_steps"]) == (STEPS, STEPS - sum(applied))


@pytest.mark.training
@pytest.mark.parametrize("target", ["onnx", "ort-training"])
def test_inputs_that_are_written_in_place_are_carried(target: str) -> None:
    """They have no initializer: the session keeps them, and wants their first values."""
    example = load_example(IN_PLACE_INPUTS)
    result = gs.scale(example.model(), target=target)
    statistics = {name for name in carried_inputs(result) if "running" in name}
    assert len(statistics) == 4
    state = first_state(result, example.feeds)
    given = {name: array.copy() for name, array in state.items()}
    session = gs.Session(result, state=state)
    assert not statistics & set(session.inputs)
    for feeds in batches(example, carried_inputs(result), 2):
        assert session.step(feeds).applied
    for name in statistics:
        assert (session.state_dict()[name] != given[name]).any(), name
        np.testing.assert_array_equal(state[name], given[name], "what the caller gave is not written to")


ARTIFACTS = sorted(path.name for path in (MODELS / "ort" / "artifacts").iterdir())


@pytest.mark.full
@pytest.mark.training
@pytest.mark.parametrize("target", ["onnx", "ort-training"])
@pytest.mark.parametrize("name", ARTIFACTS)
def test_steps_that_are_fused_from_artifact_folders(name: str, target: str) -> None:
    """Optimizer and running statistics inside, everything with an initial value."""
    folder = MODELS / "ort" / "artifacts" / name
    step = gs.fuse(folder)
    policy = gs.DynamicLossScale(LARGE, increment_period=2)
    scaled_step = gs.scale(ir.to_proto(step.model), policy, loss=step.loss, updates=step.updates, target=target)
    session, plain = session_and_plain(scaled_step, {})
    stored = np.load(folder / "sample.npz")
    sample = {key.removeprefix("first/"): stored[key] for key in stored.files if key.startswith("first/")}
    feeds = {**sample, "learning_rate": np.array(0.001, np.float32)}
    assert set(session.inputs) == set(feeds)
    applied = assert_same_run(session, plain, batches(Example(name, feeds, {}, {}), set(), 12))
    assert sum(applied) >= 5


# --- random small graphs, with random optimizers and metrics ----------------------------------------------------------


@random_cases(200, tried=215)
def test_a_session_does_what_a_loop_by_hand_does(choices: random.Random) -> None:
    step = tame_step(choices)
    rendered = step.render(random_presentation(choices, step))
    note(onnx.printer.to_text(rendered.model))
    loss_scale = choices.choice(["dynamic", 1024.0, gs.DynamicLossScale(1024.0, 2, 3.0)])
    target = choices.choice(["onnx", "ort-training"] if HAS_TRAINING else ["onnx"])
    roles = step.answers(rendered)
    reference, result = (gs.scale(rendered.model, loss_scale, target=name, roles=roles) for name in ("onnx", target))
    carried = {state.input for state in reference.report.state}
    feeds = step.sample(rendered)
    state = {name: value for name, value in feeds.items() if name in carried}
    level = choices.choice([Level.ORT_DISABLE_ALL, Level.ORT_ENABLE_ALL])
    try:
        plain = PlainLoop(reference, state, level)
    except Exception as error:  # ORT's exceptions share no public base class
        # ONNX Runtime 1.19.2 gives two nodes that it made one name, and then refuses them.
        if "two nodes with same node name (/GatherSliceToSplitFusion/)" not in str(error):
            raise
        reject()
    lowering = choices.choice([ALWAYS, Thresholds()])
    session = gs.Session(result, session_options=options(level), state=state, lowering=lowering)

    applied = []
    for number, batch in enumerate(spoiled_batches({n: v for n, v in feeds.items() if n not in carried}, choices)):
        expected, actual = plain.step(batch), session.step(batch)
        applied.append(actual.applied)
        found = session.state_dict()
        pairs = {name: (actual[name], value) for name, value in expected.items()}
        # The count of good steps is float32 where it is written in place.
        pairs |= {name: (found[name], value.astype(found[name].dtype)) for name, value in plain.state.items()}
        for name, (ours, theirs) in pairs.items():
            if level is Level.ORT_DISABLE_ALL:
                assert_same_bits(ours, theirs, f"{name}, step {number}")
            else:  # It may fuse two graphs in two ways.
                np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-4, err_msg=f"{name}, step {number}")
    event(f"{len(carried)} states")
    event(f"{sum(applied)} steps applied")


def spoiled_batches(feeds: Arrays, choices: random.Random) -> Iterator[Arrays]:
    """The numbers of the sample in other orders, one of them spoiled in about every third batch."""
    numbers = np.random.default_rng(choices.randrange(10000))
    for _ in range(5):
        batch = {name: numbers.permutation(array.ravel()).reshape(array.shape) for name, array in feeds.items()}
        exposed = [name for name, array in batch.items() if array.dtype.kind == "f" and array.ndim]
        if exposed and choices.random() < 0.3:
            array = batch[choices.choice(exposed)]
            array.flat[choices.randrange(array.size)] = choices.choice((np.inf, -np.inf, np.nan))
        yield batch
