"""lint with the original of a step that somebody else scaled."""

from __future__ import annotations

import pytest

import graphscale as gs
from tests.build import parse
from tests.checks.verification import hand_scaled
from tests.conftest import MODELS, load_example

PAIRS = {
    "flax_dynamic_scale": ("jax_step", "dynamic_scale.scale"),
    "jmp_dynamic_loss_scale": ("jax_step", "loss_scale"),
    "keras_loss_scale": ("keras_step", "loss_scale.dynamic_scale"),
    "pytorch_grad_scaler": ("pytorch_step", "scale"),
    "tensorflow_cond": ("tensorflow_step", "loss_scale"),
    "onnxsim_static_scale": ("onnxsim_step", None),
}


@pytest.mark.parametrize("name", PAIRS)
def test_right_step(name: str) -> None:
    original, scale = PAIRS[name]
    folder = MODELS / "zoo" / "others"
    report = gs.lint(folder / f"{name}.onnx", original=folder / f"{original}.onnx")
    assert not report.findings
    assert not report.hint
    assert report.loss_scale == scale


def test_wrong_step() -> None:
    text, _, _ = hand_scaled.WRONG["a moment without a guard"]
    report = gs.lint(parse(text), original=parse(hand_scaled.ORIGINAL))
    assert {(each.code, each.value) for each in report.findings} == {("GS401", "m1")}


def test_hint() -> None:
    report = gs.lint(parse(hand_scaled.RIGHT))
    assert report.loss_scale == "scale"
    assert "with --original FILE" in report.hint
    assert not gs.lint(parse(hand_scaled.ORIGINAL)).hint
    assert not gs.lint(gs.scale(parse(hand_scaled.ORIGINAL)).model).hint


def test_file_of_ours() -> None:
    model = load_example("pytorch/mlp_momentum").model()
    with pytest.raises(gs.GraphscaleError, match="its original is for a file that somebody else scaled"):
        gs.lint(gs.scale(model).model, original=model)
