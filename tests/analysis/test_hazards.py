"""State written in place, and its readers: every reader gets the value from before the step.

ONNX Runtime does not order an in-place write after the other readers of the old value; the graph has to.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.inliner
import onnx.parser
import onnx_ir as ir
import pytest

import graphscale as gs
from graphscale.analysis.hazards import find_writable_states
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
from tests.session.dangerous import CASES
from tests.session.dangerous import batches as linear_batches
from tests.session.plain import PlainLoop

POLICY = {"initial_loss_scale": 8.0, "increment_period": 2, "multiplier": 2.0}
STEPS = "TTFTTTFTTFFTTTTTTTTT"
BATCH = ("x", "tokens", "target", "labels")
STEPS_WITH_OPTIMIZER = [
    "jax/mlp_adam",
    "jax/mlp_adamw_clip",
    "jax/mlp_sgd",
    "pytorch/attention_adamw_clip",
    "pytorch/attention_sgd",
    "pytorch/clip_by_value",
    "pytorch/mlp_momentum",
]
# Operators whose result is the buffer of their first input, under another shape.
VIEWS = {"Flatten", "Identity", "Reshape", "Squeeze", "Unsqueeze"}

each_level = pytest.mark.parametrize("level", OPTIMIZATION_LEVELS, ids=lambda level: level.name)
each_loss_scale = pytest.mark.parametrize("loss_scale", ["dynamic", 1024])


def stateful(name: str) -> onnx.ModelProto:
    """A training step with its optimizer inside, all its state in initializers."""
    example = load_example(name)
    return with_initializers(example.model(), {k: value for k, value in example.feeds.items() if k not in BATCH})


def scaled(name: str, loss_scale: str | float, target: str, **options: Any) -> gs.ScaledModel:
    policy = gs.DynamicLossScale(**POLICY) if loss_scale == "dynamic" else loss_scale
    return gs.scale(stateful(name), policy, target=target, **options)


def batches(name: str, loss_scale: str | float) -> Iterator[tuple[bool, Arrays]]:
    """A batch for each step; for a dynamic scale with an Inf in it where the step is to be skipped."""
    example, random = load_example(name), np.random.default_rng(7)
    for letter in STEPS:
        feeds = {key: value for key, value in example.feeds.items() if key in BATCH}
        finite = letter == "T" or loss_scale != "dynamic" or "x" not in feeds
        if "x" in feeds:
            feeds["x"] = feeds["x"] + random.standard_normal(feeds["x"].shape).astype(np.float32)
            feeds["x"][2, 2] = feeds["x"][2, 2] if finite else np.inf
        yield finite, feeds


@functools.cache
def fed_back(name: str, loss_scale: str | float, level: Level) -> list[float]:
    """The loss of each step on target `onnx`."""
    result = scaled(name, loss_scale, "onnx")
    state = {key: value for key, value in load_example(name).feeds.items() if key not in BATCH}
    plain = PlainLoop(result, state, level)
    return [plain.step(feeds)[result.report.loss] for _, feeds in batches(name, loss_scale)]


def assert_same(actual: np.ndarray, expected: np.ndarray, name: str, level: Level) -> None:
    """Equal bits, but for the optimization levels at which ONNX Runtime fuses two graphs in two ways."""
    if level is Level.ORT_DISABLE_ALL:
        assert_same_bits(actual, expected, name)
    else:
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.cover(4)
@pytest.mark.full
@pytest.mark.training
@each_level
@each_loss_scale
@pytest.mark.parametrize("name", STEPS_WITH_OPTIMIZER)
def test_weights_in_place_take_the_same_way_as_weights_fed_back(
    name: str, loss_scale: str | float, level: Level
) -> None:
    """The loss of every step depends on all weights and moments that the steps before it have written."""
    result = scaled(name, loss_scale, "ort-training")
    explicit = {item.input: item.output for item in result.report.state if item.output}
    assert set(explicit) <= {"count"}, "only whole numbers cannot be written in place"
    session, state, losses = make_session(result.model, level), {}, []
    for (finite, feeds), expected in zip(batches(name, loss_scale), fed_back(name, loss_scale, level), strict=True):
        outputs, _ = run_session(session, {**feeds, **state})
        state = {key: outputs[output] for key, output in explicit.items()}
        assert_same(outputs[result.report.loss], expected, "loss", level)
        losses += [float(outputs[result.report.loss])] if finite else []
    assert min(losses) < 0.95 * losses[0]


@pytest.mark.cover(4)
@pytest.mark.sample(3)
@pytest.mark.training
@each_level
@each_loss_scale
@pytest.mark.parametrize("case", CASES)
def test_every_output_reads_the_state_from_before_the_step(case: str, loss_scale: str | float, level: Level) -> None:
    """As a session of ONNX Runtime runs the file, which a gs.Session changes further."""
    result, state = CASES[case].scaled(loss_scale, "ort-training"), dict[str, np.ndarray]()
    session = make_session(result.model, level)
    plain = PlainLoop(CASES[case].scaled(loss_scale, "onnx"), {}, level)
    for feeds in linear_batches(6, bad=[2]):
        expected, (outputs, _) = plain.step(feeds), run_session(session, {**feeds, **state})
        state = {each.input: outputs[each.output] for each in result.report.state if each.output is not None}
        for name, value in expected.items():
            assert_same(outputs[name], value, name, level)


@pytest.mark.training
@each_level
def test_the_scaled_loss_shows_the_scale_of_its_own_step(level: Level) -> None:
    """The output `scaled_loss` reads the loss scale, and the next scale does not depend on it."""
    name, policy = "pytorch/mlp_momentum", gs.DynamicLossScale(**POLICY)
    result = scaled(name, "dynamic", "ort-training", expose_scaled_loss=True)
    session = make_session(result.model, level)
    for finite, feeds in batches(name, "dynamic"):
        outputs, _ = run_session(session, feeds)
        if finite:
            assert_same_bits(outputs["scaled_loss"], outputs["loss"] * policy(), "scaled_loss")
        policy.update([np.array([1.0 if finite else np.nan])])
        assert outputs["current_loss_scale.next"] == policy()


# --- in the graph that ONNX Runtime makes of it -----------------------------------------------------------------------


def unordered(model: onnx.ModelProto) -> Iterator[tuple[str, str]]:
    """Each `(state, node)` where the node reads the state, or a view of it, and may run after it is overwritten."""
    nodes = list(model.graph.node)
    producer = {value: i for i, node in enumerate(nodes) for value in node.output if value}

    def ancestors(values: list[str]) -> set[int]:
        found: set[int] = set()
        pending = list(values)
        while pending:
            i = producer.get(pending.pop())
            if i is not None and i not in found:
                found.add(i)
                pending.extend(nodes[i].input)
        return found

    for write in (node for node in nodes if node.op_type == "InPlaceAccumulatorV2"):
        before, buffers = ancestors([write.input[1]]), {write.input[0]}
        for i, node in enumerate(nodes):  # in topological order
            if node.op_type in VIEWS and node.input[0] in buffers:
                buffers.update(node.output)
            if buffers & set(node.input) and node is not write and i not in before:
                yield write.input[0], f"{node.op_type} {node.name}"


@pytest.mark.sample(2)
@pytest.mark.training
@each_loss_scale
@pytest.mark.parametrize("name", STEPS_WITH_OPTIMIZER)
def test_readers_stay_ordered_after_onnx_runtime_optimized(name: str, loss_scale: str | float, tmp_path: Path) -> None:
    """It removes pairs of Transpose, for one: then the backward pass reads the weight itself."""
    model = scaled(name, loss_scale, "ort-training").model
    for level in OPTIMIZATION_LEVELS:
        make_session(model, level, optimized=tmp_path / "optimized.onnx")
        assert list(unordered(onnx.load(tmp_path / "optimized.onnx"))) == [], level.name


# --- only where needed ------------------------------------------------------------------------------------------------


def ordered_states(result: gs.ScaledModel) -> set[str]:
    """The states whose writing was made to wait for readers."""
    marks = {("graphscale.pass", "order-writes")}
    nodes = [n for n in result.model.graph.node if marks & {(entry.key, entry.value) for entry in n.metadata_props}]
    assert ("order-writes" in result.report.inserted) == bool(nodes)
    return {node.input[1] for node in nodes if node.op_type == "Where"}


@pytest.mark.parametrize(
    ("loss_scale", "options", "states"),
    [
        # Each write waits for all gradients, and these for whoever reads a weight.
        ("dynamic", {}, set()),
        ("dynamic", {"expose_scaled_loss": True}, {"current_loss_scale"}),
        # Nothing leads from the gradient of fc1, for which fc2.weight is read, to the writing of that.
        (1024, {}, {"fc2.weight"}),
    ],
    ids=["every reader leads to the check", "scaled loss", "no check"],
)
def test_states_that_are_ordered(loss_scale: str | float, options: dict[str, bool], states: set[str]) -> None:
    assert ordered_states(scaled("pytorch/mlp_momentum", loss_scale, "ort-training", **options)) == states


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", [name for name in CASES if name.startswith(("metric", "seen"))])
def test_only_the_state_that_is_read_elsewhere_is_ordered(name: str) -> None:
    assert ordered_states(CASES[name].scaled("dynamic", "ort-training")) == ({"w"} if not CASES[name].shares else set())


def with_choice(model: onnx.ModelProto, *states: str) -> onnx.ModelProto:
    """A step with one of two states as a further output, `choice`, which may be a view of either."""
    branches = {}
    for branch, state in zip(("then_branch", "else_branch"), states, strict=True):
        result = onnx.helper.make_tensor_value_info(f"{branch}.result", onnx.TensorProto.FLOAT, (32, 16))
        node = onnx.helper.make_node("Identity", [state], [result.name])
        branches[branch] = onnx.helper.make_graph([node], branch, [], [result])
    flag = onnx.helper.make_tensor_value_info("first", onnx.TensorProto.BOOL, ())
    model.graph.input.append(flag)
    model.graph.node.append(onnx.helper.make_node("If", ["first"], ["chosen"], "choose", **branches))
    model.graph.node.append(onnx.helper.make_node("Concat", ["chosen", "chosen"], ["choice"], "show", axis=0))
    model.graph.output.append(onnx.helper.make_tensor_value_info("choice", onnx.TensorProto.FLOAT, (64, 16)))
    return model


def test_a_reader_of_two_states_is_looked_at_once() -> None:
    """To look at what may be a view of two states is to read both: neither is written before."""
    states = ("fc1.weight", "fc1.weight.momentum")
    result = gs.scale(with_choice(stateful("pytorch/mlp_momentum"), *states), target="ort-training")
    assert ordered_states(result) == set(states)
    looked_at = [node.input[0] for node in result.model.graph.node if node.output[0].startswith("order.flat")]
    assert len(looked_at) == len(set(looked_at)) and "chosen" in looked_at


@pytest.mark.training
@each_level
def test_a_reader_of_two_states_reads_them_from_before_the_step(level: Level) -> None:
    states = ("fc1.weight", "fc1.weight.momentum")
    model = with_choice(stateful("pytorch/mlp_momentum"), *states)
    first = {item.name: onnx.numpy_helper.to_array(item) for item in model.graph.initializer}
    feeds = {key: value for key, value in load_example("pytorch/mlp_momentum").feeds.items() if key in BATCH}
    for flag, state in zip((True, False), states, strict=True):
        session = make_session(gs.scale(model, target="ort-training").model, level)
        outputs, _ = run_session(session, {**feeds, "first": np.array(flag)})
        assert_same_bits(outputs["choice"], np.concatenate([first[state]] * 2), state)


@pytest.mark.parametrize("target", ["onnx", "ort-cuda"])
def test_nothing_is_ordered_where_nothing_is_written_in_place(target: str) -> None:
    assert ordered_states(CASES["metric reshaped"].scaled("dynamic", target)) == set()


@pytest.mark.parametrize(
    ("state", "new", "is_written"), [("4", "4", True), ("n", "n", False), ("4", "1,4", False), ("4", "n", False)]
)
def test_a_select_writes_over_a_state_of_its_shape(state: str, new: str, is_written: bool) -> None:
    model = onnx.parser.parse_model(f"""
        <ir_version: 10, opset_import: ["" : 20]>
        select (bool flag, float[{state}] w, float[{new}] u) => (float[{new}] w_next) {{ w_next = Where(flag, u, w) }}
    """)
    graph = ir.from_proto(model).graph
    w, w_next = graph.inputs[1], graph.outputs[0]
    found = find_writable_states(graph, {w: w_next}, None, lambda node: True)
    assert found == ({w} if is_written else set())


def test_int32_state_is_not_written_in_place() -> None:
    result = scaled("jax/mlp_adam", "dynamic", "ort-training")
    assert {item.input for item in result.report.state if item.output is not None} == {"count"}
    written = {node.input[0] for node in result.model.graph.node if node.op_type == "InPlaceAccumulatorV2"}
    assert written == {item.input for item in result.report.state} - {"count"}
    assert {"current_loss_scale", "good_steps", "fc1.weight", "mu.fc1.weight"} <= written


POLICIES = {name: getattr(gs.presets, name)() for name in gs.presets.NAMES} | {
    how: gs.DynamicLossScale(1024, 3, on_stuck=how, max_consecutive_skips=3)
    for how in ("flag", "stop", "reset", "accept")
}


@pytest.mark.parametrize("name", POLICIES)
def test_readers_are_ordered_where_the_update_rule_is_inlined(name: str) -> None:
    """ONNX Runtime inlines the rule's function: what reads the state in its body is a reader like all others."""
    model = gs.scale(load_example("pytorch/mse_tanh").model(), POLICIES[name], target="ort-training").model
    inlined = onnx.inliner.inline_local_functions(model)
    assert not inlined.functions
    assert list(unordered(inlined)) == []


@pytest.mark.training
@each_level
def test_a_step_that_is_not_stuck_is_not_accepted(level: Level) -> None:
    """The rule reads the scale of before the step, not the one that overwrites it."""
    example = load_example("ort/digits_mlp")
    policy = gs.DynamicLossScale(on_stuck="accept", max_consecutive_skips=3)
    session = make_session(gs.scale(example.model(), policy, target="ort-training").model, level)
    # Halved, this scale is at the floor.
    counts = {"current_loss_scale": np.float32(1.25), "good_steps": np.float32(0), "bad_steps": np.float32(0)}
    batch = {"lazy_reset_grad": np.array([False]), "input": np.array(example.feeds["input"])}
    batch["input"][0] = np.nan
    feeds = {**example.feeds, **example.after, **counts, **batch}
    outputs, after = run_session(session, feeds)
    assert not outputs["stuck"]
    buffer = "fc1.weight_grad.accumulation.buffer"
    assert (after[buffer] == feeds[buffer]).all()
