"""Each lowering pass's work as text: golden/PASS.onnxtxt is the step after it, and the next one's before.

golden/training and golden/optimizer hold the two models of an artifact folder.

After a wanted change: `UPDATE_GOLDEN=1 python -m pytest tests/lowering/test_golden.py`, and read the difference.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import onnx
import onnx_ir as ir
import pytest

import graphscale as gs
from graphscale.lowering.lower_model import ORDER
from graphscale.lowering.read_flag import ReadFlag
from tests.build import linear_step
from tests.conftest import MODELS
from tests.lowering.test_small_gradients import BACKWARD, LARGE, SGD, STATE
from tests.passes.test_golden import text_of
from tests.session.plain import ALWAYS

pytestmark = pytest.mark.static

GOLDEN = Path(__file__).parent / "golden"
SIZES = dataclasses.replace(ALWAYS, bound_elements=LARGE, probe_elements=LARGE)


def scaled_step() -> ir.Model:
    """A scaled step with a large gradient and two small ones, and an output that can fail."""
    model = linear_step(
        f"{SGD.format(rate='rate')} flat = Reshape(y, row)",
        inputs="float[4,3] w, float[3] b, float[1,3] c",
        outputs="float[4,3] w_next, float[3] b_next, float[1,3] c_next, float[24] flat",
        backward=BACKWARD,
        constants="int64[1] first = {0}, int64[1] row = {24}, float rate = {0.125}",
    )
    model = onnx.shape_inference.infer_shapes(model, strict_mode=True)
    result = gs.scale(model, gs.DynamicLossScale(1024.0, 3), updates={f"{name}_next": name for name in STATE})
    return ir.from_proto(result.model)


def compare(name: str, model: ir.Model) -> None:
    # ONNX's parser does not read the bodies of an If.
    path, text = GOLDEN / f"{name}.onnxtxt", text_of(model)
    if os.environ.get("UPDATE_GOLDEN"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert path.read_text(encoding="utf-8") == text


def test_before_and_after() -> None:
    model = scaled_step()
    compare("scaled", model)
    for kind in ORDER["cpu"]:
        assert kind(SIZES)(model).modified, kind.name
        compare(kind.name, model)


def test_models_of_an_artifact_folder(tmp_path: Path) -> None:
    gs.scale_artifacts(MODELS / "ort" / "artifacts" / "digits_sgd", tmp_path / "scaled", lower=False)
    for name in ("training", "optimizer"):
        model = ir.load(tmp_path / "scaled" / f"{name}_model.onnx")
        compare(f"{name}/scaled", model)
        for kind in ORDER["training"]:
            is_for_optimizer = kind is ReadFlag
            assert kind(SIZES)(model).modified is (is_for_optimizer == (name == "optimizer")), kind.name
            if is_for_optimizer == (name == "optimizer"):
                compare(f"{name}/{kind.name}", model)


def test_no_text_without_a_pass() -> None:
    folders = {"training": [k for k in ORDER["training"] if k is not ReadFlag], "optimizer": [ReadFlag]}
    named = {f"{folder}/{name}" for folder, kinds in folders.items() for name in ("scaled", *(k.name for k in kinds))}
    named |= {"scaled", *(kind.name for kind in ORDER["cpu"])}
    assert {path.relative_to(GOLDEN).with_suffix("").as_posix() for path in GOLDEN.rglob("*.onnxtxt")} == named
