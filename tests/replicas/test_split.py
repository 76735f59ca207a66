"""gs.split: two halves that are the whole step, bit for bit, with the gradients in buckets in between."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import graphscale as gs
from graphscale.errors import AlreadyScaledError, GraphscaleError, ModelFileError, SessionError, SplitError
from graphscale.replicas import SplitStep
from tests.build import EXACT
from tests.conftest import MODELS, Arrays, assert_all_same_bits, load_example, make_session, run_session
from tests.replicas.steps import DIGITS, STEPS, Chain, fed_back, scaled

pytestmark = pytest.mark.sample(3)

each_step = pytest.mark.parametrize("name", STEPS)


def first_feeds(name: str) -> Arrays:
    start = {"current_loss_scale": np.float32(2.0**15), "good_steps": np.int64(0)}
    return {**load_example(name).feeds, **start}


def run_both(name: str, step: gs.ScaledModel, parts: SplitStep, steps: int = 5) -> list[bool]:
    """Run the whole step and its parts, the third time with an overflow; whether each step was applied."""
    assert isinstance(step.model, ir.Model)
    whole, chain = make_session(ir.to_proto(step.model), EXACT), Chain((*parts.gradients, parts.update))
    carried: Arrays = {}
    applied = []
    for number in range(steps):
        feeds = {**first_feeds(name), **carried}
        if number >= 2:
            feeds["current_loss_scale"] = np.float32(np.inf if number == 2 else 1024)
        expected, _ = run_session(whole, feeds)
        assert_all_same_bits(chain.run(feeds), expected)
        applied.append(bool(expected["all_finite"]))
        carried = {source: expected[output] for source, output in fed_back(step).items()}
    return applied


@each_step
@pytest.mark.parametrize(("stages", "size"), [(1, "25MiB"), (1, 1000), (3, 1000)])
def test_the_halves_are_the_whole_step_bit_for_bit(name: str, stages: int, size: str | int) -> None:
    step = scaled(name)
    applied = run_both(name, step, gs.split(step, bucket_bytes=size, stages=stages))
    assert applied == [True, True, False, True, True]


@pytest.mark.full
@each_step
def test_buckets_hold_every_gradient_once_and_no_more_than_they_may(name: str) -> None:
    step = scaled(name)
    report = gs.split(step, bucket_bytes=1000).report
    held: dict[str, int] = {}
    for bucket in report.buckets:
        assert bucket["bytes"] <= 1000
        for gradient, begin, end in bucket["segments"]:
            assert held.get(gradient, 0) == begin
            held[gradient] = end
    assert held == {name: int(np.prod(shape)) for name, shape in report.gradients.items()}
    total = sum(bucket["bytes"] for bucket in report.buckets)
    assert len(report.buckets) == -(-total // 1000)


def test_buckets_are_in_the_order_of_the_backward_pass() -> None:
    # The digits step: 64-128-64-10. The gradients of the last layer are there first.
    shapes = list(gs.split(scaled(DIGITS)).report.gradients.values())
    assert [max(shape) for shape in shapes] == [64, 10, 128, 64, 128, 128]


def test_a_session_on_the_first_half_says_that_it_carries_no_loss_scale() -> None:
    step = scaled("pytorch/mlp_momentum")
    parts = gs.split(step)
    with gs.Session(parts.gradients[0]) as session:
        assert "current_loss_scale" in session.inputs
        for told in ("loss_scale", "good_steps"):
            with pytest.raises(SessionError, match="is fed to this model, and is none of its states"):
                getattr(session, told)


@pytest.mark.full
def test_without_packing_the_gradients_keep_their_names_and_shapes() -> None:
    step = scaled("pytorch/attention_adamw_clip")
    parts = gs.split(step, pack_buckets=False)
    outputs = {value.name: value for value in parts.gradients[0].graph.outputs}
    inputs = {value.name for value in parts.update.graph.inputs}
    for gradient, shape in parts.report.gradients.items():
        assert list(outputs[gradient].shape) == shape and gradient in inputs
    run_both("pytorch/attention_adamw_clip", step, parts)


def test_the_second_half_waits_for_all_replicas() -> None:
    name = "pytorch/mlp_momentum"
    step = scaled(name)
    parts = gs.split(step)
    feeds = first_feeds(name)
    first = Chain(parts.gradients).run(feeds)
    update = make_session(ir.to_proto(parts.update), EXACT)
    kept, _ = run_session(update, {**feeds, **first, "replicas_finite": np.asarray(False)})
    assert not kept["all_finite"] and kept["current_loss_scale.next"] == 2.0**14
    for source, output in fed_back(step).items():
        if source not in ("current_loss_scale", "good_steps"):
            assert_all_same_bits({output: kept[output]}, {output: feeds[source]})


def test_what_depends_on_the_batch_alone_is_in_the_first_half() -> None:
    report = gs.split(scaled(DIGITS)).report
    assert report.outputs == ("loss", "logits")
    assert report.average == ("loss",)


def test_learning_rates_are_read_by_the_second_half_only() -> None:
    parts = gs.split(scaled(DIGITS))
    assert "learning_rate" not in {value.name for value in parts.gradients[0].graph.inputs}
    assert {"images", "labels"}.isdisjoint(value.name for value in parts.update.graph.inputs)


@pytest.mark.training
def test_running_statistics_are_means_over_replicas() -> None:
    fused = gs.scale(gs.fuse(MODELS / "ort" / "artifacts" / "conv_adamw").model)
    average = gs.split(fused).report.average
    assert sum("running" in name for name in average) == 4


@pytest.mark.parametrize(
    "options", [{"telemetry": True}, {"telemetry": "ranges"}, {"autocast": "float16"}, {"loss_scale": 1024.0}]
)
def test_steps_scaled_in_other_ways_can_be_split(options: dict[str, object]) -> None:
    name = "pytorch/mlp_momentum"
    arguments = dict(options)
    step = gs.scale(MODELS / f"{name}.onnx", arguments.pop("loss_scale", "dynamic"), **arguments)
    assert isinstance(step.model, ir.Model)
    feeds = load_example(name).feeds
    start = {value.name: np.asarray(value.const_value.numpy()) for value in step.model.graph.initializers.values()}
    known = {**{k: start[k] for k in start if k in {v.name for v in step.model.graph.inputs}}, **feeds}
    expected, _ = run_session(make_session(ir.to_proto(step.model), EXACT), known)
    parts = gs.split(step)
    assert_all_same_bits(Chain((*parts.gradients, parts.update)).run(known), expected)


@pytest.mark.training
def test_state_written_in_place_is_written_by_the_second_half_alone() -> None:
    parts = gs.split(scaled(DIGITS, target="ort-training"))
    writers = [node for node in parts.update.graph if node.op_type.startswith("InPlaceAccumulator")]
    assert writers
    assert not [node for node in parts.gradients[0].graph if node.op_type.startswith("InPlaceAccumulator")]


def test_a_proto_gives_protos() -> None:
    step = gs.scale(onnx.load(MODELS / "pytorch" / "mlp_momentum.onnx"))
    parts = gs.split(step)
    for model in (*parts.gradients, parts.update):
        assert isinstance(model, onnx.ModelProto)
        onnx.checker.check_model(model)


def test_the_step_given_is_not_changed() -> None:
    step = scaled("pytorch/mlp_momentum")
    assert isinstance(step.model, ir.Model)
    before = ir.to_proto(step.model).SerializeToString()
    gs.split(step, stages=2)
    assert ir.to_proto(step.model).SerializeToString() == before


def test_files_say_what_they_are(tmp_path: Path) -> None:
    parts = gs.split(scaled("pytorch/mlp_momentum"), stages=2)
    parts.save(tmp_path / "g.onnx", tmp_path / "u.onnx")
    told = {}
    for name in ("g.onnx", "g.2.onnx", "u.onnx"):
        properties = {p.key: p.value for p in onnx.load(tmp_path / name).metadata_props}
        told[name] = json.loads(properties["graphscale.split"])
    assert [told[name]["half"] for name in told] == ["gradients", "gradients", "update"]
    assert told["u.onnx"]["buckets"] == list(parts.report.buckets)
    with pytest.raises(AlreadyScaledError):
        gs.scale(tmp_path / "g.onnx")
    with pytest.raises(ModelFileError, match="nothing to strip"):
        gs.strip(tmp_path / "u.onnx")
    with pytest.raises(SplitError, match="one half of a split step"):
        gs.split(tmp_path / "u.onnx")


@pytest.mark.parametrize(
    ("option", "text", "values"),
    [
        ("bucket_bytes", "is no size", ["zero", "", "-5", "1.5", "5 apples", 3, 0, -1, 2.5, True, None]),
        ("stages", "stages", [0, -1, 1.5, "two", True, 5]),
    ],
)
def test_options_that_do_not_fit_are_refused(option: str, text: str, values: list[object]) -> None:
    for value in values:
        with pytest.raises(SplitError, match=text):
            gs.split(scaled("pytorch/mlp_momentum"), **{option: value})


def test_an_unscaled_step_is_refused() -> None:
    with pytest.raises(ModelFileError, match="carries no loss scale; scale it first"):
        gs.split(MODELS / "pytorch" / "mlp_momentum.onnx")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        *((name, "has no updates") for name in ("pytorch/mse_tanh", "jax/mlp")),
        *((name, "graphscale fuse") for name in ("ort/digits_mlp", "ort/conv")),
    ],
)
def test_a_step_that_updates_nothing_is_refused(name: str, text: str) -> None:
    """Gradients that leave for another graph have to be fused with it."""
    with pytest.raises(SplitError, match=text):
        gs.split(scaled(name, target="ort-training" if name.startswith("ort/") else "onnx"))


def test_nothing_is_written_where_one_half_cannot_be(tmp_path: Path) -> None:
    parts = gs.split(scaled("pytorch/mlp_momentum"))
    for first, second in (("g.onnx", "missing/u.onnx"), ("g.onnx", "g.onnx")):
        with pytest.raises(GraphscaleError):
            parts.save(tmp_path / first, tmp_path / second)
    assert list(tmp_path.iterdir()) == []
