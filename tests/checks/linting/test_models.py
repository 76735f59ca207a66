"""No findings in the graphs of models/, nor in their scaled forms, with and without metadata."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import graphscale as gs
from graphscale.passes import Autocast
from graphscale.policy import presets
from tests.analysis.recurrent import recurrent_step
from tests.build import parse, step
from tests.conftest import MODEL_NAMES, MODELS
from tests.ort.artifacts.training_session import FOLDERS
from tests.replicas.steps import STEPS
from tests.replicas.steps import scaled as split_step

pytestmark = pytest.mark.static

EMULATED = {"float16": Autocast("float16", emulate=True), "bfloat16": Autocast("bfloat16", emulate=True)}
VARIANTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "onnx": ("dynamic", {}),
    "in place": ("dynamic", {"target": "ort-training", "telemetry": True}),
    "cuda kernel": ("dynamic", {"target": "ort-training-cuda", "autocast": "float16"}),
    "fixed": (1024, {"target": "ort-cuda"}),
}
# Other policies and options, on graphs of each exporter: gradients alone, and steps with state of each kind.
MORE: dict[str, tuple[Any, dict[str, Any]]] = {
    "torch": (presets.torch(), {}),
    "megatron in place": (presets.megatron(), {"target": "ort-training"}),
    "deepspeed": (presets.deepspeed(), {}),
    "flax": (presets.flax(), {}),
    "reset": (gs.DynamicLossScale(1024, 3, on_stuck="reset"), {}),
    "stop": (gs.DynamicLossScale(1024, 3, on_stuck="stop"), {}),
    "accept": (gs.DynamicLossScale(1024, 3, on_stuck="accept", max_consecutive_skips=3), {}),
    "accept in place": (gs.DynamicLossScale(1024, 3, on_stuck="accept"), {"target": "ort-training"}),
    "fixed in place": (1024, {"target": "ort-training"}),
    "fixed, checked": (1024, {"skip_nonfinite": True}),
    "scaled loss": ("dynamic", {"expose_scaled_loss": True}),
    "telemetry": ("dynamic", {"telemetry": True}),
    "telemetry of ranges": ("dynamic", {"telemetry": "ranges"}),
    "telemetry of all in place": ("dynamic", {"telemetry": "ranges,activations", "target": "ort-training"}),
    "telemetry on cuda": ("dynamic", {"target": "ort-cuda", "telemetry": True}),
    "emulated float16": ("dynamic", {"autocast": EMULATED["float16"], "telemetry": True}),
    "emulated bfloat16": ("dynamic", {"autocast": EMULATED["bfloat16"]}),
    "bfloat16": ("dynamic", {"target": "ort-training-cuda", "autocast": "bfloat16"}),
}
SOME = ("pytorch/attention_adamw_clip", "pytorch/clip_by_value", "jax/mlp_adam", "ort/conv", "ort/gradbuilder_mlp")


def serious(report: gs.LintReport) -> list[gs.Finding]:
    """Return the findings, but for the note that bfloat16 needs no loss scale."""
    return [finding for finding in report.findings if finding.code != "GS606"]


def scaled(name: str, policy: Any, options: dict[str, Any]) -> ir.Model:
    """A graph of models/, scaled."""
    try:
        # A gradient in float16 that leaves in it is a finding of its own.
        model = gs.scale(MODELS / f"{name}.onnx", policy, gradient_dtype="float32", **options).model
    except gs.GraphscaleError as error:
        if "opset" not in str(error):
            raise
        pytest.skip(str(error))
    assert isinstance(model, ir.Model)
    return model


def forget(model: ir.Model) -> ir.Model:
    """Remove what says that graphscale scaled a model."""
    for key in [key for key in model.metadata_props if key.startswith("graphscale.")]:
        del model.metadata_props[key]
    for node in model.graph:
        node.metadata_props.pop("graphscale.pass", None)
    return model


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", MODEL_NAMES)
def test_exported_graphs(name: str) -> None:
    report = gs.lint(MODELS / f"{name}.onnx")
    expected = ["GS106"] if name == "pytorch/mlp_float16" else []
    assert [finding.code for finding in report.findings] == expected
    assert (report.loss_scale, report.gradients) == (None, 0)


@pytest.mark.cover(2)
@pytest.mark.full
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", MODEL_NAMES)
def test_scaled_graphs(name: str, variant: str) -> None:
    policy, options = VARIANTS[variant]
    model = scaled(name, policy, options)
    report = gs.lint(model)
    assert serious(report) == []
    assert report.loss_scale == "current_loss_scale" and report.gradients > 0
    assert (report.check is None) == (policy == 1024)
    by_hand = gs.lint(forget(model))
    assert serious(by_hand) == []
    assert (by_hand.loss_scale, by_hand.gradients) == (report.loss_scale, report.gradients)
    assert (by_hand.check is None) == (report.check is None)


@pytest.mark.cover(2)
@pytest.mark.sample(2)
@pytest.mark.parametrize("variant", MORE)
@pytest.mark.parametrize("name", SOME)
def test_policies_and_options(name: str, variant: str) -> None:
    policy, options = MORE[variant]
    model = scaled(name, policy, options)
    report = gs.lint(model)
    assert serious(report) == []
    assert report.check is not None or (policy == 1024 and "skip_nonfinite" not in options)
    assert serious(gs.lint(forget(model))) == []
    brain = "bfloat16" in variant
    assert brain == any(finding.code == "GS606" for finding in report.findings) and (not brain or report.clean)


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", MODEL_NAMES)
def test_all_tensors_in_another_file(name: str, tmp_path: Path) -> None:
    proto = ir.to_proto(scaled(name, "dynamic", {"expose_scaled_loss": True}))
    path = tmp_path / "scaled.onnx"
    onnx.save(proto, path, save_as_external_data=True, location="tensors.bin", size_threshold=0)
    assert serious(gs.lint(path)) == []


@pytest.mark.parametrize("target", ["onnx", "ort-training", "ort-training-cuda"])
def test_a_loss_and_a_gradient_of_one_loop(target: str) -> None:
    """The order of a write and the reading of the scaled loss is no dependence."""
    model = parse("""
        <ir_version: 10, opset_import: ["" : 20]>
        step (float[3,5,4] x, float[3,5,3] t, float[4,3] w) => (float loss, float[4,3] w_next)
            <float[4,3] w = {1,1,1,1,1,1,1,1,1,1,1,1}, int64 rounds = {3}, bool yes = {1}, float no_loss = {0},
             float[4,3] no_dw = {0,0,0,0,0,0,0,0,0,0,0,0}, float share = {0.1}, float rate = {0.1}> {
            dw, loss = Loop (rounds, yes, no_dw, no_loss) <body = batch
                (int64 i, bool go, float[4,3] dw_in, float sum_in) => (bool go_on, float[4,3] dw_out, float sum_out) {
                go_on = Identity (go)
                xi = Gather (x, i)
                ti = Gather (t, i)
                y = MatMul (xi, w)
                d = Sub (y, ti)
                square = Mul (d, d)
                mean = ReduceMean <keepdims = 0> (square)
                sum_out = Add (sum_in, mean)
                dy = Mul (d, share)
                xt = Transpose <perm = [1, 0]> (xi)
                dwi = MatMul (xt, dy)
                dw_out = Add (dw_in, dwi)
            }>
            change = Mul (dw, rate)
            w_next = Sub (w, change)
        }""")
    scaled = gs.scale(model, target=target, expose_scaled_loss=True)
    assert gs.lint(scaled.model).findings == ()


def test_gradients_without_a_contraction_are_no_inference_graph() -> None:
    model = parse("""
        <ir_version: 10, opset_import: ["" : 20]>
        step (float[3] x, float[3] w) => (float loss, float[3] gradient) <float share = {0.6666667}> {
            e = Exp (w)
            d = Sub (e, x)
            square = Mul (d, d)
            loss = ReduceMean <keepdims = 0> (square)
            de = Mul (d, share)
            gradient = Mul (de, e)
        }""")
    assert gs.inspect(model).gradients and gs.lint(model).findings == ()


@pytest.mark.sample(2)
@pytest.mark.parametrize("options", [{}, {"skip_nonfinite": True}, {"autocast": "float16"}], ids=str)
@pytest.mark.parametrize("name", ["conv_adamw", "digits_sgd", "digits_adamw_clip", "transformer_adamw"])
def test_artifact_folders(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    policy: Any = 1024 if "skip_nonfinite" in options else gs.DynamicLossScale(1024, 3)
    gs.scale_artifacts(FOLDERS / name, tmp_path / "scaled", policy, **options)
    for folder in (FOLDERS / name, tmp_path / "scaled"):
        for part in ("training_model", "optimizer_model", "eval_model"):
            if folder == FOLDERS / name and part == "eval_model":
                with pytest.raises(gs.errors.LintError, match="is an inference graph"):
                    gs.lint(folder / f"{part}.onnx")
                continue
            report = gs.lint(folder / f"{part}.onnx")
            assert report.findings == (), part
            if folder != FOLDERS / name and part != "eval_model":
                assert report.check is not None or (part == "training_model" and policy == 1024)


@pytest.mark.full
@pytest.mark.parametrize("name", ["conv_adamw", "digits_adamw_clip"])
def test_fused_steps(name: str) -> None:
    assert gs.lint(gs.fuse(FOLDERS / name, target="ort-training").model).findings == ()
    step = gs.fuse(FOLDERS / name)
    assert gs.lint(step.model).findings == ()
    for target in ("onnx", "ort-training"):
        model = gs.scale(step.model, updates=step.updates, target=target).model
        assert gs.lint(model).findings == ()


def test_the_model_is_not_changed() -> None:
    for model in (onnx.load(MODELS / "pytorch" / "mlp_momentum.onnx"), scaled("pytorch/mlp_momentum", "dynamic", {})):
        proto = model if isinstance(model, onnx.ModelProto) else ir.to_proto(model)
        before = proto.SerializeToString(deterministic=True)
        gs.lint(model)
        after = model if isinstance(model, onnx.ModelProto) else ir.to_proto(model)
        assert after.SerializeToString(deterministic=True) == before


def test_a_gradient_that_is_a_constant_is_no_state() -> None:
    """Not even where a metric, which could be a loss, reads it; what is computed from it would be one."""
    metric = "n2 = ReduceL2<keepdims = 0>(db)\n norm = Add(n1, n2)"
    outputs = "float[4,5] dw1, float[5,3] dw2, float[2] db, float norm"

    def codes(line: str) -> set[str]:
        model = step(
            f"n1 = ReduceL2<keepdims = 0>(dw1)\n {line}\n {metric}",
            outputs=outputs,
            constants="float[2] ones = {1.0, 1.0}",
        )
        return {finding.code for finding in gs.lint(model).findings}

    assert codes("same = Identity(ones)\n db = Identity(same)") == set()
    assert codes("db = Sub(ones, n1)") == {"GS501"}


@pytest.mark.parametrize("zeros", ["initializers", "computed"])
@pytest.mark.parametrize("kind", ["Scan", "Loop"])
def test_sums_in_a_body_begin_with_zeros(kind: str, zeros: str) -> None:
    assert gs.lint(gs.scale(recurrent_step(kind, zeros)).model).findings == ()


@pytest.mark.parametrize("kind", ["Scan", "Loop"])
def test_sums_in_a_body_that_begin_with_numbers(kind: str) -> None:
    scaled = gs.scale(recurrent_step(kind)).model
    for tensor in scaled.graph.initializer:
        if tensor.name == "no_du":
            tensor.CopyFrom(onnx.numpy_helper.from_array(np.ones((3, 4), np.float32), "no_du"))
    assert [(finding.code, finding.value) for finding in gs.lint(scaled).findings] == [("GS201", "du_out_1")]


@pytest.mark.cover(6)
@pytest.mark.sample(2)
@pytest.mark.parametrize("options", [{}, {"stages": 2, "bucket_bytes": 64}, {"pack_buckets": False}], ids=str)
@pytest.mark.parametrize("variant", [*VARIANTS, "accept in place", "scaled loss", "telemetry", "float16 in place"])
@pytest.mark.parametrize("name", STEPS)
def test_halves(name: str, variant: str, options: dict[str, Any]) -> None:
    """A note for each half names the checks left out; nothing else is found."""
    in_place = {"target": "ort-training", "expose_scaled_loss": True, "telemetry": True}
    policy, how = {**VARIANTS, **MORE, "float16 in place": ("dynamic", {**in_place, "autocast": "float16"})}[variant]
    parts = gs.split(split_step(name, policy, **how), **options)
    for half in (*parts.gradients, parts.update):
        report = gs.lint(half)
        assert [finding.code for finding in report.findings if finding.code != "GS606"] == ["GS506"]
        assert report.clean and (report.check is not None) == (half is parts.update and policy != 1024)


def exchange(node: ir.Node, one: int, other: int) -> None:
    first, second = node.inputs[one], node.inputs[other]
    node.replace_input_with(one, second)
    node.replace_input_with(other, first)


@pytest.mark.full
@pytest.mark.parametrize("pack_buckets", [True, False])
def test_mistakes_in_halves(pack_buckets: bool) -> None:
    def codes(half: int, name: str, change: Callable[[ir.Node], None]) -> set[str]:
        parts = gs.split(gs.scale(ir.load(MODELS / "pytorch" / "mlp_momentum.onnx")), pack_buckets=pack_buckets)
        model = (*parts.gradients, parts.update)[half]
        assert isinstance(model, ir.Model)
        (node,) = (node for node in model.graph if (node.name or "").endswith(name))
        change(node)
        return {finding.code for finding in gs.lint(model).findings} - {"GS506"}

    def skip(node: ir.Node) -> None:
        node.op_type = "Identity"
        node.resize_inputs(1)

    assert codes(0, "mm_1.unscaled", skip) == {"GS201"}
    assert codes(0, "ones_like.scaled", skip) == {"GS102", "GS203"}
    assert codes(1, "fc1.bias.next.guarded", lambda node: exchange(node, 1, 2)) == {"GS403"}
    assert codes(1, "/probes", lambda node: node.replace_input_with(1, node.inputs[0])) == {"GS301"}
    assert codes(1, "/any_nonfinite", lambda node: setattr(node, "op_type", "IsInf")) == {"GS302", "GS303"}


def test_a_half_with_damaged_metadata() -> None:
    for text in ("{", "[]", '{"half": "update"}', '{"half": "gradients", "stages": "one"}'):
        update = gs.split(gs.scale(ir.load(MODELS / "pytorch" / "mlp_momentum.onnx"))).update
        update.metadata_props["graphscale.split"] = text  # type: ignore[index]
        with pytest.raises(gs.GraphscaleError, match=r"damaged property graphscale\.split"):
            gs.lint(update)


def test_ranges_that_a_weight_depends_on_are_state_like_all_other() -> None:
    model = forget(scaled("pytorch/mlp_momentum", "dynamic", {"telemetry": "ranges"}))
    assert serious(gs.lint(model)) == []
    values = {value.name: value for node in model.graph for value in node.outputs}
    guard = next(node for node in model.graph if node.outputs[0].name == "fc1.weight.next")
    new = guard.inputs[1]
    moved = ir.node("Add", [new, values["zero_fraction"]])
    moved.outputs[0].dtype, moved.outputs[0].shape = new.dtype, new.shape
    model.graph.insert_before(guard, moved)
    guard.replace_input_with(1, moved.outputs[0])
    model.graph.sort()
    assert [(finding.code, finding.value) for finding in serious(gs.lint(model))] == [("GS401", "gradient_ranges")]
