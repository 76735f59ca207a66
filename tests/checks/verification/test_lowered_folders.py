"""Lowered artifact folders for verify and strip: no alarm, and each damage is named."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import helper

import graphscale as gs
from graphscale.errors import ModelFileError
from graphscale.graph.original import ORIGINAL_KEY
from graphscale.lowering.lower_model import lower_step
from graphscale.ort.artifacts.strip_folder import strip_artifacts
from tests.checks.verification.damage import (
    FOLDERS,
    OPTIMIZER,
    SOURCE,
    STRANGER,
    TRAINING,
    Edit,
    all_nodes,
    constant,
    edit,
    faults,
    node,
    other_operands,
    rename_inside,
    reorder,
)
from tests.ort.artifacts.test_resume import assert_same_folder
from tests.session.plain import ALWAYS

pytestmark = [pytest.mark.static, pytest.mark.sample(1)]

NAMES = sorted(path.name for path in FOLDERS.iterdir())


@pytest.fixture(scope="module", autouse=True)
def small_thresholds() -> Iterator[None]:
    """Lower gradients of any size: those of models/ are small."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lower_step, "__defaults__", (ALWAYS,))
        yield


@pytest.fixture(scope="module")
def lowered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("lowered") / "scaled"
    gs.scale_artifacts(SOURCE, made, gs.DynamicLossScale(1024, 3))
    return made


@pytest.fixture
def folder(lowered: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(lowered, tmp_path / "scaled"))


@pytest.mark.parametrize("lower", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_both_forms_are_verified_and_stripped(name: str, lower: bool, tmp_path: Path) -> None:
    gs.scale_artifacts(FOLDERS / name, tmp_path / "scaled", lower=lower)
    assert faults(tmp_path / "scaled", FOLDERS / name) == ""
    assert len(strip_artifacts(tmp_path / "scaled", tmp_path / "stripped")) == 3
    assert_same_folder(tmp_path / "stripped", FOLDERS / name)


@pytest.mark.parametrize("change", [rename_inside, reorder])
def test_names_and_order_are_free(change: Edit, folder: Path) -> None:
    for file in (TRAINING, OPTIMIZER):
        edit(folder / file, change)
    assert faults(folder) == ""


def inner(op_type: str, change: Any, mark: str = "") -> Edit:
    """Change the first node of an operator in a body, by the pass that inserted its owner."""

    def apply(model: onnx.ModelProto) -> None:
        owners = [node for node in model.graph.node if f"/{mark}/" in node.name or not mark]
        bodies = [attribute.g for owner in owners for attribute in owner.attribute if attribute.HasField("g")]
        change(next(n for body in bodies for _, n in all_nodes(body) if n.op_type == op_type))

    return apply


def reads(at: int, name: str) -> Any:
    return lambda found: found.input.__setitem__(at, name)


def is_now(op_type: str) -> Any:
    return lambda found: found.__setattr__("op_type", op_type)


def number(key: str, value: float) -> Any:
    def change(found: onnx.NodeProto) -> None:
        del found.attribute[:]
        found.attribute.append(helper.make_attribute(key, value))

    return change


def on(op_type: str, change: Any) -> Edit:
    return lambda model: change(node(model, op_type))


DAMAGE: dict[str, tuple[str, Edit]] = {
    "limit": (TRAINING, constant("graphscale/bound-accumulation.limit", 3e38)),
    "largest": (TRAINING, constant("graphscale/bound-accumulation.largest_scale", 3.0)),
    "excess": (TRAINING, on("ThresholdedRelu", number("alpha", 3e38))),
    "half-bound": (TRAINING, on("ReduceL1", lambda n: n.__setattr__("op_type", "ReduceMax"))),
    "unbounded": (TRAINING, on("Clip", lambda n: n.__setattr__("op_type", "Max"))),
    "never-read": (TRAINING, inner("Div", is_now("Mul"), "bound-accumulation")),
    "other-buffer": (TRAINING, inner("InPlaceAccumulatorV2", reads(0, "fc1.bias_grad.accumulation.buffer"))),
    "no-reset": (TRAINING, inner("InPlaceAccumulatorV2", lambda n: n.input.pop(), "bound-accumulation")),
    "no-flag": (
        TRAINING,
        inner("InPlaceAccumulatorV2", reads(0, "fc2.weight_grad.accumulation.buffer"), "flag-window"),
    ),
    "finite-flag": (TRAINING, inner("Not", is_now("Identity"), "flag-window")),
    "first-position": (OPTIMIZER, constant("flag_position", 0.0)),
    "largest-gradient": (OPTIMIZER, inner("ReduceMin", is_now("ReduceMax"))),
    "one-not-looked-at": (OPTIMIZER, inner("SequenceAt", reads(1, "graphscale/index.1"))),
    "always-first": (OPTIMIZER, lambda m: node(m, "SequenceAt").input.__setitem__(1, "graphscale/index.0")),
    "always": (OPTIMIZER, lambda m: node(m, "Reshape").input.__setitem__(0, "any_nonfinite")),
}


@pytest.mark.sample(len(DAMAGE))
@pytest.mark.parametrize("name", DAMAGE)
def test_each_damage_is_found(name: str, folder: Path) -> None:
    file, change = DAMAGE[name]
    before = (folder / file).read_bytes()
    edit(folder / file, change)
    assert (folder / file).read_bytes() != before
    assert file in faults(folder)


@pytest.mark.full
def test_a_plain_model_in_a_lowered_folder(folder: Path, tmp_path: Path) -> None:
    """The optimizer model of the one with the training model of the other, both ways."""
    gs.scale_artifacts(SOURCE, tmp_path / "plain", gs.DynamicLossScale(1024, 3), lower=False)
    plain = Path(shutil.copytree(tmp_path / "plain", tmp_path / "mixed"))
    shutil.copy(folder / OPTIMIZER, plain / OPTIMIZER)
    shutil.copy(tmp_path / "plain" / OPTIMIZER, folder / OPTIMIZER)
    for mixed in (plain, folder):
        assert f"translation of {OPTIMIZER} not proved" in faults(mixed)


def test_a_squashed_gradient(folder: Path) -> None:
    def squash(model: onnx.ModelProto) -> None:
        gemm = next(n for n in model.graph.node if n.output[0] == "fc1.weight_grad")
        gemm.output[0] = "before"
        at = list(model.graph.node).index(gemm)
        model.graph.node.insert(at + 1, helper.make_node("Tanh", ["before"], ["fc1.weight_grad"], "squash"))

    edit(folder / TRAINING, squash)
    found = faults(folder)
    assert f"node 'squash' (Tanh) {STRANGER}" in found and f"translation of {TRAINING} not proved" in found


def test_a_folder_without_its_plain_form_is_not_stripped(folder: Path, tmp_path: Path) -> None:
    def forget(model: onnx.ModelProto) -> None:
        kept = [entry for entry in model.metadata_props if entry.key != ORIGINAL_KEY]
        del model.metadata_props[:]
        model.metadata_props.extend(kept)

    edit(folder / TRAINING, forget)
    assert "the record of the original is missing" in faults(folder)
    strip_artifacts(folder, tmp_path / "partly")
    edit(folder / TRAINING, lambda model: model.metadata_props.add(key=ORIGINAL_KEY, value="AAAA"))
    with pytest.raises(ModelFileError, match="cannot be stripped"):
        strip_artifacts(folder, tmp_path / "stripped")


@pytest.mark.full
@pytest.mark.parametrize("file", [TRAINING, OPTIMIZER])
def test_every_operand_counts(file: str, lowered: Path, tmp_path: Path) -> None:
    mutant = Path(shutil.copytree(lowered, tmp_path / "mutant"))
    for model in other_operands(onnx.load(lowered / file)):
        onnx.save(model, mutant / file)
        assert f"translation of {file} not proved" in faults(mutant)


@pytest.mark.parametrize("file", [TRAINING, OPTIMIZER])
def test_lint_looks_at_the_plain_form_that_gives_the_model(file: str, folder: Path) -> None:
    assert gs.lint(folder / file).findings == ()
    change = DAMAGE["limit" if file == TRAINING else "largest-gradient"][1]
    edit(folder / file, change)
    assert "GS503" in {finding.code for finding in gs.lint(folder / file).findings}
