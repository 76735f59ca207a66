"""State that is written in place, and whoever else reads it: every reader sees the value from before the step.

ONNX Runtime does not order an in-place write after the other readers of the old value; the graph has to.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import numpy as np
import onnx
import pytest

import graphscale as gs
from tests.conftest import (
    OPTIMIZATION_LEVELS,
    Arrays,
    Level,
    assert_same_bits,
    load_example,
    make_session,
    run_session,
    with_initializers,
)

FLOAT = onnx.TensorProto.FLOAT
POLICY = {"initial_loss_scale": 8.0, "increment_period": 2, "multiplier": 2.0}
STEPS = "TTFTTTFTTFFTTTTTTTTT"
BATCH = ("x", "target")
# Metrics of mlp_momentum that read a weight or a momentum apart from the gradients: (operator, inputs, shape).
METRICS = {
    "all of fc1.weight": ("Concat", ["fc1.weight", "fc1.weight"], [64, 16]),
    "norm of fc2.weight": ("ReduceL2", ["fc2.weight"], [1, 1]),
    "log of fc1.bias": ("Log", ["fc1.bias"], [32]),  # NaN where it is negative
    "all of a momentum": ("Concat", ["fc2.weight.momentum", "fc2.weight.momentum"], [20, 32]),
}

each_level = pytest.mark.parametrize("level", OPTIMIZATION_LEVELS, ids=lambda level: level.name)


def momentum_step(metrics: tuple[str, ...] = ()) -> onnx.ModelProto:
    """The exported step with momentum inside, all its state kept in initializers, and metrics as further outputs."""
    example = load_example("pytorch/mlp_momentum")
    state = {name: value for name, value in example.feeds.items() if name not in BATCH}
    model = with_initializers(example.model(), state)
    for name in metrics:
        op_type, inputs, shape = METRICS[name]
        attributes = {"axis": 0} if op_type == "Concat" else {}
        model.graph.node.append(onnx.helper.make_node(op_type, inputs, [name], f"metric {name}", **attributes))
        model.graph.output.append(onnx.helper.make_tensor_value_info(name, FLOAT, shape))
    return model


def batches() -> Iterator[tuple[bool, Arrays]]:
    """A batch for each step, with an Inf in it where the step is to be skipped."""
    example, random = load_example("pytorch/mlp_momentum"), np.random.default_rng(7)
    for letter in STEPS:
        x = example.feeds["x"] + random.standard_normal(example.feeds["x"].shape).astype(np.float32)
        if letter == "F":
            x[2, 2] = np.inf
        yield letter == "T", {"x": x, "target": example.feeds["target"]}


def ordering_nodes(model: onnx.ModelProto) -> list[onnx.NodeProto]:
    return [
        node
        for node in model.graph.node
        if any((entry.key, entry.value) == ("graphscale.pass", "order-writes") for entry in node.metadata_props)
    ]


def ordered_states(model: onnx.ModelProto) -> set[str]:
    """The states whose writing waits for readers: the selected value is state, or what is written."""
    return {node.input[1] for node in ordering_nodes(model) if node.op_type == "Where"}


@functools.cache
def carried_by_hand(level: Level, loss_scale: str | float, metrics: tuple[str, ...]) -> list[tuple[Arrays, Arrays]]:
    """For each step on target `onnx`, the state before it and the outputs."""
    result = gs.scale(momentum_step(metrics), policy_of(loss_scale))
    session = make_session(result.model, level)
    state = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in momentum_step().graph.initializer}
    steps = []
    for _, feeds in batches():
        outputs, _ = run_session(session, {**feeds, **state})
        steps.append((state, outputs))
        state = {item.input: outputs[item.output] for item in result.report.state}
    return steps


def policy_of(loss_scale: str | float) -> gs.LossScale | float:
    return gs.DynamicLossScale(**POLICY) if loss_scale == "dynamic" else loss_scale


@pytest.mark.training
@each_level
@pytest.mark.parametrize("loss_scale", ["dynamic", 1024])
def test_weights_in_place_take_the_same_way_as_weights_fed_back(level: Level, loss_scale: str | float) -> None:
    """Seen in the loss of every step, and at the end in the weights, which a metric shows."""
    metrics = ("all of fc1.weight", "all of a momentum")
    result = gs.scale(momentum_step(metrics), policy_of(loss_scale), target="ort-training")
    assert [state.output for state in result.report.state] == [None] * len(result.report.state)
    session = make_session(result.model, level)
    losses = []
    for (finite, feeds), (state, expected) in zip(batches(), carried_by_hand(level, loss_scale, metrics), strict=True):
        if loss_scale != "dynamic" and not finite:
            break
        outputs, _ = run_session(session, feeds)
        losses.append(outputs["loss"])
        for name in ("loss", *metrics):
            assert_same(outputs[name], expected[name], name, level)
        if finite:
            assert_same(outputs["all of fc1.weight"][:32], state["fc1.weight"], "fc1.weight", level)
            assert_same(outputs["all of a momentum"][:10], state["fc2.weight.momentum"], "momentum", level)
    assert len(losses) == (20 if loss_scale == "dynamic" else 2)


def assert_same(actual: np.ndarray, expected: np.ndarray, name: str, level: Level) -> None:
    """Equal bits, but for the optimization levels at which ONNX Runtime fuses two graphs in two ways."""
    if level in (Level.ORT_DISABLE_ALL, Level.ORT_ENABLE_BASIC):
        assert_same_bits(actual, expected, name)
    else:
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.training
@each_level
@pytest.mark.parametrize("metric", METRICS)
def test_a_metric_reads_the_weights_from_before_the_step(metric: str, level: Level) -> None:
    op_type, (state_name, *_), _ = METRICS[metric]
    result = gs.scale(momentum_step((metric,)), policy_of("dynamic"), target="ort-training")
    session = make_session(result.model, level)
    seen = []
    steps = carried_by_hand(level, "dynamic", (metric,))
    for (_, feeds), (state, _) in zip(batches(), steps, strict=True):
        outputs, _ = run_session(session, feeds)
        before = state[state_name]
        with np.errstate(invalid="ignore"):
            wanted = {
                "Concat": lambda array: np.concatenate([array, array]),
                "ReduceL2": lambda array: np.sqrt((array * array).sum(keepdims=True)),
                "Log": np.log,
            }[op_type](before)
        np.testing.assert_allclose(outputs[metric], wanted, rtol=1e-5, atol=1e-6)
        seen.append(before)
    assert not np.array_equal(seen[0], seen[-1])


@pytest.mark.training
@each_level
def test_the_scaled_loss_shows_the_scale_of_its_own_step(level: Level) -> None:
    """The output `scaled_loss` reads the loss scale, and the next scale does not depend on it."""
    policy = gs.DynamicLossScale(**POLICY)
    result = gs.scale(momentum_step(), policy, target="ort-training", expose_scaled_loss=True)
    assert ordered_states(result.model) == {"current_loss_scale"}
    session = make_session(result.model, level)
    for finite, feeds in batches():
        outputs, _ = run_session(session, feeds)
        if finite:
            assert_same_bits(outputs["scaled_loss"], outputs["loss"] * policy(), "scaled_loss")
        policy.update([np.array([1.0 if finite else np.nan])])
        assert outputs["current_loss_scale.next"] == policy()


# --- only where needed ------------------------------------------------------------------------------------------------


def test_nothing_is_ordered_where_every_reader_leads_to_the_check() -> None:
    """With a dynamic scale each write waits for all gradients, and these for whoever reads a weight."""
    result = gs.scale(momentum_step(), target="ort-training")
    assert ordering_nodes(result.model) == []
    assert "order-writes" not in result.report.inserted


@pytest.mark.parametrize("metric", METRICS)
def test_only_the_state_that_is_read_elsewhere_is_ordered(metric: str) -> None:
    result = gs.scale(momentum_step((metric,)), target="ort-training")
    assert ordered_states(result.model) == {METRICS[metric][1][0]}


def test_a_fixed_scale_orders_the_weight_that_the_backward_pass_reads() -> None:
    """Without a check nothing leads from the gradient of fc1, for which fc2.weight is read, to the writing of that."""
    result = gs.scale(momentum_step(), 1024, target="ort-training")
    assert ordered_states(result.model) == {"fc2.weight"}


@pytest.mark.parametrize("target", ["onnx", "ort-cuda"])
def test_nothing_is_ordered_where_nothing_is_written_in_place(target: str) -> None:
    result = gs.scale(momentum_step(tuple(METRICS)), target=target, expose_scaled_loss=True)
    assert ordering_nodes(result.model) == []


def test_int32_state_is_not_written_in_place() -> None:
    example = load_example("jax/mlp_adam")
    state = {name: value for name, value in example.feeds.items() if name not in ("x", "labels")}
    result = gs.scale(with_initializers(example.model(), state), target="ort-training")
    assert {item.input for item in result.report.state if item.output is not None} == {"count"}
    written = {node.input[0] for node in result.model.graph.node if node.op_type == "InPlaceAccumulatorV2"}
    assert written == (set(state) - {"count"}) | {"current_loss_scale", "good_steps"}
