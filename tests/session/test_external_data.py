"""Models with weights in an external file, in every form of argument."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest

import graphscale as gs
from graphscale.errors import GraphscaleError
from tests.cli.test_external_data import STEP, WEIGHTS
from tests.conftest import TARGETS, Arrays, assert_all_same_bits, run_once
from tests.session.digits import refused
from tests.session.plain import PlainLoop, options

pytestmark = pytest.mark.sample(2)

# A table that no step changes, besides the weights: the session of ONNX Runtime maps it from the file.
FROZEN = """
        lifted = MatMul(x, table)
        frozen_mean = ReduceMean<keepdims = 0>(lifted)
"""


def source(folder: Path, frozen: bool) -> Path:
    """A step with its weights, and perhaps a frozen table, in `weights.bin` beside it."""

    text = STEP
    if frozen:
        text = text.replace("h = MatMul(x, w1)", f"h = MatMul(x, w1) {FROZEN}")
        text = text.replace("(float loss,", "(float loss, float frozen_mean,")
    # Weights are inputs with initial values: so they can be fed back, and written in place.
    text = text.replace("float[8,10] t)", "float[8,10] t, float[32,48] w1, float[48,10] w2)")
    model = onnx.parser.parse_model(text)
    random = np.random.default_rng(0)
    for name, shape in {**WEIGHTS, **({"table": (32, 64)} if frozen else {})}.items():
        array = (0.2 * random.standard_normal(shape)).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    folder.mkdir(exist_ok=True)
    path = folder / "step.onnx"
    onnx.save(model, path, save_as_external_data=True, location="weights.bin", size_threshold=1024)
    assert (folder / "weights.bin").stat().st_size > path.stat().st_size
    return path


def as_path(source: Path, target: str, folder: Path) -> Path:
    path = source.with_name("scaled.onnx")
    gs.scale(source, target=target).save(path)
    return path


def as_path_elsewhere(source: Path, target: str, folder: Path) -> Path:
    gs.scale(source, target=target).save(folder / "scaled.onnx")
    assert (folder / "scaled.onnx.data").exists()
    shutil.rmtree(source.parent)
    return folder / "scaled.onnx"


def as_link(source: Path, target: str, folder: Path) -> Path:
    (folder / "link.onnx").symlink_to(as_path(source, target, folder))
    return folder / "link.onnx"


# The source, the target, and a folder for what else is needed.
FORMS: dict[str, Callable[[Path, str, Path], Any]] = {
    "path": as_path,
    "relative path": lambda *given: Path(os.path.relpath(as_path(*given))),
    "text": lambda *given: str(as_path(*given)),
    "path elsewhere": as_path_elsewhere,
    "link": as_link,
    "ScaledModel": lambda source, target, folder: gs.scale(source, target=target),
    "ir.Model": lambda source, target, folder: gs.scale(source, target=target).model,
    "ModelProto": lambda source, target, folder: gs.scale(onnx.load(source), target=target).model,
}
each_form = pytest.mark.parametrize("form", FORMS)


def feeds(seed: int) -> Arrays:
    random = np.random.default_rng(seed)
    x, t = (random.standard_normal(shape).astype(np.float32) for shape in ((8, 32), (8, 10)))
    return {"x": x, "t": t}


@each_form
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("frozen", [False, True], ids=["weights", "weights and a frozen table"])
def test_however_the_model_is_given(form: str, target: str, frozen: bool, tmp_path: Path) -> None:
    path = source(tmp_path / "source", frozen)
    plain = PlainLoop(gs.scale(onnx.load(path)), {})
    (tmp_path / "out").mkdir()
    model = FORMS[form](path, target, tmp_path / "out")
    before, serialized = contents(tmp_path), as_bytes(model)
    session = gs.Session(model, session_options=options())
    assert set(session.inputs) == {"x", "t"}
    for seed in range(4):
        expected, actual = plain.step(feeds(seed)), session.step(feeds(seed))
        assert set(actual) == set(expected)
        assert_all_same_bits(actual, expected)
    state = session.state_dict()
    assert_all_same_bits(state, {name: plain.state[name] for name in WEIGHTS})
    session.close()
    assert (contents(tmp_path), as_bytes(model)) == (before, serialized), "files and model are untouched"
    again = gs.Session(model, session_options=options())
    assert (again.state_dict()["w1"] != state["w1"]).any()


def as_bytes(model: Any) -> bytes | None:
    return model.SerializeToString(deterministic=True) if isinstance(model, onnx.ModelProto) else None


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@each_form
@pytest.mark.parametrize("target", TARGETS)
def test_an_export_stands_alone(form: str, target: str, tmp_path: Path) -> None:
    """It goes on from the present state when the model that it came from is gone."""
    path = source(tmp_path / "source", frozen=True)
    (tmp_path / "out").mkdir()
    session = gs.Session(FORMS[form](path, target, tmp_path / "out"), session_options=options())
    for seed in range(3):
        session.step(feeds(seed))
    (tmp_path / "export").mkdir()
    session.export(tmp_path / "export" / "step.onnx")
    for folder in ("source", "out"):
        shutil.rmtree(tmp_path / folder, ignore_errors=True)
    assert {name.split(".")[0] for name in os.listdir(tmp_path / "export")} == {"step"}
    other = gs.Session(tmp_path / "export" / "step.onnx", session_options=options())
    for seed in range(3, 6):
        assert_all_same_bits(other.step(feeds(seed)), session.step(feeds(seed)))
    assert_all_same_bits(other.state_dict(), session.state_dict())


def test_an_export_over_the_model_itself(tmp_path: Path) -> None:
    """The session has mapped its weights; they are replaced only when the new file is whole."""
    path = as_path(source(tmp_path / "source", frozen=True), "onnx", tmp_path)
    session = gs.Session(path, session_options=options())
    for seed in range(5):
        session.step(feeds(seed))
        session.export(path)
        other = gs.Session(path, session_options=options())
        assert_all_same_bits(other.state_dict(), session.state_dict())
        assert_all_same_bits(other.step(feeds(9), fetch=["frozen_mean"]), {"frozen_mean": mean_of(path)})


def mean_of(path: Path) -> np.ndarray:
    """Apply the frozen table of the original to a batch."""
    model = onnx.load(path.with_name("step.onnx"))
    table = next(onnx.numpy_helper.to_array(t) for t in model.graph.initializer if t.name == "table")
    lifted = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["" : 20]>
        g (float[8,32] x, float[32,64] table) => (float m) { l = MatMul(x, table)  m = ReduceMean<keepdims = 0>(l) }"""
    )
    return run_once(lifted, {"x": feeds(9)["x"], "table": table})[0]["m"]


@pytest.mark.parametrize("damage", ["missing", "short", "gone from under a model in memory"])
def test_weights_that_are_not_there(damage: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = as_path(source(tmp_path / "source", frozen=True), "onnx", tmp_path)
    weights = path.with_name("weights.bin")
    model = path if damage in ("missing", "short") else gs.scale(path.with_name("step.onnx"), loss="loss")
    if damage == "short":
        weights.write_bytes(weights.read_bytes()[:100])
    else:
        weights.unlink()
    with refused(GraphscaleError, ("weights.bin",)):
        gs.Session(model)
    assert capfd.readouterr() == ("", "")
