"""Every training graph of models/, scaled for every target, is verified; so are the variants of a scaling."""

from __future__ import annotations

from typing import Any

import onnx
import onnx_ir as ir
import pytest

import graphscale as gs
from tests.conftest import HAS_TRAINING, MODEL_NAMES, NEEDS_TRAINING, load_example

# Runs on stock onnxruntime; the com.microsoft gradient operators of the others do not.
PORTABLE = [name for name in MODEL_NAMES if not name.startswith("ort/")] + ["ort/gradbuilder_regression"]
IN_PLACE = ("ort-training", "ort-training-cuda")
VARIANTS: dict[str, dict[str, Any]] = {
    "telemetry": {"telemetry": True},
    "scaled-loss": {"expose_scaled_loss": True},
    "torch": {"loss_scale": gs.presets.torch()},
    "megatron": {"loss_scale": gs.presets.megatron(), "telemetry": True},
    "deepspeed": {"loss_scale": gs.presets.deepspeed(), "telemetry": "ranges,activations"},
    "accept": {"loss_scale": gs.DynamicLossScale(on_stuck="accept", max_consecutive_skips=3)},
    "stop": {"loss_scale": gs.DynamicLossScale(on_stuck="stop", max_consecutive_skips=3)},
    "reset": {"loss_scale": gs.DynamicLossScale(on_stuck="reset", max_consecutive_skips=3)},
    "fixed": {"loss_scale": 1024},
    "fixed-and-checked": {"loss_scale": 1024, "skip_nonfinite": True},
    "float16": {"autocast": "float16"},
}


def require(name: str, target: str) -> None:
    if not HAS_TRAINING and (name not in PORTABLE or target in IN_PLACE):
        pytest.skip(NEEDS_TRAINING)


@pytest.mark.cover(2)
@pytest.mark.sample(2)
@pytest.mark.parametrize("target", ["onnx", "ort-cuda", *IN_PLACE])
@pytest.mark.parametrize("name", MODEL_NAMES)
def test_every_graph_and_target(name: str, target: str) -> None:
    require(name, target)
    model = load_example(name).model()
    scaled = gs.scale(model, target=target)
    report = gs.verify(model, scaled, runs=1)
    assert report.ok, report.failures
    assert {check.status for check in report.checks} == {"holds"}
    assert report.counterexample is None
    # A step at each scale, and each kind of number in each gradient, at least.
    assert report.runs >= 3 + 3 * len(scaled.report.gradients)
    replaced = [note for note in report.notes if "IsAllFinite" in note]
    assert len(replaced) == (target == "ort-training-cuda")


@pytest.mark.cover(1)
@pytest.mark.full
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("pytorch/mlp_momentum", "onnx"),
        ("pytorch/weight_decay_in_loss", "onnx"),
        pytest.param("ort/digits_mlp", "ort-training", marks=pytest.mark.training),
    ],
)
def test_variants(name: str, target: str, variant: str) -> None:
    model = load_example(name).model()
    report = gs.verify(model, gs.scale(model, target=target, **VARIANTS[variant]), runs=2)
    assert report.ok, report.failures
    checked = "fixed" not in variant or variant == "fixed-and-checked"
    status = {check.name: check.status for check in report.checks}
    names = {"accept": " is skipped until the scale is stuck"} | ({} if checked else {variant: ""})
    name = f"a non-finite gradient{names.get(variant, ' is skipped')}"
    assert status[name] == ("holds" if checked else "skipped")
    assert status["the loss scale follows its rule"] == ("skipped" if "fixed" in variant else "holds")
    assert any("float16" in note for note in report.notes) == (variant == "float16")


@pytest.mark.full
@pytest.mark.parametrize("name", ["pytorch/mlp_momentum", "pytorch/attention_adamw_clip"])
@pytest.mark.parametrize("emulate", [False, True], ids=["real", "emulated"])
@pytest.mark.parametrize("settings", [{}, {"deny": ["Transpose", "Add"]}], ids=["default", "own-settings"])
def test_mixed_precision(name: str, emulate: bool, settings: dict[str, Any]) -> None:
    """Against the same autocast, which the metadata claim with its settings, in one rewrite or two."""
    model = load_example(name).model()
    scaled = gs.autocast(model, "float16", emulate=emulate, loss_scale="dynamic", **settings).model
    report = gs.verify(model, scaled, runs=1)
    assert {check.status for check in report.checks} == {"holds"}, report.failures
    assert any("within" in note for note in report.notes)

    mixed = gs.autocast(model, "float16", emulate=emulate, **settings).model
    scaled = gs.scale(mixed).model
    for original in (model, mixed):
        report = gs.verify(original, scaled, runs=0)
        assert {check.status for check in report.checks} == {"holds"}, report.failures


@pytest.mark.full
@pytest.mark.parametrize("name", MODEL_NAMES)
def test_every_graph_in_float16(name: str) -> None:
    """Gradients that are zero but for rounding, such as those of the keys' biases in attention, are no differences."""
    require(name, "onnx")
    model = load_example(name).model()
    mixed = name == "pytorch/mlp_float16"
    report = gs.verify(model, gs.scale(model, autocast=None if mixed else "float16"), runs=1)
    assert report.ok, report.failures
    assert any("4e-06, which may underflow" in note for note in report.notes)


@pytest.mark.full
@pytest.mark.training
def test_a_gradient_that_keeps_the_scale_is_seen_in_float16() -> None:
    """One that is zero but for rounding, too."""
    model = load_example("ort/transformer").model()
    scaled = gs.scale(model, autocast="float16", target="ort-training").model
    names = {node.name: i for i, node in enumerate(scaled.graph.node)}
    divisions = [name for name in names if name.startswith("graphscale/unscale-gradients/")]
    rounding = [name for name in divisions if "key.bias" in name]
    assert (len(divisions), len(rounding)) == (36, 2)
    for i in (names[name] for name in (divisions[0], *rounding)):
        broken = onnx.ModelProto()
        broken.CopyFrom(scaled)
        node = broken.graph.node[i]
        del node.input[1:]
        node.op_type = "Identity"
        status = {check.name: check.status for check in gs.verify(model, broken, runs=1).checks}
        assert status["values as in the original"] == "fails", node.name


def test_the_samples_can_be_fed() -> None:
    example = load_example("pytorch/kl_div")
    model = example.model()
    report = gs.verify(model, gs.scale(model), feeds=example.path.with_suffix(".npz"), runs=1)
    assert report.ok, report.failures


@pytest.mark.full
@pytest.mark.training
def test_random_numbers_from_seeds_are_compared() -> None:
    model = load_example("ort/transformer").model()
    report = gs.verify(model, gs.scale(model), runs=1)
    assert report.ok
    assert any("from seeds" in note for note in report.notes)


def test_models_of_every_kind_are_taken() -> None:
    example = load_example("pytorch/mse_tanh")
    scaled = gs.scale(example.path)
    assert gs.verify(ir.from_proto(example.model()), scaled.model, runs=1).ok
    assert gs.verify(example.path, scaled, runs=0).runs == 0
