"""Models with weights in an external file: the place of the weights afterwards, and files that are never destroyed."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import onnx
import pytest

import graphscale as gs
from tests.build import BACKWARD, EXACT, FORWARD, parse
from tests.cli.command import contents, refuse, succeed
from tests.conftest import assert_all_same_bits, run_once

WEIGHTS = {"w1": (32, 48), "w2": (48, 10)}
FEEDS = {
    "x": np.random.default_rng(1).standard_normal((8, 32)).astype(np.float32),
    "t": np.random.default_rng(2).standard_normal((8, 10)).astype(np.float32),
}
STEP = f"""
    <ir_version: 10, opset_import: ["" : 20]>
    step (float[8,32] x, float[8,10] t) => (float loss, float[32,48] w1_next, float[48,10] w2_next)
        <float two_over_n = {{0.025}}, float one = {{1}}, float rate = {{0.1}}>
    {{
        {FORWARD} {BACKWARD}
        u1 = Mul(dw1, rate)
        w1_next = Sub(w1, u1)
        u2 = Mul(dw2, rate)
        w2_next = Sub(w2, u2)
    }}
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A step whose weights are initializers in `source/weights.bin`."""
    (tmp_path / "source").mkdir()
    path = tmp_path / "source" / "step.onnx"
    proto, random = parse(STEP), np.random.default_rng(0)
    for name, shape in WEIGHTS.items():
        array = random.standard_normal(shape).astype(np.float32)
        proto.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    onnx.save(proto, path, save_as_external_data=True, location="weights.bin", size_threshold=1024)
    assert path.stat().st_size < (path.parent / "weights.bin").stat().st_size
    return path


def assert_right(original: Path, scaled: Path) -> None:
    """The scaled step computes from its external weights what the original does."""
    expected, _ = run_once(original, FEEDS, EXACT)
    actual, _ = run_once(scaled, FEEDS, EXACT)
    assert_all_same_bits(actual, expected)
    assert actual["all_finite"]
    session = gs.Session(scaled)
    session.step(FEEDS)
    assert session.good_steps == 1


def test_into_the_same_folder(model: Path) -> None:
    output = model.with_name("scaled.onnx")
    weights = model.with_name("weights.bin").read_bytes()
    succeed(None, "scale", model, "-o", output)
    assert set(contents(model.parent)) == {"step.onnx", "scaled.onnx", "weights.bin"}
    assert model.with_name("weights.bin").read_bytes() == weights
    assert weights[:64] not in output.read_bytes()
    assert_right(model, output)


def test_into_another_folder(model: Path, tmp_path: Path) -> None:
    """The second result takes the place of the first, weights included."""
    (tmp_path / "out").mkdir()
    before = contents(model.parent)
    for _ in range(2):
        succeed(tmp_path, "scale", "source/step.onnx", "-o", "out/scaled.onnx")
        assert set(contents(tmp_path / "out")) == {"scaled.onnx", "scaled.onnx.data"}
        assert contents(model.parent) == before
    assert_right(model, tmp_path / "out" / "scaled.onnx")


def test_a_file_that_holds_much_else(model: Path, tmp_path: Path) -> None:
    """The weights alone go along, not the rest of a file that others use, too."""
    weights = model.with_name("weights.bin")
    used = weights.stat().st_size
    with weights.open("ab") as file:
        file.write(bytes(3 * used))
    (tmp_path / "out").mkdir()
    succeed(None, "scale", model, "-o", tmp_path / "out" / "scaled.onnx")
    assert (tmp_path / "out" / "scaled.onnx.data").stat().st_size <= 2 * used
    assert_right(model, tmp_path / "out" / "scaled.onnx")


def test_saving_leaves_the_model_as_it_is(model: Path, tmp_path: Path) -> None:
    """Its weights are still in the file that they were read from."""
    result = gs.scale(model)
    before = {name: value.const_value for name, value in result.model.graph.initializers.items()}
    (tmp_path / "out").mkdir()
    result.save(tmp_path / "out" / "scaled.onnx")
    assert {name: value.const_value for name, value in result.model.graph.initializers.items()} == before
    assert_right(model, tmp_path / "out" / "scaled.onnx")


def test_over_the_model_itself(model: Path, tmp_path: Path) -> None:
    original = tmp_path / "original"
    original.mkdir()
    for path in model.parent.iterdir():
        (original / path.name).write_bytes(path.read_bytes())
    succeed(None, "scale", model, "-o", model, "--force")
    assert set(contents(model.parent)) == {"step.onnx", "weights.bin"}
    assert_right(original / "step.onnx", model)


def test_in_memory(model: Path, tmp_path: Path) -> None:
    """A ModelProto brings its weights along, and leaves them in."""
    result = gs.scale(onnx.load(model))
    result.save(tmp_path / "scaled.onnx")
    assert not (tmp_path / "scaled.onnx.data").exists()
    assert_right(model, tmp_path / "scaled.onnx")


@pytest.mark.parametrize("damage", ["missing", "short"])
@pytest.mark.parametrize("folder", ["source", "out"])
def test_weights_that_are_not_there(damage: str, folder: str, model: Path, tmp_path: Path) -> None:
    out = tmp_path / folder
    out.mkdir(exist_ok=True)
    succeed(None, "scale", model, "-o", out / "scaled.onnx")
    weights = model.with_name("weights.bin")
    if damage == "missing":
        weights.unlink()
    else:
        weights.write_bytes(weights.read_bytes()[:100])
    refuse(tmp_path, "scale", model, "-o", out / "scaled.onnx", words=("weights.bin",))


@pytest.mark.parametrize("system", ["has no such call", "cannot between these file systems", "copies nothing"])
def test_weights_are_copied_where_the_system_does_not(
    system: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def other_file_system(*_: object) -> int:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    if system == "has no such call":
        monkeypatch.delattr(os, "copy_file_range", raising=False)
    else:
        replaced = other_file_system if "between" in system else lambda *_: 0
        monkeypatch.setattr(os, "copy_file_range", replaced, raising=False)
    output = tmp_path / "out.onnx"
    gs.scale(model).save(output)
    assert (tmp_path / "out.onnx.data").read_bytes() == (model.parent / "weights.bin").read_bytes()
