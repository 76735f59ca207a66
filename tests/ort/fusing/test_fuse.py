"""A fused step against ONNX Runtime's own training session on the same folder, alone and scaled."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import graphscale as gs
from graphscale.ort.fusing import FusedStep, fuse, join_models
from tests.conftest import Arrays, assert_all_same_bits, assert_same_bits, initial_values, make_session
from tests.ort.artifacts.training_session import FOLDERS, LOADABLE, RATE, batches, edited, start, train

pytestmark = pytest.mark.sample(1)

STEPS = 200
each_folder = pytest.mark.parametrize("name", LOADABLE)
# Of an AdamWOptimizer: the attributes that choose between formulas.
ADAMW = [
    {"adam_mode": mode, "correct_bias": bias, "weight_decay": decay}
    for mode, bias in ((0, 1), (1, 0), (1, 1))
    for decay in (0.0, 0.05)
]


def proto_of(model: Any) -> onnx.ModelProto:
    return ir.serde.serialize_model(model)


def with_next_states(model: onnx.ModelProto) -> tuple[onnx.ModelProto, dict[str, str]]:
    """A copy of a model that also returns what it assigns to its state in place.

    Returns:
        the model, and `{output: state}`; the runtime assigns whether these outputs are fetched or not.
    """
    shown = onnx.ModelProto()
    shown.CopyFrom(model)
    types = {value.name: value.type for value in shown.graph.input}
    writes = [node for node in shown.graph.node if node.op_type == "InPlaceAccumulatorV2" and node.input[0] in types]
    states = {node.input[1]: node.input[0] for node in writes}
    present = {value.name for value in shown.graph.output}
    for name, state in states.items():
        if name not in present:
            shown.graph.output.add(name=name).type.CopyFrom(types[state])
    return shown, states


def run_explicit(step: FusedStep, feeds: list[Arrays]) -> tuple[list[float], Arrays]:
    """Train with a plain session that carries the state from output to input."""
    session = make_session(proto_of(step.model))
    outputs = [value.name for value in session.get_outputs()]
    state: Arrays = {}
    losses = []
    for batch in feeds:
        values = dict(zip(outputs, session.run(outputs, {**batch, **RATE, **state}), strict=True))
        state = {source: values[output] for output, source in step.updates.items()}
        losses.append(float(values[step.loss]))
    return losses, state


def run_in_place(model: Any, loss: str, feeds: list[Arrays]) -> tuple[list[float], Arrays]:
    """Train with a plain session from which nothing but the loss is fetched, before the last step."""
    shown, states = with_next_states(proto_of(model))
    session = make_session(shown)
    losses = [float(session.run([loss], {**batch, **RATE})[0]) for batch in feeds[:-1]]
    last, *values = session.run([loss, *states], {**feeds[-1], **RATE})
    return [*losses, float(last)], dict(zip(states.values(), values, strict=True))


def assert_trained_alike(
    losses: list[float], state: Arrays, folder: Path, feeds: list[Arrays], without: Collection[str] = ()
) -> None:
    """The losses, weights and running statistics are those of a training session on the folder."""
    # The session adds up the norm of all gradients in an order that changes from run to run, and with it the last bit.
    tolerance = 2e-5 if folder.name == "digits_adamw_clip" else 1e-6
    reference = start(folder)
    np.testing.assert_allclose(losses, train(reference, feeds), rtol=tolerance, atol=0)
    for name in reference.parameters().keys() - set(without):
        value = reference.parameters()[name]
        np.testing.assert_allclose(state[name], value, rtol=tolerance, atol=tolerance, err_msg=name)


@pytest.mark.full
@pytest.mark.training
@each_folder
def test_scaled_and_in_place(name: str, tmp_path: Path) -> None:
    """200 steps in one session, without one value fetched but the loss, with a scale that grows on the way.

    The weights are those of a training session on the folder, and of one on the scaled folder.
    """
    folder, policy = FOLDERS / name, gs.DynamicLossScale(increment_period=30)
    step = join_models(folder)
    scaled = gs.scale(step.model, policy, target="ort-training")
    feeds = batches(name, STEPS)
    losses, state = run_in_place(scaled.model, step.loss, feeds)
    assert losses[-1] < losses[0] / 2
    assert_trained_alike(losses, state, folder, feeds)
    scaled_folder = tmp_path / name
    gs.scale_artifacts(folder, scaled_folder, policy)
    # The folder judges a step when the next one begins, so that its own count stands one step behind.
    own = {"current_loss_scale", "good_steps", "window_finite"}
    assert_trained_alike(losses, state, scaled_folder, feeds, without=own)
    assert state["step"] == STEPS
    assert state["current_loss_scale"] == 2.0 ** (15 + STEPS // 30)
    outputs = [value.name for value in scaled.model.graph.outputs]
    assert outputs == [step.loss, "current_loss_scale.next", "good_steps.next", "all_finite"]


@pytest.mark.training
@each_folder
def test_unscaled(name: str) -> None:
    folder = FOLDERS / name
    feeds = batches(name, 50)
    losses, state = run_explicit(join_models(folder), feeds)
    assert_trained_alike(losses, state, folder, feeds)
    in_place = fuse(folder, target="ort-training")
    assert in_place.updates == {}
    again, written = run_in_place(in_place.model, in_place.loss, feeds)
    assert again == losses
    assert_all_same_bits(written, state)


@pytest.mark.training
@pytest.mark.parametrize("attributes", ADAMW, ids=lambda a: "-".join(f"{k}={v}" for k, v in a.items()))
def test_every_adamw(attributes: dict[str, Any], tmp_path: Path) -> None:
    """The formulas are the kernel's, operation by operation: the weights have its bits."""

    def change(model: onnx.ModelProto) -> None:
        for attribute in model.graph.node[-1].attribute:
            if attribute.name in attributes:
                attribute.CopyFrom(onnx.helper.make_attribute(attribute.name, attributes[attribute.name]))

    folder = edited("digits_adamw", tmp_path, optimizer_model=change)
    feeds = batches("digits_adamw", 30)
    _, state = run_explicit(join_models(folder), feeds)
    reference = start(folder)
    train(reference, feeds)
    assert_all_same_bits(state, reference.parameters())


@pytest.mark.training
def test_from_a_trained_checkpoint(tmp_path: Path) -> None:
    """Moments and step count come from the checkpoint: the fused step goes on where the session was."""
    folder = edited("digits_adamw", tmp_path)
    feeds = batches("digits_adamw", 20)
    reference = start(folder)
    train(reference, feeds[:7])
    reference.save(folder / "checkpoint")
    step = join_models(folder)
    assert initial_values(proto_of(step.model))["step"] == 7
    _, state = run_explicit(step, feeds[7:])
    train(reference, feeds[7:])
    assert_all_same_bits(state, reference.parameters())
    assert state["step"] == 20


@pytest.mark.training
@pytest.mark.parametrize("target", ["onnx", "ort-training"])
@each_folder
def test_skips(name: str, target: str) -> None:
    """A NaN in the batch leaves weights, moments, step counter and running statistics unchanged, bit for bit."""
    step = join_models(FOLDERS / name)
    scaled = proto_of(gs.scale(step.model, target=target).model)
    model, states = with_next_states(scaled)
    if target == "onnx":
        states = dict(step.updates)
    session = make_session(model)
    first, second = batches(name, 2)
    values = [np.array(value) for value in session.run([*states], {**first, **RATE})]
    before = dict(zip(states.values(), values, strict=True))
    feeds = {**second, **RATE}
    if target == "onnx":
        feeds.update(before)
    # Of token ids none is NaN: there the scale itself goes out of range.
    poisoned = "input" if "input" in feeds else "current_loss_scale"
    feeds[poisoned] = np.full_like(feeds.get(poisoned, np.float32(0)), np.nan)
    finite, *after = session.run(["all_finite", *states], feeds)
    assert not finite
    assert set(step.updates.values()) <= set(states.values())
    for state, value in zip(states.values(), after, strict=True):
        if state in step.updates.values():
            assert_same_bits(value, before[state], state)


@each_folder
def test_the_graph(name: str) -> None:
    """Inputs, outputs and what the analysis finds in it: an ordinary training step."""
    step = fuse(FOLDERS / name)
    graph = step.model.graph
    initializers = set(graph.initializers)
    training = onnx.load(FOLDERS / name / "training_model.onnx").graph
    bare = [value.name for value in graph.inputs if value.name not in initializers]
    fed = [value.name for value in training.input if value.name in batches(name, 1)[0]]
    assert bare == [*fed, "learning_rate"]
    outputs = [value.name for value in graph.outputs]
    assert outputs == [step.loss, *step.updates]
    assert step.loss == training.output[0].name
    assert step.updates == {f"{source}.next": source for source in step.updates.values()}
    trainable = [v.name.removesuffix("_grad.accumulation.buffer") for v in training.input if "accumulation" in v.name]
    moments = [] if name == "digits_sgd" else [f"{n}.{m}" for n in trainable for m in ("momentum0", "momentum1")]
    statistics = [v.name for v in training.input if "running" in v.name]
    assert sorted(step.updates.values()) == sorted([*trainable, *moments, *statistics, "step"])
    assert graph.initializers["step"].dtype is ir.DataType.FLOAT
    assert not any(node.op_type.startswith("InPlace") for node in graph)
    report = gs.inspect(step.model)
    assert report.loss == step.loss
    assert report.coverage == 1.0
    assert {state.output: state.input for state in report.state} == step.updates
    assert report.warnings == ()
    assert len(report.gradients) == len(trainable)


def test_ir_version_of_the_optimizer_model() -> None:
    """An optimizer model that the runtime cannot load is fused all the same: its versions do not count."""
    text = onnx.printer.to_text(proto_of(fuse(FOLDERS / "digits_adamw_ir14").model))
    assert text == onnx.printer.to_text(proto_of(fuse(FOLDERS / "digits_adamw").model))


@pytest.mark.training
def test_feeds_are_not_written_to() -> None:
    """The kernel of batch normalization writes running statistics where it reads them; feeds are unchanged."""
    step = fuse(FOLDERS / "conv_adamw")
    session = make_session(proto_of(step.model))
    fed = {value.name: value.const_value.numpy().copy() for value in step.model.graph.inputs if value.is_initializer()}
    kept = {name: value.copy() for name, value in fed.items()}
    (value,) = session.run(["norm1.running_mean.next"], {**batches("conv_adamw", 1)[0], **RATE, **fed})
    assert_all_same_bits(fed, kept)
    assert not np.array_equal(value, kept["norm1.running_mean"])


def test_taken_names(tmp_path: Path) -> None:
    """A user input may have the name of an input that the fused step adds."""

    def rename(model: onnx.ModelProto) -> None:
        for names in (node.input for node in model.graph.node):
            names[:] = ["learning_rate" if name == "labels" else name for name in names]
        next(value for value in model.graph.input if value.name == "labels").name = "learning_rate"

    folder = edited("digits_sgd", tmp_path, training_model=rename)
    step = fuse(folder)
    assert step.renamed == {"learning_rate": "learning_rate_1"}
    assert [v.name for v in step.model.graph.inputs if not v.is_initializer()][:3] == [
        "input",
        "learning_rate",
        "learning_rate_1",
    ]


@pytest.mark.parametrize("name", LOADABLE)
def test_a_step_that_writes_in_place_can_be_scaled_afterwards(name: str) -> None:
    """Its writes are ordered already, by nodes that are like all others then."""
    step = gs.fuse(FOLDERS / name, target="ort-training")
    report = gs.scale(step.model, target="ort-training").report
    assert report.proved and report.coverage == 1
