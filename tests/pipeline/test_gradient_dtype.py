"""Gradients that leave the graph in float16, and `gradient_dtype="float32"`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import graphscale as gs
from graphscale.errors import GradientError
from tests.build import feeds_for, linear_step, parse
from tests.cases.steps import read, run_faithfully, text_of
from tests.cli.command import graphscale, refuse
from tests.conftest import Arrays, assert_same_bits

WARNING = 'leave the graph in float16, where what is below 6e-8 is 0 without the loss scale: gradient_dtype="float32"'
# A gradient that also reaches a metric, and one that the graph clips in float16.
READ_BY_MORE = (
    text_of("float16_gradient_outputs")
    .replace("float16[4,3] gw)", "float16[4,3] gw, float16 norm)")
    .replace(
        "gw = MatMul (xt, dp)",
        "gw = MatMul (xt, dp) squared = Mul (gw, gw) norm = ReduceSum <keepdims: int = 0> (squared)",
    )
)
CLIPPED = (
    text_of("float16_gradient_outputs")
    .replace("gw = MatMul (xt, dp)", "g = MatMul (xt, dp) gw = Clip (g, low, high)")
    .replace("<float16 c =", "<float16 low = {48128}, float16 high = {15360}, float16 c =")
)


def types(model: Any) -> dict[str, int]:
    return {value.name: value.type.tensor_type.elem_type for value in model.graph.output}


def small_feeds(model: onnx.ModelProto) -> Arrays:
    """Feeds whose gradients are about 9e-9, far below the smallest number of float16."""
    x, t = np.full((8, 4), 2.0**-12, np.float16), np.full((8, 3), 5.5e-5, np.float16)
    return feeds_for(model, x=x, t=t, w=np.zeros((4, 3), np.float16))


def test_a_small_gradient_survives() -> None:
    model = read("float16_gradient_outputs")
    feeds = small_feeds(model)
    narrow, wide = (gs.scale(model, gradient_dtype=dtype).model for dtype in (None, "float32"))
    assert types(narrow)["gw"] == onnx.TensorProto.FLOAT16 and types(wide)["gw"] == onnx.TensorProto.FLOAT
    assert not run_faithfully(narrow, feeds)["gw"].any()
    found = run_faithfully(wide, feeds)
    exact = feeds["x"].T.astype(np.float64) @ (-feeds["t"].astype(np.float64) / 12)
    assert 8e-9 < np.abs(exact).max() < 1e-8
    np.testing.assert_allclose(found["gw"], exact, rtol=2e-3)
    assert found["gw"].dtype == np.float32 and found["all_finite"]
    assert_same_bits(found["loss"], run_faithfully(model, feeds)["loss"], "loss")


def test_the_report_says_so() -> None:
    model = read("float16_gradient_outputs")
    report = gs.scale(model).report
    assert [(g.value, g.dtype) for g in report.gradients] == [("gw", "FLOAT16")]
    assert len(report.warnings) == 1 and f"the gradients gw {WARNING}" in report.warnings[0]
    report = gs.scale(model, gradient_dtype="float32").report
    assert [(g.value, g.dtype) for g in report.gradients] == [("gw", "FLOAT")]
    assert report.warnings == ("the gradients gw are float32 outputs, unlike in the original",)


@pytest.mark.parametrize("loss_scale", ["dynamic", 1024])
@pytest.mark.parametrize("target", ["onnx", "ort-cpu", pytest.param("ort-training", marks=pytest.mark.training)])
@pytest.mark.parametrize("text", [text_of("float16_gradient_outputs"), READ_BY_MORE], ids=["alone", "with readers"])
def test_verify_lint_and_strip(text: str, target: str, loss_scale: Any) -> None:
    model = parse(text)
    scaled = gs.scale(model, loss_scale, target=target, gradient_dtype="float32").model
    onnx.checker.check_model(scaled, full_check=True)
    before = types(gs.scale(model, loss_scale, target=target).model)
    assert types(scaled) == {**before, "gw": onnx.TensorProto.FLOAT}
    report = gs.verify(model, scaled, runs=1)
    assert report.ok, report
    assert "GS608" not in {finding.code for finding in gs.lint(scaled).findings}
    assert gs.strip(scaled) == gs.strip(gs.scale(model, 8).model)


def test_verify_finds_another_type() -> None:
    """Only a gradient may leave in float32."""
    model = read("float16_gradient_outputs")
    scaled = gs.scale(model, 1024).model
    for node in scaled.graph.node:
        node.output[:] = ["half" if name == "loss" else name for name in node.output]
    scaled.graph.node.append(onnx.helper.make_node("Cast", ["half"], ["loss"], to=onnx.TensorProto.FLOAT))
    scaled.graph.output[0].type.tensor_type.elem_type = onnx.TensorProto.FLOAT
    assert not gs.verify(model, scaled, runs=0).ok


@pytest.mark.parametrize("dtype", [None, "float32"])
def test_lint(dtype: str | None) -> None:
    found = gs.lint(gs.scale(read("float16_gradient_outputs"), gradient_dtype=dtype).model).findings
    assert [(finding.code, finding.value) for finding in found] == ([("GS608", "gw")] if dtype is None else [])


def test_a_gradient_that_the_graph_computes_in_float16() -> None:
    result = gs.scale(parse(CLIPPED), gradient_dtype="float32")
    assert types(result.model)["gw"] == onnx.TensorProto.FLOAT16
    (warning,) = result.report.warnings
    assert "gradients gw leave the graph in float16" in warning and "the graph computes them in float16" in warning


def test_wide_gradients_are_as_they_were() -> None:
    model = linear_step(outputs="float[4,3] dw", inputs="float[4,3] w")
    plain, wide = (gs.scale(model, gradient_dtype=dtype) for dtype in (None, "float32"))
    assert plain.model == wide.model and plain.report.warnings == wide.report.warnings == ()


@pytest.mark.parametrize("dtype", ["float64", "float16", "FLOAT", 1])
def test_other_types_are_refused(dtype: Any) -> None:
    with pytest.raises(GradientError, match="gradient_dtype is"):
        gs.scale(read("float16_gradient_outputs"), gradient_dtype=dtype)


def test_the_command_line(tmp_path: Path) -> None:
    path, scaled = tmp_path / "step.onnx", tmp_path / "scaled.onnx"
    onnx.save(read("float16_gradient_outputs"), path)
    done = graphscale("scale", path, "-o", scaled)
    assert done.returncode == 0 and f"warning: the gradients gw {WARNING}" in done.stderr.replace("\n", " ")
    done = graphscale("scale", path, "-o", scaled, "--gradient-dtype", "float32")
    assert done.returncode == 0 and types(onnx.load(scaled))["gw"] == onnx.TensorProto.FLOAT
    refuse(tmp_path, "scale", path, "-o", tmp_path / "out.onnx", "--gradient-dtype=float8", words=["gradient_dtype is"])
